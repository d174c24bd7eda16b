"""The grouped product in machine code of our own: each weight is read from memory once.

XLA's CPU libraries copy the weights into an order of their own at every product, which for a few rows takes longer than
the product. An item is one group's rows times all its columns, or some where there are fewer groups than threads. Up to
`_FEW` rows go through the weights where they lie, in the order of memory, some rows of K at a time, with their sums in
the caches. For more rows a tile of weights is packed in the cache, while the one below it is asked for: rows of a wide
matrix lie at addresses that a cache cannot hold together. Either way a row's sums are added in the order of K, whatever
its company.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.grouped_matmul.blocks import Multiply, best, block, pack
from pallas_kernels.native import entries
from pallas_kernels.native.emit import FLOAT, HALF, LANES, LONG, POINTER, VECTOR, VOID, Builder, Value, long
from pallas_kernels.native.machine_code import KINDS, Operation, has_feature
from pallas_kernels.native.operands import data, dim, result

Blocks = dict[tuple[int, int], ir.Function]  # by rows and vectors
_STRIP = 4 * LANES  # columns: 4 vectors of weights, and 6 rows x 4 of sums, are 28 of AVX-512's 32 registers
_BLOCKS = (6, 4, 2, 1)  # rows that are multiplied at once
# Rows of K and columns of a tile; as many rows are a multiple of how many any CPU multiplies at once.
_IN_PLACE = (8, 1024)  # also how far ahead weights are asked for
_PACKED = (128, 256)  # of floats, an eighth of the second level cache of a core
_FEW = {FLOAT: 16, HALF: 8}  # rows for which weights stay in place, by the weights' type
# A call this small takes less time than waking another thread does: weights that are read, and multiplications.
_SMALL = (1 << 17, 1 << 20)


def supports(weights: jax.Array) -> bool:
    """Whether the kernel takes such weights [..., K, N]."""
    return weights.dtype.name in KINDS and weights.shape[-1] % LANES == 0


def is_fast_for_many(dtype: jnp.dtype) -> bool:
    """Whether on this CPU the kernel multiplies many rows about as fast as XLA's library.

    Not bfloat16 where the library has AMX, which multiplies eight times as fast as float32, or where a CPU cannot
    multiply it in pairs.
    """
    return dtype != jnp.bfloat16 or (has_feature("avx512bf16") and not has_feature("amx-bf16"))


def grouped_product(
    x: jax.Array,  # [R, K] rows, group after group, of the weights' type
    weights: jax.Array,  # [G, K, N] float32 or bfloat16, N a multiple of 16
    starts: jax.Array | np.ndarray,  # [E + 1] int32, where each group's rows start; the last is where they end
    first: int | jax.Array = 0,  # the matrix of group 0
) -> jax.Array:
    """Each row times its group's matrix, [R, N] float32, for CPUs: row starts[e] + i times weights[first + e].

    Rows that are in no group are not written: what they hold means nothing. A row's result does not depend on the
    others. Raises ValueError for shapes or types that do not fit.
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
    if x.dtype != weights.dtype:
        raise ValueError(f"grouped_product: x of {x.dtype} must be of the weights' type, {weights.dtype}")
    shape = jax.ShapeDtypeStruct((x.shape[0], weights.shape[2]), jnp.float32)
    begin = np.array([first], np.int32) if isinstance(first, int) else first.astype(jnp.int32).reshape(1)
    return _PRODUCT(weights.dtype, shape, x, weights, starts.astype(jnp.int32), begin)


def _emit(module: ir.Module, name: str, kind: ir.Type, multiply: Multiply | None = None) -> None:
    _count(module, name)
    _item(module, name, kind, multiply or best(kind))


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


