"""The operation in machine code of our own: one call, where XLA's CPU makes three or four of the sum and the scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, LANES, VECTOR, Builder, Value, long
from pallas_kernels.native.entries import each
from pallas_kernels.native.machine_code import KINDS, Operation
from pallas_kernels.native.operands import data, dim, items, result

_SMALL = 1 << 16  # numbers, below which several rows are an item


def supports(x: jax.Array) -> bool:
    """Whether the kernel takes x [..., d]."""
    return x.dtype.name in KINDS and x.shape[-1] % LANES == 0


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """As `api.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    return _RMS_NORM(x.dtype, shape, rows, scale.astype(jnp.float32), np.array([eps], np.float32)).reshape(x.shape)


def inverse_of_rms(b: Builder, kind: ir.Type, x: Value, width: Value, eps: Value) -> Value:
    """1 / rms(x) of `width` numbers at x, 16 times; `eps` is where a float lies that is added to the mean."""

    def add(d: Value, sums: Value) -> list[Value]:
        some = b.vector(b.element(x, d, kind), kind)
        return [b.fused_multiply_add(some, some, sums)]

    _, (sums,) = b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES, add, [numbers.constant(0.0)])
    sums = numbers.across(b, sums, (8, 4, 2, 1), b.fadd)
    mean = b.fdiv(sums, b.spread(b.sitofp(width, FLOAT)))
    root = b.call(b.intrinsic("llvm.sqrt.v16f32", VECTOR, [VECTOR]), [b.fadd(mean, b.splat(eps))])
    return b.fdiv(numbers.constant(1.0), root)


def _emit(module: ir.Module, name: str, kind: ir.Type) -> None:
    """x [T, d], scale [d], epsilon [1] -> [T, d]. A unit is a row."""

    def size(b: Builder, frame: Value) -> Value:
        return b.add(b.udiv(long(_SMALL), dim(b, frame, 0, 1)), long(1))

    b, frame, first, stop = items(module, name, lambda b, frame: dim(b, frame, 0, 0), size=size)
    width = dim(b, frame, 0, 1)
    x, scale, eps, out = *(data(b, frame, i) for i in range(3)), result(b, frame, 0)

    def row(t: Value) -> None:
        start = b.mul(t, width)
        factor = inverse_of_rms(b, kind, b.element(x, start, kind), width, eps)

        def sixteen(d: Value) -> None:
            at = b.add(start, d)
            of_row = b.fmul(b.vector(b.element(x, at, kind), kind), factor)
            scaled = b.fmul(of_row, b.vector(b.element(scale, d, FLOAT), FLOAT))
            numbers.store(b, scaled, b.element(out, at, kind), kind)

        each(b, width, sixteen, LANES)

    b.loop(first, lambda t: b.icmp_signed("<", t, stop), 1, row)
    b.ret_void()


_RMS_NORM = Operation("rms_norm", _emit)
