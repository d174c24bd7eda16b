"""The scores of a block's queries on a CPU, in machine code of our own: 64 keys at a time are packed and multiplied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.native import numbers
from pallas_kernels.native.emit import BYTE, FLOAT, INT, LANES, LONG, POINTER, Builder, Value, long
from pallas_kernels.native.entries import BYTES, each, fill, not_all_zero, room, used_by_any
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native.operands import data, dim, items, result
from pallas_kernels.native.tiles import TILE, Product, Words, pack
from pallas_kernels.native_attention import supports, visible_entries

__all__ = ["scores", "supports"]

_RUN = 4 * TILE  # keys that a unit scores
_MASK = 6  # which operand
_SMALL = 1 << 11  # numbers of a block's queries, below which several units are an item


def scores(
    q: jax.Array, weights: jax.Array, token: jax.Array, blocks: QueryBlocks, pages: Pages, *, ratio: int
) -> jax.Array:
    """q [T, HI, dI], weights [T, HI], of blocks of tokens [NB, B] -> [NB, B, max_entries] float32, -inf where not
    visible."""
    found = visible_entries(blocks, token.shape[1], pages, ratio)
    shape = jax.ShapeDtypeStruct(found.used.shape, jnp.float32)
    first = jnp.asarray(pages.first_entry, jnp.int32).reshape(1)
    operands = q, weights, token[:, 0], blocks.length, pages.pool.values, found.place, found.used, first
    return _SCORES(q.dtype, shape, *operands)[..., : pages.max_entries]


def _scores(module: ir.Module, name: str, kind: ir.Type) -> None:
    """q, weights, blocks' first tokens and lengths [NB], keys [..., dI], places [NB, K] and whether a query sees them
    [NB, B, K], which of all keys the layer's first one is [1] -> [NB, B, K]. K is a multiple of 16. A unit is a run of
    a block's keys."""

    def runs(b: Builder, frame: Value) -> Value:
        return b.udiv(b.add(dim(b, frame, _MASK, 2), long(_RUN - 1)), long(_RUN))

    def num_units(b: Builder, frame: Value) -> Value:
        return b.mul(dim(b, frame, _MASK, 0), runs(b, frame))

    def size(b: Builder, frame: Value) -> Value:
        unit = b.mul(b.mul(dim(b, frame, _MASK, 1), dim(b, frame, 0, 1)), dim(b, frame, 0, 2))
        return b.add(b.udiv(long(_SMALL), unit), long(1))

    def most(b: Builder, frame: Value) -> Value:
        return b.sub(b.mul(size(b, frame), long(2)), long(1))

    words = Words(kind)
    product = Product(module, f"{name}.product", words)
    b, frame, first_unit, last_unit = items(module, name, num_units, size=size, most=most)
    heads, width, block, count = *(dim(b, frame, 0, i) for i in (1, 2)), *(dim(b, frame, _MASK, i) for i in (1, 2))
    q, weights, tokens, lengths, keys, places, masks, first = (data(b, frame, i) for i in range(8))
    out = result(b, frame, 0)
    keys = b.element(keys, b.mul(b.integer(first, long(0)), width), kind)
    depth = b.udiv(width, long(words.size))
    queries = room(b, FLOAT, b.mul(b.mul(block, heads), depth))
    columns, products = room(b, FLOAT, b.mul(depth, long(TILE))), room(b, FLOAT, b.mul(heads, long(TILE)))
    addresses, seen = room(b, POINTER, long(TILE)), room(b, BYTE, long(LANES))

    def unit(i: Value) -> None:
        nth, run = b.udiv(i, runs(b, frame)), b.urem(i, runs(b, frame))
        token, length = (b.integer(of, nth) for of in (tokens, lengths))
        start = b.mul(token, b.mul(heads, width))

        def copy(d: Value) -> None:
            x = words.load(b, b.element(q, b.add(start, b.mul(d, long(words.size))), kind))
            b.store(x, b.element(queries, d, FLOAT), align=4)

        each(b, b.mul(b.mul(length, heads), depth), copy, LANES)
        begin = b.mul(run, long(_RUN))
        stop = b.smaller(b.add(begin, long(_RUN)), count)
        of_block = b.element(masks, b.mul(b.mul(nth, block), count), BYTE)

        def tile(k: Value) -> None:
            keys_here = b.smaller(long(TILE), b.sub(stop, k))

            def note(j: Value, any_before: Value) -> list[Value]:
                """The keys that are seen, or where one is not, what is there at the layer's start."""
                joined = used_by_any(b, of_block, count, b.add(k, j), length)
                b.store(joined, seen, align=1)
                for lane in range(LANES):
                    at = b.element(places, b.add(b.mul(nth, count), b.add(k, b.add(j, long(lane)))), INT)
                    used = b.icmp_signed(
                        "!=", b.load(b.element(seen, long(lane), BYTE), typ=BYTE), ir.Constant(BYTE, 0)
                    )
                    place = b.select(used, b.load(at, align=4, typ=INT), ir.Constant(INT, 0))
                    address = b.element(keys, b.mul(b.sext(place, LONG), width), kind)
                    b.store(address, b.element(addresses, b.add(j, long(lane)), POINTER))
                return [b.or_(any_before, joined)]

            nobody = ir.Constant(BYTES, [0] * LANES)
            _, (joined,) = b.loop(long(0), lambda j: b.icmp_signed("<", j, keys_here), LANES, note, [nobody])
            used = not_all_zero(b, joined)
            with b.if_then(used):
                pack(b, words, addresses, keys_here, width, columns, None)

            def of_query(query: Value) -> None:
                row, of_token = b.add(b.mul(nth, block), query), b.mul(b.add(token, query), heads)
                to = b.add(b.mul(row, count), k)
                with b.if_else(b.and_(used, b.icmp_signed("<", query, length))) as (some, none):
                    with some:
                        x = b.element(queries, b.mul(b.mul(query, heads), depth), FLOAT)
                        to_products = (products, long(TILE))
                        product(b, (x, depth), (columns, 0), to_products, heads, keys_here, depth)

                        def sixteen(j: Value) -> None:
                            def add(h: Value, total: Value) -> list[Value]:
                                at = b.element(products, b.add(b.mul(h, long(TILE)), j), FLOAT)
                                positive = numbers.largest(b, numbers.constant(0.0), b.vector(at, FLOAT))
                                factor = b.splat(b.element(weights, b.add(of_token, h), FLOAT))
                                return [b.fused_multiply_add(positive, factor, total)]

                            zero = numbers.constant(0.0)
                            _, (total,) = b.loop(long(0), lambda h: b.icmp_signed("<", h, heads), 1, add, [zero])
                            at = b.add(to, j)
                            mask = b.load(b.element(masks, at, BYTE), align=1, typ=BYTES)
                            sees = b.icmp_signed("!=", mask, nobody)
                            nothing = numbers.constant(float("-inf"))
                            b.store(b.select(sees, total, nothing), b.element(out, at, FLOAT), align=4)

                        each(b, keys_here, sixteen, LANES)
                    with none:
                        each(b, keys_here, lambda j: fill(b, out, b.add(to, j), float("-inf")), LANES)

            each(b, block, of_query)

        b.loop(begin, lambda k: b.icmp_signed("<", k, stop), TILE, tile)

    b.loop(first_unit, lambda i: b.icmp_signed("<", i, last_unit), 1, unit)
    b.ret_void()


_SCORES = Operation("index_scores", _scores)
