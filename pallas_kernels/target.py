"""Which machine a kernel is for. It is passed in, never asked for: what compiles ahead of time runs elsewhere.

Operations that every part of the model uses take it from `traced_for`, which a program's outermost function sets.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_GENERATIONS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}  # by JAX's device_kind
_ARCHITECTURES = {"9.0": "sm_90a", "10.0": "sm_100a"}  # by compute capability: H100, H200; B200
HOST = "host"


@dataclass(frozen=True)
class Target:
    """`generation` is v5e, v5p, v6e or tpu7x of a TPU, sm_90a or sm_100a of a GPU, host of the CPU that this runs on,
    empty for all other devices; `interpret` runs a device's kernels on a CPU."""

    platform: str  # cpu, tpu or gpu
    generation: str = ""
    interpret: bool = False

    @classmethod
    def of(cls, device: Any) -> Target:
        """Of a device, or of the description of one in a topology."""
        platform = str({"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform))
        if platform == "gpu":
            return cls(platform, _ARCHITECTURES.get(getattr(device, "compute_capability", ""), ""))
        if platform == "cpu":
            return cls(platform, HOST)
        return cls(platform, _GENERATIONS.get(device.device_kind, "") if platform == "tpu" else "")

    @property
    def has_tpu_kernels(self) -> bool:
        return self.platform == "tpu" and bool(self.generation)

    @property
    def has_native_kernels(self) -> bool:
        return self.platform == "cpu" and self.generation == HOST

    @property
    def has_gpu_kernels(self) -> bool:
        """They are written in the Mosaic GPU of JAX 0.12."""
        return self.platform == "gpu" and bool(self.generation) and jax.__version_info__ >= (0, 12)


CPU = Target("cpu")
_traced = contextvars.ContextVar("traced", default=CPU)


@contextlib.contextmanager
def traced_for(target: Target) -> Iterator[None]:
    """What is traced in it is for `target`, also the operations that are not told: products, norms, rotations. Outside,
    these are XLA's, which can be differentiated."""
    token = _traced.set(target)
    try:
        yield
    finally:
        _traced.reset(token)


def traced_target() -> Target:
    return _traced.get()


def dot_precision(dtype: Any) -> lax.Precision:
    """Of a kernel's matmul: exact for float32. The model's default, highest, is refused for bfloat16 operands."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
