"""Hyper-connections on a CPU in machine code of our own: four streams, float32 or bfloat16.

As XLA operations a site is forty small ones, which take longer to begin than to do, and a copy of its weights in
another order. Here it is three: `sums` has the products that the mixing weights are made of and the streams' squares,
`read` makes the weights and reads the block's input by them, `write` mixes the block's output in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, LANES, Builder, Value, long
from pallas_kernels.native.machine_code import KINDS, Operation
from pallas_kernels.native.operands import data, dim, items, result
from pallas_kernels.target import Target

if TYPE_CHECKING:
    from pallas_kernels.mhc_mix.api import MixConfig

STREAMS = 4
_MIXES = (2 + STREAMS) * STREAMS  # mixing weights
_ROWS = 6  # of `fn`, that are multiplied at once: with 4 tokens 24 sums in registers
_TOKENS = (4, 1)  # that are multiplied at once
_AHEAD = 256  # columns in advance that fn is asked for


def supports(streams: jax.Array, target: Target) -> bool:
    """Whether the kernels take these."""
    return (
        target.has_native_kernels
        and streams.shape[0] == STREAMS
        and streams.shape[2] % LANES == 0
        and streams.dtype.name in KINDS
    )


def mhc_read(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, config: MixConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `api.mhc_read`."""
    s, tokens, width = streams.shape
    sums = _SUMS(streams.dtype, jax.ShapeDtypeStruct((_MIXES + 1, tokens), jnp.float32), streams, fn)
    shapes = (
        jax.ShapeDtypeStruct((tokens, width), streams.dtype),
        jax.ShapeDtypeStruct((s, tokens), jnp.float32),
        jax.ShapeDtypeStruct((s, s, tokens), jnp.float32),
    )
    constants = np.array([config.eps, config.norm_eps, 1 / (s * width)], np.float32)
    rounds = np.array([config.sinkhorn_iters - 1], np.int32)
    return _READ(streams.dtype, shapes, streams, sums, base, scale, constants, rounds)


def mhc_write(streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """As `api.mhc_write`."""
    shape = jax.ShapeDtypeStruct(streams.shape, streams.dtype)
    return _WRITE(streams.dtype, shape, streams, out.astype(streams.dtype), post, comb)


def _sums(module: ir.Module, name: str, kind: ir.Type) -> None:
    """streams [S, T, D], fn [24, S * D] -> [25, T]: fn times each token's streams, and their squares' sum."""
    b, frame, first, stop = items(module, name, _num_tokens, size=4)
    tokens, width = dim(b, frame, 0, 1), dim(b, frame, 0, 2)
    streams, weights, out = data(b, frame, 0), data(b, frame, 1), result(b, frame, 0)
    whole = b.mul(width, long(STREAMS))

    def times(row: Value, rows: int) -> None:
        """The item's tokens times `rows` rows of fn from `row` on, or if that is 0 times themselves."""
        fn = b.element(weights, b.mul(row, whole), FLOAT)
        token = first
        for count in _TOKENS:

            def fits(token: Value, count: int = count) -> Value:
                return b.icmp_signed("<=", b.add(token, long(count)), stop)

            def multiply(token: Value, count: int = count) -> None:
                sums = _products(b, kind, streams, fn, token, tokens, width, count, rows)
                for i, value in enumerate(sums):
                    r, t = divmod(i, count)
                    at = b.add(b.mul(b.add(row, long(r)), tokens), b.add(token, long(t)))
                    b.store(value, b.element(out, at, FLOAT))

            token, _ = b.loop(token, fits, count, multiply)

    b.loop(long(0), lambda row: b.icmp_signed("<", row, long(_MIXES)), _ROWS, lambda row: times(row, _ROWS))
    times(long(_MIXES), 0)
    b.ret_void()


def _num_tokens(b: Builder, frame: Value) -> Value:
    return dim(b, frame, 0, 1)


def _products(
    b: Builder,
    kind: ir.Type,
    streams: Value,
    fn: Value,  # its first row that counts
    token: Value,  # the first of them
    tokens: Value,
    width: Value,
    count: int,
    rows: int,
) -> list[Value]:
    """The sums of `count` tokens' streams times `rows` rows of fn, or if that is 0 times themselves: [rows * count]."""
    zero = numbers.constant(0.0)
    size = max(rows, 1) * count
    whole = b.mul(width, long(STREAMS))

    def of_stream(s: Value, *sums: Value) -> list[Value]:
        start = b.mul(b.add(b.mul(s, tokens), token), width)
        column = b.mul(s, width)

        def step(d: Value, *sums: Value) -> list[Value]:
            at = b.add(start, d)
            x = [b.vector(b.element(streams, b.add(at, b.mul(width, long(t))), kind), kind) for t in range(count)]
            if not rows:
                return [b.fused_multiply_add(x[t], x[t], sums[t]) for t in range(count)]
            new = []
            for r in range(rows):
                of_row = b.element(fn, b.add(b.add(b.mul(whole, long(r)), column), d), FLOAT)
                b.prefetch(b.element(of_row, long(_AHEAD), FLOAT))
                factor = b.vector(of_row, FLOAT)
                new += [b.fused_multiply_add(factor, x[t], sums[r * count + t]) for t in range(count)]
            return new

        return b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES, step, sums)[1]

    _, sums = b.loop(long(0), lambda s: b.icmp_signed("<", s, long(STREAMS)), 1, of_stream, [zero] * size)
    found = []
    for i in range(0, size, LANES):
        some = sums[i : i + LANES]
        total = numbers.totals(b, some + [zero] * (LANES - len(some)))
        found += [numbers.lane(b, total, j) for j in range(len(some))]
    return found


