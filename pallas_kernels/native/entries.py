"""A pool's entries in native code: sixteen at a time, by their places, and their products with queries.

An entry that there is not is taken from a row of zeros, so that what was never written is never read.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, INT, LANES, LONG, POINTER, VECTOR, Builder, Value, long

HEADS = 4  # that are multiplied at once, with as many entries
PLACES = ir.VectorType(INT, LANES)


def addresses(b: Builder, pool: Value, place: Value, width: Value, zeros: Value, kind: ir.Type) -> list[Value]:
    """Where the entries at sixteen places are; a negative place is `zeros`."""
    found = []
    for i in range(LANES):
        one = b.extract_element(place, ir.Constant(INT, i))
        there = b.element(pool, b.mul(b.sext(one, LONG), width), kind)
        found.append(b.select(b.icmp_signed(">=", one, ir.Constant(INT, 0)), there, zeros))
    return found


def products(b: Builder, kind: ir.Type, q: Value, keys: list[Value], following: list[Value], width: Value) -> Value:
    """Of four heads with four entries, the entries of a head together. Asks for the entries that follow meanwhile."""

    def step(d: Value, *sums: Value) -> list[Value]:
        rows = [b.vector(b.element(key, d, kind), kind) for key in keys]
        for key in following:
            b.prefetch(b.element(key, d, kind))
        new = []
        for h in range(HEADS):
            x = b.load(b.element(q, b.add(b.mul(width, long(h)), d), FLOAT), align=4, typ=VECTOR)
            new += [b.fused_multiply_add(x, row, sums[4 * h + k]) for k, row in enumerate(rows)]
        return new

    zero = [numbers.constant(0.0)] * LANES
    _, sums = b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES, step, zero)
    return numbers.totals(b, sums)


def room(b: Builder, kind: ir.Type, count: Value) -> Value:
    """On the stack."""
    room = b.alloca(kind, count)
    room.type = POINTER  # of anything
    return room


def each_vector(b: Builder, width: Value, body: Callable[[Value], object]) -> None:
    """body(d) for every 16th column."""

    def step(d: Value) -> None:
        body(d)

    b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES, step)
