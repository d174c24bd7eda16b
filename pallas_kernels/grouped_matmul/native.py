"""The grouped product in machine code of our own: each weight is read once, where it lies.

XLA's CPU libraries copy the weights into an order of their own at every product, which for a few rows takes longer than
the product. An item is one group's rows times all its columns, or some where there are fewer groups than threads. Up to
`_FEW` rows go through the weights in the order of memory, some rows of K at a time, with their sums in the caches:
memory is then read up to twice as fast as in strips. More rows go through strips of columns, whose sums stay in
registers for all of K while the strip stays in the second level cache. Either way a row's sums are added in the order
of K, whatever its company.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, INT, LANES, LONG, POINTER, VECTOR, VOID, Builder, Value, long
from pallas_kernels.native.machine_code import KINDS, Operation
from pallas_kernels.native.operands import data, dim, result

_STRIP = 4 * LANES  # columns: 4 vectors of weights, and 6 rows x 4 of sums, are 28 of AVX-512's 32 registers
_BLOCKS = (6, 4, 2, 1)  # rows that are multiplied at once
_FEW = 40  # rows
_DEPTH = 8  # rows of K at a time for few rows; also how far ahead weights are asked for
_TILE = 1024  # columns at a time for few rows
_LINE = 64  # bytes of a cache line
# A call this small takes less time than waking another thread does: weights that are read, and multiplications.
_SMALL = (1 << 17, 1 << 20)


def supports(weights: jax.Array) -> bool:
    """Whether the kernel takes such weights [..., K, N]."""
    return weights.dtype.name in KINDS and weights.shape[-1] % LANES == 0


def grouped_product(
    x: jax.Array,  # [R, K] rows, group after group
    weights: jax.Array,  # [G, K, N] float32 or bfloat16, N a multiple of 16
    starts: jax.Array | np.ndarray,  # [E + 1] int32, where each group's rows start; the last is where they end
    first: int | jax.Array = 0,  # the matrix of group 0
) -> jax.Array:
    """Each row times its group's matrix, [R, N] float32, for CPUs: row starts[e] + i times weights[first + e].

    x is taken as float32. Rows that are in no group are not written: what they hold means nothing. A row's result
    does not depend on the others. Raises ValueError for shapes or weights that do not fit.
    """
    if weights.ndim != 3 or x.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"grouped_product: x {x.shape} and weights {weights.shape} must be [R, K] and [G, K, N]")
    if starts.shape[0] - 1 > weights.shape[0]:
        raise ValueError(f"grouped_product: starts {starts.shape} are of more groups than weights {weights.shape} has")
    if not supports(weights):
        raise ValueError(
            f"grouped_product: weights {weights.shape} of {weights.dtype} must be of {' or '.join(KINDS)} and have a "
            f"multiple of {LANES} columns"
        )
    shape = jax.ShapeDtypeStruct((x.shape[0], weights.shape[2]), jnp.float32)
    begin = np.array([first], np.int32) if isinstance(first, int) else first.astype(jnp.int32).reshape(1)
    return _PRODUCT(weights.dtype, shape, x.astype(jnp.float32), weights, starts.astype(jnp.int32), begin)


def _emit(module: ir.Module, name: str, kind: ir.Type) -> None:
    _count(module, name)
    _item(module, name, kind)


def _num_groups(b: Builder, frame: Value) -> Value:
    return b.sub(dim(b, frame, 2, 0), long(1))


def _up(b: Builder, a: Value, size: Value) -> Value:
    """a / size, rounded up."""
    return b.udiv(b.sub(b.add(a, size), long(1)), size)


def _count(module: ir.Module, name: str) -> None:
    """Every group is cut alike, into at most as many parts as it has strips: two items a thread or more in all."""
    function = ir.Function(module, ir.FunctionType(LONG, [POINTER, LONG]), f"{name}.count")
    b = Builder(function)
    frame, threads = function.args
    groups, columns = _num_groups(b, frame), dim(b, frame, 1, 2)
    matrix = b.mul(dim(b, frame, 1, 1), columns)
    products = b.mul(dim(b, frame, 0, 0), matrix)
    weights, most = _SMALL
    small = b.and_(b.icmp_signed("<=", matrix, long(weights)), b.icmp_signed("<=", products, long(most)))
    parts = b.smaller(_up(b, columns, long(_STRIP)), _up(b, b.mul(threads, long(2)), groups))
    b.ret(b.mul(groups, b.select(small, long(1), parts)))


def _item(module: ir.Module, name: str, kind: ir.Type) -> None:
    wide, narrow = _STRIP // LANES, 1
    blocks = {(r, v): _block(module, r, v, kind) for r in _BLOCKS for v in (wide, narrow)}
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, LONG, LONG]), f"{name}.item")
    b = Builder(function)
    frame, i, items = function.args
    x, starts, out = data(b, frame, 0), data(b, frame, 2), result(b, frame, 0)
    k, n = dim(b, frame, 1, 1), dim(b, frame, 1, 2)

    parts = b.udiv(items, _num_groups(b, frame))
    group, part = b.udiv(i, parts), b.urem(i, parts)
    width = b.mul(_up(b, _up(b, n, long(_STRIP)), parts), long(_STRIP))
    left = b.mul(part, width)
    right = b.smaller(b.add(left, width), n)
    start = b.sext(b.load(b.element(starts, group, INT), typ=INT), LONG)
    stop = b.sext(b.load(b.element(starts, b.add(group, long(1)), INT), typ=INT), LONG)
    matrix = b.add(group, b.sext(b.load(data(b, frame, 3), typ=INT), LONG))
    weights = b.element(data(b, frame, 1), b.mul(matrix, b.mul(k, n)), kind)
    few = b.icmp_signed("<=", b.sub(stop, start), long(_FEW))
    depth = b.select(few, long(_DEPTH), k)

    def times(top: Value, bottom: Value, vectors: int, column: Value) -> None:
        """All rows times a part of the matrix."""
        below = b.element(weights, b.add(b.mul(top, n), column), kind)
        row = start
        for rows in _BLOCKS:

            def fits(row: Value, rows: int = rows) -> Value:
                return b.icmp_signed("<=", b.add(row, long(rows)), stop)

            def multiply(row: Value, rows: int = rows) -> None:
                factors = b.element(x, b.add(b.mul(row, k), top), FLOAT)
                to = b.element(out, b.add(b.mul(row, n), column), FLOAT)
                is_first = b.icmp_signed("==", top, long(0))
                b.call(blocks[rows, vectors], [factors, below, to, b.sub(bottom, top), k, n, is_first])

            row, _ = b.loop(row, fits, rows, multiply)

    def tile(left: Value) -> None:
        end = b.smaller(b.add(left, long(_TILE)), right)

        def of_depth(top: Value) -> None:
            bottom = b.smaller(b.add(top, depth), k)
            strips = functools.partial(times, top, bottom, wide)
            rest = functools.partial(times, top, bottom, narrow)
            column, _ = b.loop(left, lambda c: b.icmp_signed("<=", b.add(c, long(_STRIP)), end), _STRIP, strips)
            b.loop(column, lambda c: b.icmp_signed("<", c, end), LANES, rest)

        b.loop(long(0), lambda top: b.icmp_signed("<", top, k), depth, of_depth)

    none = b.icmp_signed("==", start, stop)
    b.loop(b.select(none, right, left), lambda c: b.icmp_signed("<", c, right), _TILE, tile)
    b.ret_void()


def _block(module: ir.Module, rows: int, vectors: int, kind: ir.Type) -> ir.Function:
    """void block(x, weights, out, depth, K, N, is_first): adds `depth` products of `rows` rows to the sums of `vectors`
    vectors of columns, which are zero at first."""
    arguments = [POINTER, POINTER, POINTER, LONG, LONG, LONG, ir.IntType(1)]
    function = ir.Function(module, ir.FunctionType(VOID, arguments), f"block.{rows}.{vectors}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = Builder(function)
    x, weights, out, depth, k, n, is_first = function.args
    size = 4 if kind is FLOAT else 2
    places = [
        b.element(out, b.add(b.mul(n, long(r)), long(v * LANES)), FLOAT) for r in range(rows) for v in range(vectors)
    ]

    def add(i: Value, *sums: Value) -> list[Value]:
        row = b.element(weights, b.mul(i, n), kind)
        ahead = b.element(weights, b.mul(b.add(i, long(_DEPTH)), n), kind)
        for offset in range(0, vectors * LANES * size, _LINE):
            b.prefetch(b.element(ahead, long(offset // size), kind))
        columns = [b.vector(b.element(row, long(v * LANES), kind), kind) for v in range(vectors)]
        new = []
        for r in range(rows):
            factor = b.splat(b.element(x, b.add(b.mul(k, long(r)), i), FLOAT))
            new += [b.fused_multiply_add(factor, columns[v], sums[r * vectors + v]) for v in range(vectors)]
        return new

    zero = numbers.constant(0.0)
    before = [b.select(is_first, zero, b.load(place, align=4, typ=VECTOR)) for place in places]
    _, sums = b.loop(long(0), lambda i: b.icmp_signed("<", i, depth), 1, add, before)
    for value, place in zip(sums, places, strict=True):
        b.store(value, place, align=4)
    b.ret_void()
    return function


_PRODUCT = Operation("grouped_product", _emit)
