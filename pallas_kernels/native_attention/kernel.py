"""The code: an online softmax over entries of two pools, up to 64 of those that a block uses at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import (
    BYTE,
    FLOAT,
    INT,
    LANES,
    LINE,
    LONG,
    POINTER,
    VECTOR,
    Builder,
    Value,
    internal,
    long,
    size_of,
)
from pallas_kernels.native.entries import each, fill, not_all_zero, room, used_by_any
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native.operands import data, dim, items, result
from pallas_kernels.native.tiles import STRIP, TILE, Product, Words, pack

_FLOOR = -1e30  # the maximum before any entry
_ROOM = TILE + LANES  # entries that are noted before a tile of them is taken
_SMALL = 1 << 12  # numbers of a unit's queries, below which several units are an item
_USED = ir.VectorType(INT, LANES)
_Q, _TOKEN, _LENGTH, _FIRSTS, _SINK, _SCALE, _GROUP = 0, 1, 2, 9, 10, 11, 12  # operands
_POOLS, _PLACES, _MASKS = (3, 6), (4, 7), (5, 8)


class _Scratch(NamedTuple):
    """What an item's units work in. M rows are the queries in use times the heads of a group."""

    seen: Value  # [16] bytes, which of sixteen entries any query uses
    count: Value  # [1] entries that are noted
    entries: Value  # [_ROOM] their addresses
    used: Value  # [B, _ROOM] int32, whether a query uses them
    queries: Value  # [M, width] words
    columns: Value  # the tile, see native/tiles
    rows: Value
    weights: Value  # [M, TILE]
    total: Value  # [M, width]
    top: Value  # [M]
    decay: Value  # [M]
    denominator: Value  # [M, 16]

    @classmethod
    def of(cls, b: Builder, block: Value, rows: Value, width: Value) -> _Scratch:
        whole = b.mul(rows, width)
        tile = b.mul(b.add(width, long(STRIP)), long(TILE))  # whole strips
        floats = [whole, tile, tile, b.mul(rows, long(TILE)), whole, rows, rows, b.mul(rows, long(LANES))]
        return cls(
            room(b, BYTE, long(LANES)),
            room(b, LONG, long(1)),
            room(b, POINTER, long(_ROOM)),
            room(b, INT, b.mul(block, long(_ROOM))),
            *(room(b, FLOAT, size) for size in floats),
        )