def _item(module: ir.Module, name: str, kind: ir.Type, multiply: Multiply) -> None:
    wide, narrow = _STRIP // LANES, 1
    in_place = {(r, v): block(module, r, v, kind, multiply, is_packed=False) for r in _BLOCKS for v in (wide, narrow)}
    of_packed = {(r, wide): block(module, r, wide, kind, multiply, is_packed=True) for r in _BLOCKS}
    depth, columns = _PACKED
    size = depth // multiply.depth * wide  # vectors of a packed strip
    packing = pack(module, wide, kind, multiply, size)
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, LONG, LONG]), f"{name}.item")
    b = Builder(function)
    frame, i, items = function.args
    x, starts, out = data(b, frame, 0), data(b, frame, 2), result(b, frame, 0)
    k, n = dim(b, frame, 1, 1), dim(b, frame, 1, 2)
    packed = entries.room(b, VECTOR, long(columns // _STRIP * size))

    parts = b.udiv(items, _num_groups(b, frame))
    group, part = b.udiv(i, parts), b.urem(i, parts)
    width = b.mul(_up(b, _up(b, n, long(_STRIP)), parts), long(_STRIP))
    left = b.mul(part, width)
    right = b.smaller(b.add(left, width), n)
    start = b.integer(starts, group)
    stop = b.integer(starts, b.add(group, long(1)))
    matrix = b.add(group, b.integer(data(b, frame, 3), long(0)))
    weights = b.element(data(b, frame, 1), b.mul(matrix, b.mul(k, n)), kind)

    def at(top: Value, column: Value) -> Value:
        return b.element(weights, b.add(b.mul(top, n), column), kind)

    def times(blocks: Blocks, source: Value, top: Value, bottom: Value, ahead: Value, column: Value, v: int) -> None:
        """All rows times `v` vectors of columns of rows of the matrix, which are at `source`."""
        row = start
        for rows in _BLOCKS:

            def fits(row: Value, rows: int = rows) -> Value:
                return b.icmp_signed("<=", b.add(row, long(rows)), stop)

            def product(row: Value, rows: int = rows) -> None:
                factors = b.element(x, b.add(b.mul(row, k), top), kind)
                to = b.element(out, b.add(b.mul(row, n), column), FLOAT)
                is_first = b.icmp_signed("==", top, long(0))
                b.call(blocks[rows, v], [factors, source, ahead, to, b.sub(bottom, top), k, n, is_first])

            row, _ = b.loop(row, fits, rows, product)

    def tiles(depth: int, columns: int, left: Value, is_packed: bool) -> None:
        """All rows times tiles of the matrix from a column on, to the right."""

        def column_of_tiles(left: Value) -> None:
            end = b.smaller(b.add(left, long(columns)), right)

            def tile(top: Value) -> None:
                bottom = b.smaller(b.add(top, long(depth)), k)
                below = b.add(top, long(depth))
                if is_packed:
                    strips = b.udiv(b.sub(end, left), long(_STRIP))
                    b.call(packing, [at(top, left), packed, b.sub(bottom, top), strips, n])

                def strip(column: Value) -> None:
                    source, blocks = at(top, column), in_place
                    if is_packed:
                        s = b.udiv(b.sub(column, left), long(_STRIP))
                        source, blocks = b.element(packed, b.mul(s, long(size)), VECTOR), of_packed
                    times(blocks, source, top, bottom, at(below, column), column, wide)

                def rest(column: Value) -> None:
                    times(in_place, at(top, column), top, bottom, at(below, column), column, narrow)

                column, _ = b.loop(left, lambda c: b.icmp_signed("<=", b.add(c, long(_STRIP)), end), _STRIP, strip)
                b.loop(column, lambda c: b.icmp_signed("<", c, end), LANES, rest)

            b.loop(long(0), lambda top: b.icmp_signed("<", top, k), depth, tile)

        b.loop(left, lambda c: b.icmp_signed("<", c, right), columns, column_of_tiles)

    rows = b.sub(stop, start)
    few, none = b.icmp_signed("<=", rows, long(_FEW[kind])), b.icmp_signed("==", rows, long(0))
    tiles(*_IN_PLACE, b.select(b.and_(few, b.not_(none)), left, right), is_packed=False)
    tiles(*_PACKED, b.select(few, right, left), is_packed=True)
    b.ret_void()


_PRODUCT = Operation("grouped_product", _emit)
