"""The operation in machine code of our own: one pass, where XLA's CPU makes five of slices and joins."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, LANES, VECTOR, Builder, Value, long
from pallas_kernels.native.entries import each
from pallas_kernels.native.machine_code import KINDS, Operation
from pallas_kernels.native.operands import data, dim, items, result

_SMALL = 1 << 15  # numbers, below which several tokens are an item
_PAIRS = LANES // 2
_COSINES = ir.VectorType(FLOAT, _PAIRS)


def supports(x: jax.Array, half: int) -> bool:
    """Whether the kernel takes x [T, ..., d], of which the last 2 * half channels are rotated."""
    return x.dtype.name in KINDS and x.ndim > 1 and x.shape[-1] % LANES == 0 and half % _PAIRS == 0


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, eps: float | None) -> jax.Array:
    """As `api.rotate`."""
    operation = _ROTATE if eps is None else _NORMALISE_AND_ROTATE
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    shape = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    table = (t.astype(jnp.float32) for t in (cos, sin))
    return operation(x.dtype, shape, rows, *table, np.array([eps or 0.0], np.float32)).reshape(x.shape)


def _emit(module: ir.Module, name: str, kind: ir.Type, normalises: bool) -> None:
    """x [T, N, d], cosines and sines [T, r / 2], epsilon [1] -> [T, N, d]. A unit is a token."""

    def size(b: Builder, frame: Value) -> Value:
        return b.add(b.udiv(long(_SMALL), b.mul(dim(b, frame, 0, 1), dim(b, frame, 0, 2))), long(1))

    def most(b: Builder, frame: Value) -> Value:
        return b.mul(size(b, frame), long(2))

    b, frame, first, stop = items(module, name, lambda b, frame: dim(b, frame, 0, 0), size=size, most=most)
    heads, width, half = dim(b, frame, 0, 1), dim(b, frame, 0, 2), dim(b, frame, 1, 1)
    x, cos, sin, eps, out = *(data(b, frame, i) for i in range(4)), result(b, frame, 0)
    still = b.sub(width, b.mul(half, long(2)))  # channels that are not rotated
    signs = ir.Constant(VECTOR, [-1.0, 1.0] * _PAIRS)
    twice = [i // 2 for i in range(LANES)]

    def token(t: Value) -> None:
        def head(n: Value) -> None:
            start = b.mul(b.add(b.mul(t, heads), n), width)
            factor = _inverse_of_rms(b, kind, b.element(x, start, kind), width, eps) if normalises else None

            def scaled(d: Value) -> Value:
                found = b.vector(b.element(x, b.add(start, d), kind), kind)
                return found if factor is None else b.fmul(found, factor)

            def keep(d: Value) -> None:
                numbers.store(b, scaled(d), b.element(out, b.add(start, d), kind), kind)

            def turn(d: Value) -> None:
                at = b.add(b.mul(t, half), b.udiv(d, long(2)))
                c, s = (b.load(b.element(table, at, FLOAT), align=4, typ=_COSINES) for table in (cos, sin))
                c, s = numbers.pick(b, c, twice), b.fmul(numbers.pick(b, s, twice), signs)
                of = scaled(b.add(still, d))
                other = numbers.pick(b, of, [i ^ 1 for i in range(LANES)])
                turned = b.fused_multiply_add(other, s, b.fmul(of, c))
                numbers.store(b, turned, b.element(out, b.add(b.add(start, still), d), kind), kind)

            each(b, still, keep, LANES)
            each(b, b.mul(half, long(2)), turn, LANES)

        each(b, heads, head)

    b.loop(first, lambda t: b.icmp_signed("<", t, stop), 1, token)
    b.ret_void()


def _inverse_of_rms(b: Builder, kind: ir.Type, x: Value, width: Value, eps: Value) -> Value:
    """16 times."""

    def add(d: Value, sums: Value) -> list[Value]:
        some = b.vector(b.element(x, d, kind), kind)
        return [b.fused_multiply_add(some, some, sums)]

    _, (sums,) = b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES, add, [numbers.constant(0.0)])
    sums = numbers.across(b, sums, (8, 4, 2, 1), b.fadd)
    mean = b.fdiv(sums, b.spread(b.sitofp(width, FLOAT)))
    root = b.call(b.intrinsic("llvm.sqrt.v16f32", VECTOR, [VECTOR]), [b.fadd(mean, b.splat(eps))])
    return b.fdiv(numbers.constant(1.0), root)


_ROTATE = Operation("rotate", functools.partial(_emit, normalises=False))
_NORMALISE_AND_ROTATE = Operation("normalise_and_rotate", functools.partial(_emit, normalises=True))