def _read(module: ir.Module, name: str, kind: ir.Type) -> None:
    """streams, sums [25, T], base [24], scale [3], [eps, norm_eps, 1 / (S * D)], [rounds] -> x [T, D], post [S, T],
    comb [S, S, T]."""
    b, frame, first, stop = items(module, name, _num_tokens, size=8, most=8)
    b.loop(first, lambda token: b.icmp_signed("<", token, stop), 1, lambda token: _read_token(b, frame, token, kind))
    b.ret_void()


def _read_token(b: Builder, frame: Value, token: Value, kind: ir.Type) -> None:
    tokens, width = dim(b, frame, 0, 1), dim(b, frame, 0, 2)
    streams, sums, base, scale, constants, rounds = (data(b, frame, i) for i in range(6))
    x, post, comb = (result(b, frame, i) for i in range(3))

    def number(array: Value, i: int) -> Value:
        return b.load(b.element(array, long(i), FLOAT), typ=FLOAT)

    def of_token(array: Value, i: int) -> Value:
        return b.element(array, b.add(b.mul(tokens, long(i)), token), FLOAT)

    def mixed(first: int, count: int, scales: Value) -> Value:
        z = numbers.gathered(b, [b.load(of_token(sums, first + i), typ=FLOAT) for i in range(count)])
        offset = numbers.gathered(b, [number(base, first + i) for i in range(count)])
        return b.fused_multiply_add(z, b.fmul(norm, scales), offset)

    eps = b.spread(number(constants, 0))
    square = b.load(of_token(sums, _MIXES), typ=FLOAT)
    variance = b.fadd(b.fmul(square, number(constants, 2)), number(constants, 1))
    root = b.call(b.intrinsic("llvm.sqrt.f32", FLOAT, [FLOAT]), [variance])
    norm = b.spread(b.fdiv(ir.Constant(FLOAT, 1.0), root))
    of_read, of_write, of_mix = (b.spread(number(scale, i)) for i in range(3))
    scales = numbers.pick(b, of_read, [0] * STREAMS + [LANES] * (LANES - STREAMS), of_write)
    shares = numbers.sigmoid(b, mixed(0, 2 * STREAMS, scales))
    reading = b.fadd(shares, eps)
    writing = b.fadd(shares, shares)
    for i in range(STREAMS):
        b.store(numbers.lane(b, writing, STREAMS + i), of_token(post, i))
    matrix = b.fadd(_softmax(b, mixed(2 * STREAMS, STREAMS * STREAMS, of_mix)), eps)

    def normalised(distances: tuple[int, ...]) -> Callable[[Value], Value]:
        return lambda m: b.fdiv(m, b.fadd(numbers.across(b, m, distances, b.fadd), eps))

    rows, columns = normalised((1, 2)), normalised((4, 8))
    count = b.integer(rounds, long(0))
    _, (matrix,) = b.loop(
        long(0), lambda i: b.icmp_signed("<", i, count), 1, lambda _, m: [columns(rows(m))], [columns(matrix)]
    )
    for i in range(STREAMS * STREAMS):
        b.store(numbers.lane(b, matrix, i), of_token(comb, i))
    weights = [b.spread(numbers.lane(b, reading, s)) for s in range(STREAMS)]

    def sum_streams(d: Value) -> None:
        total = numbers.constant(0.0)
        for s, weight in enumerate(weights):
            total = b.fused_multiply_add(weight, _of_stream(b, streams, s, token, tokens, width, d, kind), total)
        numbers.store(b, total, b.element(x, b.add(b.mul(token, width), d), kind), kind)

    b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES, sum_streams)


