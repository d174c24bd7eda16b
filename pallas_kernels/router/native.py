"""The operation in machine code of our own: one pass over a token's logits, where XLA's CPU makes ten operations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, INT, LANES, LONG, VECTOR, Builder, Value, long
from pallas_kernels.native.entries import each, room
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native.operands import data, dim, items, result, result_dim

_SMALL = 1 << 14  # logits of an item, some 20 microseconds; a token counts as `_OF_TOKEN` more
_OF_TOKEN = 64
_INTS = ir.VectorType(INT, LANES)
_LEAST, _MOST = -(2**31), 2**31 - 1


def by_score(
    logits: jax.Array, bias: jax.Array, k: int, scale: float, num_tokens: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """As `api.by_score`."""
    return _BY_SCORE(logits.dtype, _shapes(logits, k), logits, *_constants(logits, scale, num_tokens), bias)


def by_table(
    logits: jax.Array, table: jax.Array, token_ids: jax.Array, scale: float, num_tokens: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """As `api.by_table`."""
    operands = *_constants(logits, scale, num_tokens), table, token_ids
    return _BY_TABLE(logits.dtype, _shapes(logits, table.shape[1]), logits, *operands)


def _shapes(logits: jax.Array, k: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shape = logits.shape[0], k
    return jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)


def _constants(
    logits: jax.Array, scale: float, num_tokens: jax.Array | None
) -> tuple[np.ndarray, jax.Array | np.ndarray]:
    count = np.array([logits.shape[0]], np.int32) if num_tokens is None else num_tokens.astype(jnp.int32).reshape(1)
    return np.array([scale], np.float32), count


def _emit(module: ir.Module, name: str, _: ir.Type, has_table: bool) -> None:
    """logits [T, E], scale [1], number of tokens [1], and bias [E], or table [V, k] and token ids [T] -> experts and
    weights [T, k]. A unit is a token."""

    def size(b: Builder, frame: Value) -> Value:
        return b.add(b.udiv(long(_SMALL), b.add(dim(b, frame, 0, 1), long(_OF_TOKEN))), long(1))

    b, frame, first, last = items(module, name, lambda b, frame: dim(b, frame, 0, 0), size=size)
    logits, scale, experts, weights = data(b, frame, 0), data(b, frame, 1), *(result(b, frame, i) for i in (0, 1))
    num_experts, k = dim(b, frame, 0, 1), result_dim(b, frame, 0, 1)
    num_tokens = b.integer(data(b, frame, 2), long(0))
    scores = room(b, FLOAT, b.add(k, long(LANES)))  # of chosen experts
    if has_table:
        choose = _by_table(b, data(b, frame, 3), data(b, frame, 4), dim(b, frame, 3, 0), k, scores, num_experts)
    else:
        choose = _by_score(b, data(b, frame, 3), k, scores, num_experts)

    def token(t: Value) -> None:
        start = b.mul(t, k)
        chosen, to = b.element(experts, start, INT), b.element(weights, start, FLOAT)
        with b.if_else(b.icmp_signed("<", t, num_tokens)) as (exists, padding):
            with exists:
                choose(t, b.element(logits, b.mul(t, num_experts), FLOAT), chosen)
                _, (total,) = b.loop(
                    long(0),
                    lambda j: b.icmp_signed("<", j, k),
                    1,
                    lambda j, total: [b.fadd(total, _float(b, scores, j))],
                    [ir.Constant(FLOAT, 0.0)],
                )
                # a token whose chosen scores all underflow to 0 gets weights 0, not NaN
                total = b.fadd(total, ir.Constant(FLOAT, 1e-20))

                def weigh(j: Value) -> None:
                    share = b.fdiv(_float(b, scores, j), total)
                    b.store(b.fmul(share, _float(b, scale, long(0))), b.element(to, j, FLOAT))

                each(b, k, weigh)
            with padding:

                def none(j: Value) -> None:
                    b.store(b.trunc(num_experts, INT), b.element(chosen, j, INT))
                    b.store(ir.Constant(FLOAT, 0.0), b.element(to, j, FLOAT))

                each(b, k, none)

    b.loop(first, lambda t: b.icmp_signed("<", t, last), 1, token)
    b.ret_void()


Choose = Callable[[Value, Value, Value], None]  # (token, its logits, where its experts go): also puts their scores


def _by_table(
    b: Builder, table: Value, token_ids: Value, num_ids: Value, k: Value, scores: Value, num_experts: Value
) -> Choose:
    def choose(t: Value, logits: Value, chosen: Value) -> None:
        of_id = b.mul(b.smaller(b.integer(token_ids, t), b.sub(num_ids, long(1))), k)

        def take(j: Value) -> None:
            expert = b.integer(table, b.add(of_id, j))
            b.store(b.trunc(expert, INT), b.element(chosen, j, INT))
            b.store(_float(b, logits, b.smaller(expert, b.sub(num_experts, long(1)))), b.element(scores, j, FLOAT))

        def score(j: Value) -> None:
            at = b.element(scores, j, FLOAT)
            b.store(_score(b, b.vector(at, FLOAT)), at, align=4)

        each(b, k, take)
        each(b, k, score, LANES)

    return choose


def _by_score(b: Builder, bias: Value, k: Value, scores: Value, num_experts: Value) -> Choose:
    """Experts are compared by integers in the order of the numbers, as `jax.lax.top_k` does; one that is taken is made
    the least."""
    size = b.add(num_experts, long(LANES))
    of_all, biases, keys = room(b, FLOAT, size), room(b, FLOAT, size), room(b, INT, size)
    b.copy(biases, bias, b.mul(num_experts, long(4)))
    lanes = ir.Constant(_INTS, list(range(LANES)))
    least = ir.Constant(_INTS, [_LEAST] * LANES)

    def spread(value: Value) -> Value:
        return b.bitcast(b.spread(b.bitcast(value, FLOAT)), _INTS)

    def of(e: Value) -> Value:
        return b.add(spread(b.trunc(e, INT)), lanes)

    def key(e: Value) -> None:
        at = b.element(of_all, e, FLOAT)
        score = _score(b, b.vector(at, FLOAT))
        b.store(score, at, align=4)
        bits = b.bitcast(b.fadd(score, b.vector(b.element(biases, e, FLOAT), FLOAT)), _INTS)
        negative = b.ashr(bits, ir.Constant(_INTS, [31] * LANES))
        ordered = b.xor(bits, b.and_(negative, ir.Constant(_INTS, [_MOST] * LANES)))
        exists = b.icmp_signed("<", of(e), spread(b.trunc(num_experts, INT)))
        b.store(b.select(exists, ordered, least), b.element(keys, e, INT), align=4)

    def compare(e: Value, best: Value, where: Value) -> list[Value]:
        """The first best of each lane."""
        found = b.load(b.element(keys, e, INT), align=4, typ=_INTS)
        better = b.icmp_signed(">", found, best)
        return [b.select(better, found, best), b.select(better, of(e), where)]

    def choose(t: Value, logits: Value, chosen: Value) -> None:
        b.copy(of_all, logits, b.mul(num_experts, long(4)))
        each(b, num_experts, key, LANES)

        def take(j: Value) -> None:
            _, (best, where) = b.loop(
                long(0), lambda e: b.icmp_signed("<", e, num_experts), LANES, compare, [least, lanes]
            )
            top = numbers.across(b, best, (8, 4, 2, 1), lambda x, y: b.select(b.icmp_signed(">", x, y), x, y))
            where = b.select(b.icmp_signed("==", best, top), where, ir.Constant(_INTS, [_MOST] * LANES))
            where = numbers.across(b, where, (8, 4, 2, 1), lambda x, y: b.select(b.icmp_signed("<", x, y), x, y))
            expert = numbers.lane(b, where, 0)
            b.store(expert, b.element(chosen, j, INT))
            expert = b.sext(expert, LONG)
            b.store(_float(b, of_all, expert), b.element(scores, j, FLOAT))
            b.store(ir.Constant(INT, _LEAST), b.element(keys, expert, INT))

        each(b, k, take)

    return choose


def _score(b: Builder, x: Value) -> Value:
    """sqrt(softplus(x)), in which softplus(x) = max(x, 0) + log(1 + exp(-|x|)); 0 below -87."""
    zero, sign = numbers.constant(0.0), ir.Constant(_INTS, [_LEAST] * LANES)
    below = b.bitcast(b.or_(b.bitcast(x, _INTS), sign), VECTOR)
    small = b.select(b.fcmp_ordered("<", below, numbers.constant(-87.0)), zero, numbers.exp(b, below))
    softplus = b.fadd(numbers.largest(b, zero, x), numbers.log1p(b, small))
    return b.call(b.intrinsic("llvm.sqrt.v16f32", VECTOR, [VECTOR]), [softplus])


def _float(b: Builder, array: Value, i: Value) -> Value:
    return b.load(b.element(array, i, FLOAT), typ=FLOAT)


_BY_SCORE = Operation("route_by_score", functools.partial(_emit, has_table=False), ("float32",))
_BY_TABLE = Operation("route_by_table", functools.partial(_emit, has_table=True), ("float32",))
