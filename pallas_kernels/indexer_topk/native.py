"""The scores of a decode step's rows on a CPU, in machine code of our own: four heads with four keys at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.native import entries, numbers
from pallas_kernels.native.emit import FLOAT, INT, LANES, Builder, Value, long
from pallas_kernels.native.entries import HEADS, PLACES
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native.operands import data, dim, items, result
from pallas_kernels.native_attention import supports, visible_entries

__all__ = ["scores", "supports"]

_RUN = 256  # keys of a row that are scored together


def scores(q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages, *, ratio: int) -> jax.Array:
    """q [NB, 1, HI, dI], weights [NB, 1, HI] -> [NB, 1, max_entries] float32, -inf where not visible."""
    found = visible_entries(blocks, pages, ratio)
    shape = jax.ShapeDtypeStruct(found.place.shape, jnp.float32)
    first = jnp.asarray(pages.layer * pages.num_pages * pages.entries_per_page, jnp.int32).reshape(1)
    result = _SCORES(q.dtype, shape, q, weights, pages.pool.values, found.place, first)
    return result[:, None, : pages.max_entries]


def _scores(module: ir.Module, name: str, kind: ir.Type) -> None:
    """q, weights, keys [..., dI], places [NB, K] with K a multiple of 16, which of all keys the layer's first one is
    [1] -> [NB, K]. A unit is a run of a row's keys."""

    def runs(b: Builder, frame: Value) -> Value:
        return b.udiv(b.add(dim(b, frame, 3, 1), long(_RUN - 1)), long(_RUN))

    def num_units(b: Builder, frame: Value) -> Value:
        return b.mul(dim(b, frame, 0, 0), runs(b, frame))

    b, frame, first_unit, last_unit = items(module, name, num_units, size=4, most=8)
    heads, width, count = dim(b, frame, 0, 2), dim(b, frame, 0, 3), dim(b, frame, 3, 1)
    q, weights, keys, places, first = (data(b, frame, i) for i in range(5))
    out = result(b, frame, 0)
    keys = b.element(keys, b.mul(b.sext(b.load(first, typ=INT), width.type), width), kind)
    size = b.mul(heads, width)
    wide, zeros = entries.room(b, FLOAT, size), entries.room(b, FLOAT, width)
    entries.each_vector(b, width, lambda d: b.store(numbers.constant(0.0), b.element(zeros, d, FLOAT), align=4))

    def unit(i: Value) -> None:
        row, run = b.udiv(i, runs(b, frame)), b.urem(i, runs(b, frame))
        start = b.mul(row, size)

        def widen(d: Value) -> None:
            b.store(b.vector(b.element(q, b.add(start, d), kind), kind), b.element(wide, d, FLOAT), align=4)

        entries.each_vector(b, size, widen)
        begin = b.mul(run, long(_RUN))
        stop = b.smaller(b.add(begin, long(_RUN)), count)
        of_row = b.element(places, b.mul(row, count), INT)

        def sixteen(k: Value) -> None:
            place = b.load(b.element(of_row, k, INT), align=4, typ=PLACES)
            used = b.icmp_signed(">=", place, ir.Constant(PLACES, [0] * LANES))
            to = b.element(out, b.add(b.mul(row, count), k), FLOAT)
            nothing = numbers.constant(float("-inf"))
            any_used = b.icmp_signed("!=", b.bitcast(used, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0))
            with b.if_else(any_used) as (some, none):
                with some:
                    here = entries.addresses(b, keys, place, width, zeros, kind)
                    after = b.smaller(b.add(k, long(LANES)), b.sub(count, long(LANES)))
                    after = b.load(b.element(of_row, after, INT), align=4, typ=PLACES)
                    following = entries.addresses(b, keys, after, width, zeros, kind)

                    def four_heads(h: Value, *sums: Value) -> list[Value]:
                        at = b.element(weights, b.add(b.mul(row, heads), h), FLOAT)
                        of_heads = [b.load(b.element(at, long(j), FLOAT), typ=FLOAT) for j in range(HEADS)]
                        factor = numbers.gathered(b, of_heads)
                        factor = numbers.pick(b, factor, [j // 4 for j in range(LANES)])
                        new = []
                        for j, total in enumerate(sums):
                            four = slice(4 * j, 4 * j + 4)
                            some_q = b.element(wide, b.mul(h, width), FLOAT)
                            x = entries.products(b, kind, some_q, here[four], following[four], width)
                            x = numbers.largest(b, numbers.constant(0.0), x)
                            new.append(b.fused_multiply_add(x, factor, total))
                        return new

                    zero = [numbers.constant(0.0)] * 4
                    _, sums = b.loop(long(0), lambda h: b.icmp_signed("<", h, heads), HEADS, four_heads, zero)
                    sums = [numbers.across(b, x, (4, 8), b.fadd) for x in sums]
                    lanes = [0, 1, 2, 3, LANES, LANES + 1, LANES + 2, LANES + 3]
                    halves = [numbers.pick(b, sums[j], lanes, sums[j + 1]) for j in (0, 2)]
                    total = numbers.pick(b, halves[0], range(LANES), halves[1])
                    b.store(b.select(used, total, nothing), to, align=4)
                with none:
                    b.store(nothing, to, align=4)

        b.loop(begin, lambda k: b.icmp_signed("<", k, stop), LANES, sixteen)

    b.loop(first_unit, lambda i: b.icmp_signed("<", i, last_unit), 1, unit)
    b.ret_void()


_SCORES = Operation("index_scores", _scores)