def _softmax(b: Builder, matrix: Value) -> Value:
    """Of each row of a 4 x 4 matrix."""
    top = numbers.across(b, matrix, (1, 2), lambda x, y: numbers.largest(b, x, y))
    shares = numbers.exp(b, b.fsub(matrix, top))
    return b.fdiv(shares, numbers.across(b, shares, (1, 2), b.fadd))


def _write(module: ir.Module, name: str, kind: ir.Type) -> None:
    """streams, out [T, D], post [S, T], comb [S, S, T] -> streams."""
    b, frame, first, stop = items(module, name, _num_tokens, size=8, most=8)
    b.loop(first, lambda token: b.icmp_signed("<", token, stop), 1, lambda token: _write_token(b, frame, token, kind))
    b.ret_void()


def _write_token(b: Builder, frame: Value, token: Value, kind: ir.Type) -> None:
    tokens, width = dim(b, frame, 0, 1), dim(b, frame, 0, 2)
    streams, added, post, comb = (data(b, frame, i) for i in range(4))
    mixed = result(b, frame, 0)

    def weight(array: Value, i: int) -> Value:
        at = b.element(array, b.add(b.mul(tokens, long(i)), token), FLOAT)
        return b.splat(at)

    posts = [weight(post, k) for k in range(STREAMS)]
    combs = [[weight(comb, STREAMS * j + k) for k in range(STREAMS)] for j in range(STREAMS)]

    def step(d: Value) -> None:
        rows = [_of_stream(b, streams, j, token, tokens, width, d, kind) for j in range(STREAMS)]
        out = b.vector(b.element(added, b.add(b.mul(token, width), d), kind), kind)
        for k in range(STREAMS):
            total = b.fmul(posts[k], out)
            for j, row in enumerate(rows):
                total = b.fused_multiply_add(combs[j][k], row, total)
            at = b.add(b.mul(b.add(b.mul(tokens, long(k)), token), width), d)
            numbers.store(b, total, b.element(mixed, at, kind), kind)

    b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES, step)


def _of_stream(
    b: Builder,
    streams: Value,
    s: int,
    token: Value,
    tokens: Value,
    width: Value,
    d: Value,
    kind: ir.Type,
) -> Value:
    """Sixteen columns of a token's s-th stream."""
    at = b.add(b.mul(b.add(b.mul(tokens, long(s)), token), width), d)
    return b.vector(b.element(streams, at, kind), kind)


_SUMS, _READ, _WRITE = Operation("mhc.sums", _sums), Operation("mhc.read", _read), Operation("mhc.write", _write)
