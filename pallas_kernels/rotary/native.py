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
from pallas_kernels.rms_norm.native import inverse_of_rms

_SMALL = 1 << 15  # numbers, below which several tokens are an item
_PAIRS = LANES // 2
_COSINES = ir.VectorType(FLOAT, _PAIRS)


def supports(x: jax.Array, half: int, dtype: jnp.dtype | None = None) -> bool:
    """Whether the kernel takes x [T, ..., d], of which the last 2 * half channels are rotated, for a result in `dtype`:
    x's own, or any of x in float32."""
    fits = x.ndim > 1 and x.shape[-1] % LANES == 0 and half % _PAIRS == 0
    dtypes = (x.dtype.name, (dtype or x.dtype).name)
    return fits and dtypes[1] in KINDS and dtypes[0] in ("float32", dtypes[1])


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As `api.rotate`."""
    return _call(_ROTATE, x.dtype, x, cos, sin)


def normalise_and_rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, eps: float, scale: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """As `api.normalise_and_rotate`."""
    operation = _NORMALISE_AND_ROTATE if x.dtype == dtype else _NORMALISE_FLOATS_AND_ROTATE
    factors = np.ones(x.shape[-1:], np.float32) if scale is None else scale.astype(jnp.float32)
    return _call(operation, dtype, x, cos, sin, factors, np.array([eps], np.float32))


def _call(
    operation: Operation,
    dtype: jnp.dtype,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *norm: jax.Array | np.ndarray,
) -> jax.Array:
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    table = (t.astype(jnp.float32) for t in (cos, sin))
    return operation(dtype, jax.ShapeDtypeStruct(rows.shape, dtype), rows, *table, *norm).reshape(x.shape)


def _emit(module: ir.Module, name: str, kind: ir.Type, normalises: bool, takes_floats: bool = False) -> None:
    """x [T, N, d], cosines and sines [T, r / 2] -> [T, N, d]. A unit is a token.

    If it normalises, two operands more: scale [d], epsilon [1].
    """
    kind_of_x = FLOAT if takes_floats else kind

    def size(b: Builder, frame: Value) -> Value:
        return b.add(b.udiv(long(_SMALL), b.mul(dim(b, frame, 0, 1), dim(b, frame, 0, 2))), long(1))

    b, frame, first, stop = items(module, name, lambda b, frame: dim(b, frame, 0, 0), size=size)
    heads, width, half = dim(b, frame, 0, 1), dim(b, frame, 0, 2), dim(b, frame, 1, 1)
    x, cos, sin, out = *(data(b, frame, i) for i in range(3)), result(b, frame, 0)
    scale, eps = (data(b, frame, i) for i in (3, 4)) if normalises else (None, None)
    still = b.sub(width, b.mul(half, long(2)))  # channels that are not rotated
    signs = ir.Constant(VECTOR, [-1.0, 1.0] * _PAIRS)
    twice = [i // 2 for i in range(LANES)]

    def token(t: Value) -> None:
        def head(n: Value) -> None:
            start = b.mul(b.add(b.mul(t, heads), n), width)
            of_head = b.element(x, start, kind_of_x)
            factor = inverse_of_rms(b, kind_of_x, of_head, width, eps) if normalises else None

            def scaled(d: Value) -> Value:
                found = b.vector(b.element(of_head, d, kind_of_x), kind_of_x)
                if factor is None:
                    return found
                return b.fmul(b.fmul(found, factor), b.vector(b.element(scale, d, FLOAT), FLOAT))

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


_ROTATE = Operation("rotate", functools.partial(_emit, normalises=False))
_NORMALISE_AND_ROTATE = Operation("normalise_and_rotate", functools.partial(_emit, normalises=True))
_NORMALISE_FLOATS_AND_ROTATE = Operation(
    "normalise_floats_and_rotate", functools.partial(_emit, normalises=True, takes_floats=True), ("bfloat16",)
)
