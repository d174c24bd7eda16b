"""Products of many queries with up to 64 entries of a pool: the entries are packed once, then both products are plain.

Numbers are taken as 32-bit words: floats, or, where a CPU multiplies pairs of bfloat16 numbers, such pairs. Of packed
entries there are two forms: `columns`, [width in words, TILE], for queries times entries, and `rows`, [width / STRIP,
TILE in words, STRIP], for weights times entries. Both are strips of 64 words a row, which stay in the first level cache
while all queries are multiplied with one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, HALF, LANES, LONG, POINTER, VECTOR, Builder, Value, internal, long
from pallas_kernels.native.machine_code import in_pairs

TILE = STRIP = 64  # entries; words
_BLOCKS = (6, 4, 2, 1)  # rows that are multiplied at once: 6 x 4 vectors of sums are in registers
_VECTORS = STRIP // LANES
_PAIR = ir.VectorType(HALF, 2 * LANES)


@dataclass(frozen=True)
class Words:
    """How numbers of `kind` are multiplied."""

    kind: ir.Type

    @property
    def size(self) -> int:
        """Numbers of a word."""
        return 2 if in_pairs(self.kind) else 1

    def load(self, b: Builder, address: Value) -> Value:
        """16 words: numbers widened to floats, or pairs as they are."""
        return b.vector(address, self.kind if self.size == 1 else FLOAT)

    def store(self, b: Builder, x: Value, address: Value) -> None:
        """16 floats, as numbers of words."""
        numbers.store(b, x, address, FLOAT if self.size == 1 else HALF)

    def add_product(self, b: Builder, x: Value, y: Value, sums: Value) -> Value:
        return b.fused_multiply_add(x, y, sums) if self.size == 1 else b.add_products_of_pairs(x, y, sums)

    def rows(self, b: Builder, entries: list[Value]) -> list[tuple[int, int, Value]]:
        """16 words each of 16 entries -> (which row of words, which column, 16 words)."""
        if self.size == 1:
            return [(i, 0, x) for i, x in enumerate(entries)]
        found = []
        for i in range(0, LANES, 2):
            pair = [b.bitcast(x, _PAIR) for x in entries[i : i + 2]]
            found += [(i // 2, start, numbers.interleaved(b, pair[0], pair[1], start)) for start in (0, LANES)]
        return found


def pack(b: Builder, words: Words, entries: Value, count: Value, width: Value, columns: Value, rows: Value | None):
    """Packs `count` entries, a multiple of 16, whose addresses are at `entries`."""

    def sixteen(k: Value) -> None:
        addresses = [b.load(b.element(entries, b.add(k, long(i)), POINTER), typ=POINTER) for i in range(LANES)]

        def part(d: Value) -> None:
            found = [words.load(b, b.element(address, d, words.kind)) for address in addresses]
            if rows is not None:
                strip = b.mul(b.udiv(d, long(STRIP)), long(TILE // words.size * STRIP))
                start = b.add(strip, b.add(b.mul(k, long(STRIP // words.size)), b.urem(d, long(STRIP))))
                for row, column, x in words.rows(b, found):
                    at = b.add(start, long(row * STRIP + column))
                    b.store(x, b.element(rows, at, FLOAT), align=4)
            start = b.add(b.mul(d, long(TILE // words.size)), k)
            for c, x in enumerate(numbers.transposed(b, found)):
                b.store(x, b.element(columns, b.add(start, long(c * TILE)), FLOAT), align=4)

        b.loop(long(0), lambda d: b.icmp_signed("<", d, width), LANES * words.size, part)

    b.loop(long(0), lambda k: b.icmp_signed("<", k, count), LANES, sixteen)


class Product:
    """out [rows, columns] = out * factors [rows] + x [rows, depth] times y; without `factors` what was in `out` does
    not count. y is in strips [columns / STRIP, any, STRIP], of which `depth` rows count; x and out have rows of any
    length."""

    def __init__(self, module: ir.Module, name: str, words: Words):
        self._blocks = {
            (rows, vectors): _block(module, f"{name}.{rows}.{vectors}", words, rows, vectors)
            for rows in _BLOCKS
            for vectors in (_VECTORS, 1)
        }

    def __call__(
        self,
        b: Builder,
        x: tuple[Value, Value],  # address, and the length of a row
        y: tuple[Value, int],  # address, and rows of a strip
        out: tuple[Value, Value],
        rows: Value,
        columns: Value,
        depth: Value,
        factors: Value | None = None,
    ) -> None:
        def strip(vectors: int, column: Value) -> None:
            of_strip = b.mul(b.udiv(column, long(STRIP)), long(y[1] * STRIP))
            start = b.element(y[0], b.add(of_strip, b.urem(column, long(STRIP))), FLOAT)
            row = long(0)
            for size in _BLOCKS:

                def some_rows(row: Value, size: int = size) -> None:
                    arguments = [
                        b.element(x[0], b.mul(row, x[1]), FLOAT),
                        start,
                        b.element(out[0], b.add(b.mul(row, out[1]), column), FLOAT),
                        *(x[1], out[1], depth),
                        out[0] if factors is None else b.element(factors, row, FLOAT),
                        ir.Constant(ir.IntType(1), int(factors is not None)),
                    ]
                    b.call(self._blocks[size, vectors], arguments)

                row, _ = b.loop(row, _fits(b, size, rows), size, some_rows)

        column, _ = b.loop(long(0), _fits(b, STRIP, columns), STRIP, lambda column: strip(_VECTORS, column))
        b.loop(column, _fits(b, LANES, columns), LANES, lambda column: strip(1, column))


def _fits(b: Builder, size: int, stop: Value) -> Callable[[Value], Value]:
    return lambda i: b.icmp_signed("<=", b.add(i, long(size)), stop)


def _block(module: ir.Module, name: str, words: Words, rows: int, vectors: int) -> ir.Function:
    """void block(x, y, out, length of x's and out's rows, depth, factors, whether there are factors)"""
    kinds = [POINTER, POINTER, POINTER, LONG, LONG, LONG, POINTER, ir.IntType(1)]
    function = internal(module, name, kinds)
    b = Builder(function)
    x, y, out, x_row, out_row, depth, factors, keeps = function.args
    places = [
        b.element(out, b.add(b.mul(out_row, long(r)), long(v * LANES)), FLOAT)
        for r in range(rows)
        for v in range(vectors)
    ]

    def add(i: Value, *sums: Value) -> list[Value]:
        row = b.mul(i, long(STRIP))
        columns = [b.vector(b.element(y, b.add(row, long(v * LANES)), FLOAT), FLOAT) for v in range(vectors)]
        new = []
        for r in range(rows):
            factor = b.splat(b.element(x, b.add(b.mul(x_row, long(r)), i), FLOAT))
            new += [words.add_product(b, factor, columns[v], sums[r * vectors + v]) for v in range(vectors)]
        return new

    factor = [b.splat(b.element(factors, long(r), FLOAT)) for r in range(rows)]
    before = []
    for i, place in enumerate(places):
        kept = b.fmul(b.load(place, align=4, typ=VECTOR), factor[i // vectors])
        before.append(b.select(keeps, kept, numbers.constant(0.0)))
    _, sums = b.loop(long(0), lambda i: b.icmp_signed("<", i, depth), 1, add, before)
    for value, place in zip(sums, places, strict=True):
        b.store(value, place, align=4)
    b.ret_void()
    return function
