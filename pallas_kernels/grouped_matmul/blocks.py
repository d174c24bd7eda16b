"""Products of a few rows with a strip of columns, whose sums stay in registers: what the native product is made of.

Weights are multiplied where they lie or, for more rows, packed: as the products take them, strip after strip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import (
    FLOAT,
    HALF,
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
from pallas_kernels.native.machine_code import in_pairs


class Multiply(Protocol):
    """How x is multiplied by weights: `depth` rows of them at once and, where K ends, one.

    In what order a row's products are added depends on K alone.
    """

    depth: int

    def columns(self, b: Builder, rows: list[Value], vectors: int, kind: ir.Type) -> list[Value]:
        """Of the rows of weights at these addresses, as many vectors of columns."""
        ...

    def factor(self, b: Builder, x: Value, num_rows: int, kind: ir.Type) -> Value:
        """Of x at an address, what multiplies the columns of so many rows."""
        ...

    def add(self, b: Builder, factor: Value, column: Value, sums: Value) -> Value: ...


class Singly:
    """Row by row, as floats."""

    depth = 1

    def columns(self, b: Builder, rows: list[Value], vectors: int, kind: ir.Type) -> list[Value]:
        return [b.vector(b.element(rows[0], long(v * LANES), kind), kind) for v in range(vectors)]

    def factor(self, b: Builder, x: Value, num_rows: int, kind: ir.Type) -> Value:
        if kind is FLOAT:
            return b.splat(x)
        zeros = ir.Constant(ir.VectorType(HALF, 2), None)
        widened = b.insert_element(zeros, b.load(x, align=2, typ=HALF), ir.Constant(INT, 1))
        return b.bitcast(numbers.pick(b, widened, [0, 1] * LANES), VECTOR)

    def add(self, b: Builder, factor: Value, column: Value, sums: Value) -> Value:
        return b.fused_multiply_add(factor, column, sums)


class InPairs:
    """bfloat16 numbers two rows at once, as they are: twice as fast, where a CPU can."""

    depth = 2

    def columns(self, b: Builder, rows: list[Value], vectors: int, kind: ir.Type) -> list[Value]:
        width = min(vectors, 2) * LANES  # of a cache line, if there are as many
        line = ir.VectorType(HALF, width)
        found = []
        for start in range(0, vectors * LANES, width):
            lines = [b.load(b.element(row, long(start), kind), align=2, typ=line) for row in rows]
            upper, lower = lines if len(lines) == 2 else (lines[0], ir.Constant(line, None))
            for left in range(0, width, LANES):
                found.append(numbers.interleaved(b, upper, lower, left))
        return found

    def factor(self, b: Builder, x: Value, num_rows: int, kind: ir.Type) -> Value:
        pair = b.load(x, align=2, typ=INT) if num_rows == 2 else b.zext(b.load(x, align=2, typ=HALF), INT)
        return b.spread(b.bitcast(pair, FLOAT))

    def add(self, b: Builder, factor: Value, column: Value, sums: Value) -> Value:
        return b.add_products_of_pairs(factor, column, sums)


def best(kind: ir.Type) -> Multiply:
    """On this CPU, for x and weights of a kind."""
    return InPairs() if in_pairs(kind) else Singly()


def pack(module: ir.Module, vectors: int, kind: ir.Type, multiply: Multiply, size: int) -> ir.Function:
    """void pack(weights, packed, depth, strips, N): strips of `vectors` vectors of columns of `depth` rows, which are
    read in the order of memory; a strip has room for `size` vectors."""
    function = internal(module, "pack", [POINTER, POINTER, LONG, LONG, LONG])
    b = Builder(function)
    weights, packed, depth, strips, n = function.args

    def step(i: Value, *, num_rows: int) -> None:
        def strip(s: Value) -> None:
            rows = _rows(b, b.element(weights, b.mul(s, long(vectors * LANES)), kind), i, num_rows, n, kind)
            to = b.element(packed, b.mul(s, long(size)), VECTOR)
            for v, column in enumerate(multiply.columns(b, rows, vectors, kind)):
                b.store(column, _packed(b, to, i, v, vectors, multiply), align=LINE)

        b.loop(long(0), lambda s: b.icmp_signed("<", s, strips), 1, strip)

    _steps(b, depth, multiply, step)
    b.ret_void()
    return function


def block(
    module: ir.Module, rows: int, vectors: int, kind: ir.Type, multiply: Multiply, *, is_packed: bool
) -> ir.Function:
    """void block(x, weights, ahead, out, depth, K, N, is_first): adds `depth` products of `rows` rows to the sums of
    `vectors` vectors of columns, which are zero at first. Asks for the weights at `ahead`, as many in place."""
    name = f"block.{rows}.{vectors}.{'packed' if is_packed else 'in_place'}"
    function = internal(module, name, [POINTER] * 4 + [LONG] * 3 + [ir.IntType(1)])
    b = Builder(function)
    x, weights, ahead, out, depth, k, n, is_first = function.args
    size = size_of(kind)
    places = [
        b.element(out, b.add(b.mul(n, long(r)), long(v * LANES)), FLOAT) for r in range(rows) for v in range(vectors)
    ]

    def columns_of(i: Value, num_rows: int) -> list[Value]:
        if not is_packed:
            return multiply.columns(b, _rows(b, weights, i, num_rows, n, kind), vectors, kind)
        packed = [_packed(b, weights, i, v, vectors, multiply) for v in range(vectors)]
        return [b.load(column, align=LINE, typ=VECTOR) for column in packed]

    def step(i: Value, *sums: Value, num_rows: int) -> list[Value]:
        for row in _rows(b, ahead, i, num_rows, n, kind):
            for offset in range(0, vectors * LANES * size, LINE):
                b.prefetch(b.element(row, long(offset // size), kind))
        columns = columns_of(i, num_rows)
        new = []
        for r in range(rows):
            factor = multiply.factor(b, b.element(x, b.add(b.mul(k, long(r)), i), kind), num_rows, kind)
            new += [multiply.add(b, factor, columns[v], sums[r * vectors + v]) for v in range(vectors)]
        return new

    zero = numbers.constant(0.0)
    before = [b.select(is_first, zero, b.load(place, align=4, typ=VECTOR)) for place in places]
    for value, place in zip(_steps(b, depth, multiply, step, before), places, strict=True):
        b.store(value, place, align=4)
    b.ret_void()
    return function


def _rows(b: Builder, weights: Value, i: Value, num: int, n: Value, kind: ir.Type) -> list[Value]:
    """The addresses of `num` rows from row i on."""
    return [b.element(weights, b.mul(b.add(i, long(j)), n), kind) for j in range(num)]


def _packed(b: Builder, strip: Value, i: Value, v: int, vectors: int, multiply: Multiply) -> Value:
    """The address of a vector of the columns of row i, and of those that are multiplied with it."""
    step = b.udiv(i, long(multiply.depth))
    return b.element(strip, b.add(b.mul(step, long(vectors)), long(v)), VECTOR)


def _steps(
    b: Builder, depth: Value, multiply: Multiply, step: Callable[..., Any], carried: Sequence[Value] = ()
) -> list[Value]:
    """carried = step(i, *carried, num_rows=...) over `depth` rows, as many at once as are multiplied; -> the last."""
    i, values = long(0), list(carried)
    for num_rows in sorted({multiply.depth, 1}, reverse=True):

        def goes_on(i: Value, num_rows: int = num_rows) -> Value:
            return b.icmp_signed("<=", b.add(i, long(num_rows)), depth)

        i, values = b.loop(i, goes_on, num_rows, functools.partial(step, num_rows=num_rows), values)
    return values
