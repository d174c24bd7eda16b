"""Makes machine code for this CPU, and makes it known to XLA."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import binding, ir

from pallas_kernels.native.emit import FLOAT, HALF
from pallas_kernels.native.handler import handler

KINDS = {"float32": FLOAT, "bfloat16": HALF}
Emit = Callable[[ir.Module, str, ir.Type], None]  # (module, name, kind): puts an operation into a module, see `handler`


@functools.cache
def has_feature(name: str) -> bool:
    """Whether this CPU has a feature, by LLVM's name of it: avx512bf16, amx-bf16. Other kinds of CPUs have none."""
    return binding.get_host_cpu_features().get(name, False)


def in_pairs(kind: ir.Type) -> bool:
    """Whether this CPU multiplies numbers of a kind in pairs, see `Builder.add_products_of_pairs`."""
    return kind is HALF and has_feature("avx512bf16")


class Operation:
    """An operation on float32 and on bfloat16, or on one of them."""

    def __init__(self, name: str, emit: Emit, dtypes: Sequence[str] = tuple(KINDS)):
        self.name = name
        for dtype in dtypes:
            _to_compile[f"dsjax.{name}.{dtype}"] = emit, KINDS[dtype]

    def __call__(
        self,
        dtype: jnp.dtype,
        results: Any,
        *operands: jax.Array | np.ndarray,
        updated: Mapping[int, int] = MappingProxyType({}),
    ) -> Any:
        """In what is traced for a CPU. `results` are shapes, of one result or a tuple. An operand in `updated` is
        written in place: it and the result of the number that it maps to are one array."""
        register()
        call = jax.ffi.ffi_call(f"dsjax.{self.name}.{dtype.name}", results, input_output_aliases=dict(updated))
        return call(*operands)


def register() -> None:
    """Compiles the operations that are not yet, and makes them known to XLA: half a second, once a process.

    To be called before a program that uses them is loaded; where one is traced, an operation does it.
    """
    with _lock:
        while _to_compile:
            name, (emit, kind) = _to_compile.popitem()
            _compile(name, emit, kind)


def _compile(name: str, emit: Emit, kind: ir.Type) -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=2
    )
    code = ir.Module(name)
    emit(code, name, kind)
    module = binding.parse_assembly(str(code))
    module.link_in(binding.parse_assembly(handler(name)))
    module.verify()
    # No passes over it: what is emitted is as it should run, and they take longer than all the rest.
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _compiled.append(engine)
    jax.ffi.register_ffi_target(name, _capsule(engine.get_function_address(name)), platform="cpu")


_lock = threading.Lock()  # programs are traced in several threads; LLVM is for one at a time
_to_compile: dict[str, tuple[Emit, ir.Type]] = {}
_compiled: list[binding.ExecutionEngine] = []  # their code is called as long as the process lives


def _capsule(address: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, b"xla._CUSTOM_CALL_TARGET", None)
