"""What is around the experts' products on a CPU, in machine code of our own: tokens to their experts' rows, the
activation, and the weighted sum of results.

As XLA operations these are a dozen, which for one token take longer to begin than to do, and of which those that sort
compare every assignment with every expert.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, INT, LANES, LONG, POINTER, VOID, Builder, Value, long, size_of
from pallas_kernels.native.entries import each, room
from pallas_kernels.native.machine_code import KINDS, Operation
from pallas_kernels.native.operands import data, dim, items, result, result_dim

# Numbers below which one thread takes less time than waking another does: some 20 microseconds.
_COPIED = 1 << 18
_ACTIVATED = 1 << 15
_ADDED = 1 << 17


def supports(width: int, dtype: jnp.dtype) -> bool:
    """Whether the activation of so many numbers of a row has whole vectors, of a type that it can have."""
    return width % LANES == 0 and dtype.name in KINDS


def sort(experts: jax.Array, x: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """experts [T, k] int32 (`num_experts`: none), x [T, D] -> starts [num_experts + 1] int32, place [T * k] int32,
    rows [T * k, D].

    Expert e's rows are starts[e] .. starts[e + 1], those of earlier assignments first; an assignment's row is its
    token's, at its place, which is T * k for none. Rows past the last expert's are not written.
    """
    (num_tokens, k), width = experts.shape, x.shape[1]
    shapes = (
        jax.ShapeDtypeStruct((num_experts + 1,), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens * k,), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens * k, width), x.dtype),
    )
    return _SORT(x.dtype, shapes, experts, x)


def activate(gate_up: jax.Array, starts: jax.Array | np.ndarray, limit: float, dtype: jnp.dtype) -> jax.Array:
    """`clamped_swiglu` of the first starts[-1] rows of gate_up [P, 2F] float32, rounded to `dtype`: [P, F]."""
    shape = jax.ShapeDtypeStruct((gate_up.shape[0], gate_up.shape[1] // 2), dtype)
    return _ACTIVATE(dtype, shape, gate_up, starts, np.array([limit or math.inf], np.float32))


def combine(out: jax.Array, place: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum over j of weights[t, j] * out[place[t * k + j]] without those out of range, in the order of j.

    out [P, D] float32, D a multiple of 16, place [T * k] int32, weights [T, k] float32 -> [T, D] float32.
    """
    shape = jax.ShapeDtypeStruct((weights.shape[0], out.shape[1]), jnp.float32)
    return _COMBINE(shape.dtype, shape, out, place, weights)


def _sort(module: ir.Module, name: str, kind: ir.Type) -> None:
    """As `sort`. An item is some tokens; each counts all assignments for itself, and there is but one for a thread."""
    function = ir.Function(module, ir.FunctionType(LONG, [POINTER, LONG]), f"{name}.count")
    b = Builder(function)
    frame, threads = function.args
    copied = b.mul(b.mul(dim(b, frame, 0, 0), dim(b, frame, 0, 1)), dim(b, frame, 1, 1))
    b.ret(b.select(b.icmp_signed("<=", copied, long(_COPIED)), long(1), threads))

    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, LONG, LONG]), f"{name}.item")
    b = Builder(function)
    frame, item, num_items = function.args
    experts, x = data(b, frame, 0), data(b, frame, 1)
    starts, place, rows = (result(b, frame, i) for i in range(3))
    num_tokens, k, width = dim(b, frame, 0, 0), dim(b, frame, 0, 1), dim(b, frame, 1, 1)
    num_experts = b.sub(result_dim(b, frame, 0, 0), long(1))
    num_assignments = b.mul(num_tokens, k)
    tokens = b.udiv(b.sub(b.add(num_tokens, num_items), long(1)), num_items)
    first = b.smaller(b.mul(item, tokens), num_tokens)
    last = b.smaller(b.add(first, tokens), num_tokens)
    before, others = (room(b, LONG, b.add(num_experts, long(1))) for _ in range(2))  # of each expert, and of none

    def expert(a: Value) -> Value:
        return b.smaller(b.integer(experts, a), num_experts)

    def count(a: Value, of: Value) -> None:
        counter = b.element(of, expert(a), LONG)
        b.store(b.add(b.load(counter, typ=LONG), long(1)), counter)

    def clear(e: Value) -> None:
        for of in (before, others):
            b.store(long(0), b.element(of, e, LONG))

    each(b, b.add(num_experts, long(1)), clear)
    mine = b.mul(first, k)
    each(b, mine, lambda a: count(a, before))
    b.loop(mine, lambda a: b.icmp_signed("<", a, num_assignments), 1, lambda a: count(a, others))

    def begin(e: Value, start: Value) -> list[Value]:
        """Of the counts makes the place of this item's first assignment to an expert."""
        with b.if_then(b.icmp_signed("==", item, long(0))):
            b.store(b.trunc(start, INT), b.element(starts, e, INT))
        earlier, later = (b.load(b.element(of, e, LONG), typ=LONG) for of in (before, others))
        next_place = b.add(start, earlier)
        b.store(next_place, b.element(before, e, LONG))
        return [b.add(next_place, later)]

    b.loop(long(0), lambda e: b.icmp_signed("<=", e, num_experts), 1, begin, [long(0)])
    size = b.mul(width, long(size_of(kind)))

    def token(t: Value) -> None:
        def assignment(j: Value) -> None:
            a = b.add(b.mul(t, k), j)
            e = expert(a)
            counter = b.element(before, e, LONG)
            to = b.load(counter, typ=LONG)
            exists = b.icmp_signed("<", e, num_experts)
            b.store(b.trunc(b.select(exists, to, num_assignments), INT), b.element(place, a, INT))
            with b.if_then(exists):
                b.store(b.add(to, long(1)), counter)
                b.copy(b.element(rows, b.mul(to, width), kind), b.element(x, b.mul(t, width), kind), size)

        each(b, k, assignment)

    b.loop(first, lambda t: b.icmp_signed("<", t, last), 1, token)
    b.ret_void()


