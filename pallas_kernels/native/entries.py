"""What operations on a pool's entries have in common: loops, room to work in, and which of sixteen entries are used."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import BYTE, FLOAT, LANES, POINTER, Builder, Value, long

BYTES = ir.VectorType(BYTE, LANES)
_ALL = ir.IntType(8 * LANES)


def room(b: Builder, kind: ir.Type, count: Value) -> Value:
    """On the stack."""
    room = b.alloca(kind, count)
    room.type = POINTER  # of anything
    return room


def each(b: Builder, count: Value, body: Callable[[Value], object], step: int = 1) -> None:
    """body(i) for every `step`-th i below `count`."""

    def one(i: Value) -> None:
        body(i)

    b.loop(long(0), lambda i: b.icmp_signed("<", i, count), step, one)


def fill(b: Builder, array: Value, i: Value, value: float) -> None:
    """16 times, from the i-th float on."""
    b.store(numbers.constant(value), b.element(array, i, FLOAT), align=4)


def used_by_any(b: Builder, masks: Value, count: Value, k: Value, queries: Value) -> Value:
    """masks [queries, count] bytes -> 16 bytes, from the k-th entry on: not 0 where a query uses it."""

    def join(query: Value, joined: Value) -> list[Value]:
        at = b.element(masks, b.add(b.mul(query, count), k), BYTE)
        return [b.or_(joined, b.load(at, align=1, typ=BYTES))]

    nobody = ir.Constant(BYTES, [0] * LANES)
    _, (joined,) = b.loop(long(0), lambda query: b.icmp_signed("<", query, queries), 1, join, [nobody])
    return joined


def not_all_zero(b: Builder, sixteen: Value) -> Value:
    """Of bytes."""
    return b.icmp_signed("!=", b.bitcast(sixteen, _ALL), ir.Constant(_ALL, 0))