def _attend(module: ir.Module, name: str, kind: ir.Type) -> None:
    """q [T, N, H], first tokens and lengths of blocks [NB], of two pools the entries [..., H], the places [NB, K] of
    those that a block may use and which query uses them [NB, B, K] with K a multiple of 16, which of all entries the
    layer's first ones are [2], sink [N], scale [1], heads of a unit [1] -> [T, N, H]. A unit is a group of heads of a
    block.
    """

    def group_of(b: Builder, frame: Value) -> Value:
        return b.integer(data(b, frame, _GROUP), long(0))

    def num_units(b: Builder, frame: Value) -> Value:
        return b.mul(dim(b, frame, _LENGTH, 0), b.udiv(dim(b, frame, _Q, 1), group_of(b, frame)))

    def size(b: Builder, frame: Value) -> Value:
        unit = b.mul(b.mul(dim(b, frame, _MASKS[0], 1), group_of(b, frame)), dim(b, frame, _Q, 2))
        return b.add(b.udiv(long(_SMALL), unit), long(1))

    words = Words(kind)
    take = _take(module, f"{name}.take", words)
    b, frame, first, stop = items(module, name, num_units, size=size, most=lambda b, f: b.smaller(size(b, f), long(2)))
    num_blocks, block = (dim(b, frame, _MASKS[0], i) for i in (0, 1))
    tokens, heads, width = (dim(b, frame, _Q, i) for i in (0, 1, 2))
    group = group_of(b, frame)
    q, starts, lengths, firsts, sink = (data(b, frame, i) for i in (_Q, _TOKEN, _LENGTH, _FIRSTS, _SINK))
    out, scale = result(b, frame, 0), data(b, frame, _SCALE)
    groups = b.udiv(heads, group)
    scratch = _Scratch.of(b, block, b.mul(block, group), width)

    def unit(i: Value) -> None:
        nth, head = b.udiv(i, groups), b.mul(b.urem(i, groups), group)
        token, length = (b.integer(of, nth) for of in (starts, lengths))
        of_query = b.mul(group, width)  # numbers

        def at(query: Value) -> Value:
            return b.mul(b.add(b.mul(b.add(token, query), heads), head), width)

        def begin(query: Value) -> None:
            start, to = at(query), b.mul(query, b.udiv(of_query, long(words.size)))

            def copy(d: Value) -> None:
                x = words.load(b, b.element(q, b.add(start, b.mul(d, long(words.size))), kind))
                b.store(x, b.element(scratch.queries, b.add(to, d), FLOAT), align=4)

            each(b, b.udiv(of_query, long(words.size)), copy, LANES)

        each(b, length, begin)
        rows = b.mul(length, group)
        each(b, b.mul(rows, width), lambda d: fill(b, scratch.total, d, 0.0), LANES)

        def start_row(row: Value) -> None:
            b.store(ir.Constant(FLOAT, _FLOOR), b.element(scratch.top, row, FLOAT), align=4)
            fill(b, scratch.denominator, b.mul(row, long(LANES)), 0.0)

        each(b, rows, start_row)
        b.store(long(0), scratch.count)
        of_block = [length, group, width, scale]
        for nth_pool in range(2):
            begins = b.integer(firsts, long(nth_pool))
            pool = b.element(data(b, frame, _POOLS[nth_pool]), b.mul(begins, width), kind)
            count = dim(b, frame, _PLACES[nth_pool], 1)
            places = b.element(data(b, frame, _PLACES[nth_pool]), b.mul(nth, count), INT)
            masks = b.element(data(b, frame, _MASKS[nth_pool]), b.mul(b.mul(nth, block), count), BYTE)
            _note(b, scratch, _Part(pool, kind, places, masks, count), take, of_block)
        with b.if_then(b.icmp_signed(">", b.load(scratch.count, typ=LONG), long(0))):
            b.call(take, [*scratch, *of_block])

        def finish(row: Value) -> None:
            of_head = b.splat(b.element(sink, b.add(head, b.urem(row, group)), FLOAT))
            most = b.splat(b.element(scratch.top, row, FLOAT))
            all_here = numbers.largest(b, most, of_head)
            decay = numbers.exp(b, b.fsub(most, all_here))
            sums = b.load(b.element(scratch.denominator, b.mul(row, long(LANES)), FLOAT), align=4, typ=VECTOR)
            sums = b.fmul(numbers.across(b, sums, (8, 4, 2, 1), b.fadd), decay)
            weight = b.fdiv(decay, b.fadd(sums, numbers.exp(b, b.fsub(of_head, all_here))))
            start = b.add(at(b.udiv(row, group)), b.mul(b.urem(row, group), width))

            def end(d: Value) -> None:
                x = b.load(b.element(scratch.total, b.add(b.mul(row, width), d), FLOAT), align=4, typ=VECTOR)
                numbers.store(b, b.fmul(x, weight), b.element(out, b.add(start, d), kind), kind)

            each(b, width, end, LANES)

        each(b, rows, finish)

        with b.if_then(b.icmp_signed("==", i, long(0))):

            def last(j: Value, end: Value) -> list[Value]:
                start, count = (b.integer(of, j) for of in (starts, lengths))
                stop = b.select(b.icmp_signed(">", count, long(0)), b.add(start, count), end)
                return [b.select(b.icmp_signed(">", stop, end), stop, end)]

            _, (end,) = b.loop(long(0), lambda j: b.icmp_signed("<", j, num_blocks), 1, last, [long(0)])
            of_token = b.mul(heads, width)

            def silence(d: Value) -> None:
                numbers.store(b, numbers.constant(0.0), b.element(out, d, kind), kind)

            b.loop(b.mul(end, of_token), lambda d: b.icmp_signed("<", d, b.mul(tokens, of_token)), LANES, silence)

    b.loop(first, lambda i: b.icmp_signed("<", i, stop), 1, unit)
    b.ret_void()


@dataclass(frozen=True)
class _Part:
    """A block's entries of one pool."""

    pool: Value  # the layer's first entry
    kind: ir.Type
    places: Value  # [K] int32
    masks: Value  # [B, K] bytes
    count: Value  # K