def _activate(module: ir.Module, name: str, kind: ir.Type) -> None:
    """gate_up [P, 2F] float32, starts [any] of which the last is how many rows count, limit [1] -> [P, F]. A unit is a
    row."""

    def num_rows(b: Builder, frame: Value) -> Value:
        return b.integer(data(b, frame, 1), b.sub(dim(b, frame, 1, 0), long(1)))

    def size(b: Builder, frame: Value) -> Value:
        return b.add(b.udiv(long(_ACTIVATED // 2), b.udiv(dim(b, frame, 0, 1), long(2))), long(1))

    b, frame, first, last = items(module, name, num_rows, size=size)
    gate_up, out = data(b, frame, 0), result(b, frame, 0)
    both = dim(b, frame, 0, 1)
    width = b.udiv(both, long(2))
    most = b.splat(data(b, frame, 2))
    least = b.fsub(numbers.constant(0.0), most)

    def clamped(x: Value) -> Value:
        """Above; what is not a number stays so."""
        return b.select(b.fcmp_ordered("<", most, x), most, x)

    def row(r: Value) -> None:
        gates = b.element(gate_up, b.mul(r, both), FLOAT)
        ups = b.element(gates, width, FLOAT)
        to = b.element(out, b.mul(r, width), kind)

        def sixteen(i: Value) -> None:
            gate = clamped(b.vector(b.element(gates, i, FLOAT), FLOAT))
            up = numbers.largest(b, least, clamped(b.vector(b.element(ups, i, FLOAT), FLOAT)))
            hidden = b.fmul(b.fmul(gate, numbers.sigmoid(b, gate)), up)
            numbers.store(b, hidden, b.element(to, i, kind), kind)

        each(b, width, sixteen, LANES)

    b.loop(first, lambda r: b.icmp_signed("<", r, last), 1, row)
    b.ret_void()


def _combine(module: ir.Module, name: str, kind: ir.Type) -> None:
    """As `combine`. A unit is a token."""

    def size(b: Builder, frame: Value) -> Value:
        return b.add(b.udiv(long(_ADDED // 2), b.mul(dim(b, frame, 0, 1), dim(b, frame, 2, 1))), long(1))

    def num_tokens(b: Builder, frame: Value) -> Value:
        return dim(b, frame, 2, 0)

    b, frame, first, last = items(module, name, num_tokens, size=size)
    out, place, weights, to = *(data(b, frame, i) for i in range(3)), result(b, frame, 0)
    num_rows, width, k = dim(b, frame, 0, 0), dim(b, frame, 0, 1), dim(b, frame, 2, 1)
    sources, factors = room(b, POINTER, k), room(b, FLOAT, k)  # of a token, without those out of range

    def token(t: Value) -> None:
        def take(j: Value, taken: Value) -> list[Value]:
            a = b.add(b.mul(t, k), j)
            row = b.integer(place, a)
            b.store(b.element(out, b.mul(row, width), FLOAT), b.element(sources, taken, POINTER))
            b.store(b.load(b.element(weights, a, FLOAT), typ=FLOAT), b.element(factors, taken, FLOAT))
            return [b.add(taken, b.zext(b.icmp_unsigned("<", row, num_rows), LONG))]

        _, (taken,) = b.loop(long(0), lambda j: b.icmp_signed("<", j, k), 1, take, [long(0)])

        def sixteen(d: Value) -> None:
            def add(j: Value, total: Value) -> list[Value]:
                source = b.load(b.element(sources, j, POINTER), typ=POINTER)
                x = b.vector(b.element(source, d, FLOAT), FLOAT)
                return [b.fused_multiply_add(x, b.splat(b.element(factors, j, FLOAT)), total)]

            zero = numbers.constant(0.0)
            _, (total,) = b.loop(long(0), lambda j: b.icmp_signed("<", j, taken), 1, add, [zero])
            numbers.store(b, total, b.element(to, b.add(b.mul(t, width), d), kind), kind)

        each(b, width, sixteen, LANES)

    b.loop(first, lambda t: b.icmp_signed("<", t, last), 1, token)
    b.ret_void()


_SORT = Operation("sort_by_expert", _sort)
_ACTIVATE = Operation("clamped_swiglu", _activate)
_COMBINE = Operation("combine_experts", _combine, ("float32",))
