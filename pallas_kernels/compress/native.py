"""Compression on a CPU in machine code of our own: one operation, where XLA's CPU makes thirty of a few numbers each.

An item is some channels of all pieces, which it goes over in order: what a window begins with is in registers, or in
the state of the piece's row, which is updated in place.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.compress.reference import finish
from pallas_kernels.compress.sums import EMPTY
from pallas_kernels.native import numbers
from pallas_kernels.native.emit import BYTE, FLOAT, LANES, Builder, Value, long
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native.operands import data, dim, items, result
from pallas_kernels.target import Target

if TYPE_CHECKING:
    from pallas_kernels.compress.api import Finish, Pieces

_SMALL = 1 << 14  # numbers, below which several vectors of channels are an item
_STATES = 5  # which operand


class Sum(NamedTuple):
    """As `sums.Sum`, of 16 channels."""

    maximum: Value
    denominator: Value
    total: Value


def supports(width: int, target: Target) -> bool:
    """Whether the kernel takes entries of that width."""
    return target.has_native_kernels and width % LANES == 0


def compress(
    values: jax.Array,
    logits: jax.Array,
    pieces: Pieces,
    states: jax.Array,
    row_slot: jax.Array,
    row_position: jax.Array,
    finish_with: Finish,
    *,
    ratio: int,
    overlap: bool,
    dtype: jnp.dtype,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """As `api.compress`. Entries of padding are not written: what they hold means nothing."""
    shapes = (
        jax.ShapeDtypeStruct((pieces.row.shape[0], finish_with.scale.shape[0]), jnp.float32),
        jax.ShapeDtypeStruct(states.shape, jnp.float32),
    )
    of_piece = (x.astype(jnp.int32) for x in (pieces.row, pieces.last_token))
    of_row = (x.astype(jnp.int32) for x in (row_slot, row_position))
    first = pieces.first.astype(jnp.uint8)
    operands = values, logits, *of_piece, first, states, *of_row, np.array([ratio], np.int32)
    pool = _OVERLAPPING if overlap else _PLAIN
    entries, states = pool(values.dtype, shapes, *operands, updated={_STATES: 1})
    return finish(entries, finish_with, dtype), states


def _emit(module: ir.Module, name: str, kind: ir.Type, overlap: bool) -> None:
    """values, logits [T, channels], rows, last tokens [NP] and whether each is its row's first, states, rows' slots and
    positions [R], [ratio] -> entries [NP, width], states. A unit is 16 channels."""

    def num_units(b: Builder, frame: Value) -> Value:
        return b.udiv(dim(b, frame, 0, 1), long(2 * LANES if overlap else LANES))

    def size(b: Builder, frame: Value) -> Value:
        return b.add(b.udiv(long(_SMALL), b.mul(dim(b, frame, 0, 0), long(LANES))), long(1))

    b, frame, first_unit, last_unit = items(module, name, num_units, size=size)
    channels, num_pieces, num_slots = dim(b, frame, 0, 1), dim(b, frame, 2, 0), dim(b, frame, _STATES, 0)
    values, logits, rows, last_tokens, firsts, _, slots, positions, ratios = (data(b, frame, i) for i in range(9))
    entries, states = result(b, frame, 0), result(b, frame, 1)
    width = b.mul(num_units(b, frame), long(LANES))
    ratio = b.integer(ratios, long(0))

    def sum_tokens(start: Value, stop: Value, channel: Value) -> Sum:
        def at(array: Value, token: Value) -> Value:
            return b.vector(b.element(array, b.add(b.mul(token, channels), channel), FLOAT), FLOAT)

        def goes_on(token: Value) -> Value:
            return b.icmp_signed("<", token, stop)

        def look(token: Value, maximum: Value) -> list[Value]:
            return [numbers.largest(b, maximum, at(logits, token))]

        def add(token: Value, denominator: Value, total: Value) -> list[Value]:
            weight = numbers.exp(b, b.fsub(at(logits, token), maximum))
            return [b.fadd(denominator, weight), b.fused_multiply_add(weight, at(values, token), total)]

        _, (maximum,) = b.loop(start, goes_on, 1, look, [numbers.constant(EMPTY)])
        return Sum(maximum, *b.loop(start, goes_on, 1, add, [numbers.constant(0.0)] * 2)[1])

    def of_state(state: Value, channel: Value) -> list[Value]:
        """Where its numbers are."""
        return [b.element(state, b.add(b.mul(channels, long(i)), channel), FLOAT) for i in range(len(Sum._fields))]

    def unit(i: Value) -> None:
        channel = b.mul(i, long(LANES))

        def row_of(piece: Value) -> Value:
            return b.integer(rows, b.smaller(piece, b.sub(num_pieces, long(1))))

        def slot_of(row: Value) -> Value:
            return b.integer(slots, b.smaller(row, b.sub(dim(b, frame, _STATES + 1, 0), long(1))))

        def goes_on(piece: Value) -> Value:
            row = row_of(piece)
            is_row = b.icmp_signed("<", row, dim(b, frame, _STATES + 1, 0))
            has_state = b.icmp_unsigned("<", slot_of(row), num_slots)
            return b.and_(b.and_(b.icmp_signed("<", piece, num_pieces), is_row), has_state)

        def one(piece: Value, *before: Value) -> list[Value]:
            row = row_of(piece)
            state = b.element(states, b.mul(slot_of(row), b.mul(channels, long(len(Sum._fields)))), FLOAT)
            is_0 = b.icmp_signed("==", piece, long(0))
            start = b.add(b.integer(last_tokens, b.select(is_0, piece, b.sub(piece, long(1)))), long(1))
            start, stop = b.select(is_0, long(0), start), b.add(b.integer(last_tokens, piece), long(1))
            is_first = b.icmp_signed("!=", b.load(b.element(firsts, piece, BYTE), typ=BYTE), ir.Constant(BYTE, 0))
            position = b.integer(positions, row)
            in_midst = b.and_(is_first, b.icmp_signed("!=", b.srem(position, ratio), long(0)))
            empty = Sum(*(numbers.constant(x) for x in (EMPTY, 0.0, 0.0)))

            def held(channel: Value) -> Sum:
                return Sum(*(b.vector(at, FLOAT) for at in of_state(state, channel)))

            def keep(sums: Sum, channel: Value) -> None:
                for x, at in zip(sums, of_state(state, channel), strict=True):
                    numbers.store(b, x, at, FLOAT)

            here = sum_tokens(start, stop, channel)
            if overlap:
                second = b.add(width, channel)  # of series b, and of the entry in the making
                held_a, held_entry = held(channel), held(second)
                goes_before = b.icmp_signed(">=", position, ratio)
                last_a = _where(b, is_first, _where(b, goes_before, held_a, empty), Sum(*before))
                here = _merge(b, here, _where(b, in_midst, held_a, empty))
                entry = _merge(b, sum_tokens(start, stop, second), _where(b, in_midst, held_entry, last_a))
                keep(here, channel)
                keep(entry, second)
            else:
                entry = _merge(b, here, _where(b, in_midst, held(channel), empty))
                keep(entry, channel)
            pooled = b.fdiv(entry.total, entry.denominator)
            numbers.store(b, pooled, b.element(entries, b.add(b.mul(piece, width), channel), FLOAT), FLOAT)
            return list(here)

        b.loop(long(0), goes_on, 1, one, [numbers.constant(0.0)] * len(Sum._fields))

    b.loop(first_unit, lambda i: b.icmp_signed("<", i, last_unit), 1, unit)
    b.ret_void()


def _where(b: Builder, condition: Value, x: Sum, y: Sum) -> Sum:
    return Sum(*(b.select(condition, *pair) for pair in zip(x, y, strict=True)))


def _merge(b: Builder, x: Sum, y: Sum) -> Sum:
    """As `sums.merge`."""
    maximum = numbers.largest(b, x.maximum, y.maximum)
    of_x, of_y = (numbers.exp(b, b.fsub(of.maximum, maximum)) for of in (x, y))
    denominator, total = (b.fused_multiply_add(p, of_x, b.fmul(q, of_y)) for p, q in zip(x[1:], y[1:], strict=True))
    return Sum(maximum, denominator, total)


_OVERLAPPING = Operation("compress.overlapping", functools.partial(_emit, overlap=True), ["float32"])
_PLAIN = Operation("compress.plain", functools.partial(_emit, overlap=False), ["float32"])