def _note(b: Builder, scratch: _Scratch, part: _Part, take: ir.Function, block: list[Value]) -> None:
    """Notes the entries that a query in use uses, and takes them as soon as there are enough for a tile. `block` is
    what `take` takes after the scratch."""
    length, _, width, _ = block

    def sixteen(k: Value) -> None:
        joined = used_by_any(b, part.masks, part.count, k, length)
        with b.if_then(not_all_zero(b, joined)):
            b.store(joined, scratch.seen, align=1)

            def one(i: Value) -> None:
                byte = b.load(b.element(scratch.seen, i, BYTE), align=1, typ=BYTE)
                with b.if_then(b.icmp_signed("!=", byte, ir.Constant(BYTE, 0))):
                    noted = b.load(scratch.count, typ=LONG)
                    entry = b.add(k, i)
                    place = b.integer(part.places, entry)
                    address = b.element(part.pool, b.mul(place, width), part.kind)
                    b.store(address, b.element(scratch.entries, noted, POINTER))
                    each(b, width, lambda d: b.prefetch(b.element(address, d, part.kind)), LINE // size_of(part.kind))

                    def of_query(query: Value) -> None:
                        at = b.element(part.masks, b.add(b.mul(query, part.count), entry), BYTE)
                        used = b.zext(b.load(at, align=1, typ=BYTE), INT)
                        b.store(used, b.element(scratch.used, b.add(b.mul(query, long(_ROOM)), noted), INT), align=4)

                    each(b, length, of_query)
                    b.store(b.add(noted, long(1)), scratch.count)

            each(b, long(LANES), one)
            noted = b.load(scratch.count, typ=LONG)
            with b.if_then(b.icmp_signed(">=", noted, long(TILE))):
                b.store(long(TILE), scratch.count)
                b.call(take, [*scratch, *block])

                def move(array: Value, kind: ir.Type, start: Value) -> None:
                    for i in range(LANES):
                        x = b.load(b.element(array, b.add(start, long(TILE + i)), kind), align=4, typ=kind)
                        b.store(x, b.element(array, b.add(start, long(i)), kind), align=4)

                move(scratch.entries, POINTER, long(0))
                each(b, length, lambda query: move(scratch.used, INT, b.mul(query, long(_ROOM))))
                b.store(b.sub(noted, long(TILE)), scratch.count)

    b.loop(long(0), lambda k: b.icmp_signed("<", k, part.count), LANES, sixteen)


def _take(module: ir.Module, name: str, words: Words) -> ir.Function:
    """void take(*scratch, queries in use, heads, width, scale): adds the noted entries, at most TILE, to the sums."""
    product = Product(module, f"{name}.product", words)
    kinds = [POINTER] * len(_Scratch._fields) + [LONG, LONG, LONG, POINTER]
    function = internal(module, name, kinds)
    b = Builder(function)
    *scratch, length, group, width, scale = function.args
    s = _Scratch(*scratch)
    count = b.load(s.count, typ=LONG)
    rounded = b.and_(b.add(count, long(LANES - 1)), long(-LANES))

    def pad(i: Value) -> None:
        """What is past the last entry is an entry that nobody uses."""
        b.store(b.load(s.entries, typ=POINTER), b.element(s.entries, i, POINTER))

        def of_query(query: Value) -> None:
            at = b.element(s.used, b.add(b.mul(query, long(_ROOM)), i), INT)
            b.store(ir.Constant(INT, 0), at, align=4)

        each(b, length, of_query)

    b.loop(count, lambda i: b.icmp_signed("<", i, long(TILE)), 1, pad)
    pack(b, words, s.entries, rounded, width, s.columns, s.rows)
    depth, rows = b.udiv(width, long(words.size)), b.mul(length, group)
    tile = long(TILE)
    product(b, (s.queries, depth), (s.columns, 0), (s.weights, tile), rows, rounded, depth)
    factor = b.splat(scale)

    def softmax(row: Value) -> None:
        start, query = b.mul(row, tile), b.udiv(row, group)
        used, logits = [], []
        for i in range(0, TILE, LANES):
            at = b.element(s.used, b.add(b.mul(query, long(_ROOM)), long(i)), INT)
            mask = b.icmp_signed("!=", b.load(at, align=4, typ=_USED), ir.Constant(_USED, [0] * LANES))
            x = b.load(b.element(s.weights, b.add(start, long(i)), FLOAT), align=4, typ=VECTOR)
            used.append(mask)
            logits.append(b.select(mask, b.fmul(x, factor), numbers.constant(_FLOOR)))
        before = b.splat(b.element(s.top, row, FLOAT))
        most = before
        for x in logits:
            most = numbers.largest(b, most, x)
        most = numbers.across(b, most, (8, 4, 2, 1), lambda x, y: numbers.largest(b, x, y))
        decay = numbers.exp(b, b.fsub(before, most))
        at = b.element(s.denominator, b.mul(row, long(LANES)), FLOAT)
        sums = b.fmul(b.load(at, align=4, typ=VECTOR), decay)
        for i, (mask, x) in enumerate(zip(used, logits, strict=True)):
            weight = b.select(mask, numbers.exp(b, b.fsub(x, most)), numbers.constant(0.0))
            sums = b.fadd(sums, weight)
            to = b.add(start, long(i * LANES // words.size))
            words.store(b, weight, b.element(s.weights, to, FLOAT))
        b.store(sums, at, align=4)
        b.store(numbers.lane(b, most, 0), b.element(s.top, row, FLOAT), align=4)
        b.store(numbers.lane(b, decay, 0), b.element(s.decay, row, FLOAT), align=4)

    each(b, rows, softmax)
    used = b.udiv(b.add(count, long(words.size - 1)), long(words.size))
    product(b, (s.weights, tile), (s.rows, TILE // words.size), (s.total, width), rows, width, used, s.decay)
    b.ret_void()
    return function


ATTEND = Operation("attend", _attend)
