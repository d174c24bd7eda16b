"""The kernel of the scores on a GPU.

A block of threads scores _PART entries for up to eight queries, which stay in shared memory while the keys stream by,
each read once for all of them; a warpgroup has 64 keys in registers, and multiplies them by one query's heads after
another (`mma`, warp level, which Hopper and Blackwell both have).

`ldmatrix`, which brings a key to the thread whose `mma` needs it, moves 16 bits: codes of a byte are read as pairs of
neighbouring channels, and the even channels come before the odd ones, in the queries too. FP4 has the channels of the
first half in the low nibbles, so that its order is even and odd ones of the first half, then those of the second. Codes
become bfloat16 exactly; int8's and fp8's scales, a number a key, multiply the scores, and fp4's the numbers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.entry_format import FP4_GROUP
from pallas_kernels.target import Target

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

_KEYS = 64  # of a warpgroup at a time: a row of the matmul each
_PART = 512  # entries of a block of threads
_THREADS = 2  # its warpgroups, which take _KEYS in turn
_SLOTS = 3  # buffers of a warpgroup
_DEPTH = 64  # of the keys' width in one step of a matmul: a tile of shared memory
_WORDS = 32  # side words that one copy brings, at least: a line of shared memory


def supports(q: jax.Array, pages: Pages, target: Target) -> bool:
    """Whether the kernels take these: bfloat16, 16 to 64 heads, keys 64 or 128 wide, pages of 8, 16, 32 or 64 n.

    Quantised keys have pages of 32 or 64 n. No other device shares the pages. Float32 too where it is interpreted, for
    exact comparisons.
    """
    heads, width = q.shape[2:]
    form, epp = pages.pool.format, pages.entries_per_page
    dtypes = (jnp.bfloat16, jnp.float32) if target.interpret else (jnp.bfloat16,)
    return (
        target.has_gpu_kernels
        and pages.count == 1
        and q.dtype in dtypes
        and (form.quantised or form.name == q.dtype.name)
        and heads in (16, 32, 64)
        and width in (64, 128)
        and (epp in ((_WORDS,) if form.quantised else (8, 16, 32)) or epp % _KEYS == 0)
    )


def score(
    q: jax.Array,  # [NB, B, N, d], of which
    weights: jax.Array,  # [NB, B, N]
    blocks: QueryBlocks,
    pages: Pages,
    seen: jax.Array,  # [n, B]
    first: jax.Array,  # blocks first .. first + n
    padded: int,
    *,
    k: int,
    target: Target,
) -> jax.Array:
    """[n, B, padded] int32 in the order of the scores; what no query of the block sees may be anything."""
    _, block, heads, width = q.shape
    num_blocks = seen.shape[0]
    form, epp = pages.pool.format, pages.entries_per_page
    group = max(n for n in range(1, 9) if block % n == 0)
    most, ids = jnp.max(seen, axis=1), pages.page_ids(blocks.row).astype(jnp.int32)
    pools = [pages.pool.values]
    if form.quantised:
        assert pages.pool.side is not None
        pools = [_in_pairs(pages.pool.values), pages.pool.side]
        q = _as_read(q, form.name)
    copies = max(1, _KEYS // epp) * len(pools)
    slots = _THREADS * _SLOTS
    scratch = {
        "queries": _tiled((group, heads, width), q.dtype),
        "keys": _tiled((slots, _KEYS, pools[0].shape[2]), pools[0].dtype),
        "side": plgpu.SMEM((slots, _KEYS), jnp.uint32) if form.quantised else None,
        "queries_here": plgpu.Barrier(num_arrivals=group),
        "keys_here": plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
    }

    def indexer_scores(most, first, ids, q, weights, *refs):
        *pools, scores, scratch = refs
        n, part = lax.axis_index("block"), lax.axis_index("part")
        block = first[0] + n

        @pl.when(part * _PART < most[n])
        def _() -> None:
            keys = _Keys(ids.at[block], pools, scratch, most[n], form.name, q.dtype)
            _score_part(keys, q.at[block], weights.at[block], scores.at[n], scratch, target.interpret)

    return plgpu.kernel(
        indexer_scores,
        out_type=jax.ShapeDtypeStruct((num_blocks, block, padded), jnp.int32),
        scratch_types=[scratch],
        grid=(num_blocks, -(-pages.max_entries // _PART), block // group),
        grid_names=("block", "part", "group"),
        num_threads=_THREADS,
        thread_name="warpgroup",
        # With layouts written out: inferring them takes minutes.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=_cost(q, pages, num_blocks),
        interpret=plgpu.InterpretGPUParams() if target.interpret else None,
    )(jnp.where(most > k, most, 0), first[None], ids, q, weights, *pools)


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory whose rows of up to 128 bytes `ldmatrix` reads without conflicts."""
    row = min(128, shape[-1] * dtype.itemsize)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, row // dtype.itemsize)), plgpu.SwizzleTransform(row))
    )


def _in_pairs(codes: jax.Array) -> jax.Array:
    """Bytes [..., n] -> int16 [..., n / 2], the even one in the low byte. The same memory: nothing is copied."""
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.int16)


def _as_read(q: jax.Array, name: str) -> jax.Array:
    """Queries [..., d] with the channels in the order in which quantised keys are read."""
    halves = q.reshape(*q.shape[:-1], 2 if name == "fp4" else 1, -1, 2)
    return halves.swapaxes(-1, -2).reshape(q.shape)


def _cost(q: jax.Array, pages: Pages, num_blocks: int) -> pl.CostEstimate:
    """Upper bounds from the shapes: every entry the tables can name is visible. Keys come once a block, since for its
    queries after the eighth they are in the second-level cache."""
    _, block, heads, width = q.shape
    entries = pages.max_entries
    pools = [x for x in (pages.pool.values, pages.pool.side) if x is not None]
    page_bytes = sum(x[0].size * x.dtype.itemsize for x in pools)
    query_bytes = heads * (width * q.dtype.itemsize + 4)
    return pl.CostEstimate(
        flops=num_blocks * block * heads * entries * (2 * width + 2),
        bytes_accessed=num_blocks * (pages.table.shape[1] * (page_bytes + 4) + block * (query_bytes + entries * 4)),
        transcendentals=0,
    )


class _Keys:
    """A warpgroup's keys of this part on their way into its ring of buffers, _KEYS at a time."""

    def __init__(self, ids, pools, scratch, most, name: str, dtype):
        self.ids, self.pools, self.scratch, self.most, self.name, self.dtype = ids, pools, scratch, most, name, dtype
        self.thread, part = lax.axis_index("warpgroup"), lax.axis_index("part")
        self.start = part * _PART
        count = lax.div(jnp.minimum(_PART, most - self.start) + (_KEYS - 1), _KEYS)  # of all warpgroups
        self.count = lax.div(count - self.thread + (_THREADS - 1), _THREADS)

    def entry(self, n):
        """The first of the n-th keys."""
        return self.start + (n * _THREADS + self.thread) * _KEYS

    def _slot(self, n):
        return self.thread * _SLOTS + lax.rem(n, _SLOTS)

    def bring(self, n) -> None:
        @pl.when(n < self.count)
        def _() -> None:
            slot, first = self._slot(n), self.entry(n)
            here, buffers = self.scratch["keys_here"].at[slot], [self.scratch["keys"].at[slot]]
            epp = self.pools[0].shape[1]
            size = min(epp, _KEYS)
            for i in range(_KEYS // size):
                # Those past the end are the last page once more.
                page = self.ids[lax.div(jnp.minimum(first + i * size, self.most - 1), epp)]
                own, source = pl.ds(i * size, size), pl.ds(lax.rem(first, epp) if epp > size else 0, size)
                plgpu.copy_gmem_to_smem(self.pools[0].at[page, source], buffers[0].at[own], here)
                if len(self.pools) > 1:
                    side = self.scratch["side"].at[slot, own]
                    plgpu.copy_gmem_to_smem(self.pools[1].at[page, 0, source], side, here)

    def take(self, n) -> tuple[list[jax.Array], jax.Array | None]:
        """The n-th keys [_KEYS, _DEPTH] of each step of a matmul, and what their scores are multiplied by [_KEYS]."""
        slot = self._slot(n)
        plgpu.barrier_wait(self.scratch["keys_here"].at[slot])
        buffer, left = self.scratch["keys"].at[slot], layout_of("MMA_LHS")
        columns = min(_DEPTH, buffer.shape[1])
        parts = [
            plgpu.load(buffer.at[:, pl.ds(d, columns)], layout=left, optimized=False)
            for d in range(0, buffer.shape[1], columns)
        ]
        if self.name in ("bfloat16", "float32"):
            return parts, None
        side = self.scratch["side"].at[slot]
        if self.name == "fp4":
            words = lax.bitcast_convert_type(plgpu.load(side, layout=left.reduce(1), optimized=False), jnp.int32)
            return _in_steps(_fp4(parts[0], words, self.dtype)), None
        codes = [(parts[0] & 255).astype(jnp.uint8), lax.shift_right_logical(parts[0], jnp.int16(8)).astype(jnp.uint8)]
        kind = jnp.int8 if self.name == "int8" else jnp.float8_e4m3fn
        values = [lax.bitcast_convert_type(c, kind).astype(jnp.float32).astype(self.dtype) for c in codes]
        words = plgpu.load(side, layout=layout_of("MMA_ACC").reduce(1), optimized=False)
        return _in_steps(values), lax.bitcast_convert_type(words, jnp.float32)


def _in_steps(parts: list[jax.Array]) -> list[jax.Array]:
    """Columns [_KEYS, n] in a row -> [_KEYS, _DEPTH] each."""
    together = _DEPTH // parts[0].shape[1]
    return [lax.concatenate(parts[i : i + together], 1) for i in range(0, len(parts), together)]


def _fp4(pairs: jax.Array, words: jax.Array, dtype) -> list[jax.Array]:
    """pairs int16 [_KEYS, d / 4] of bytes, scales' words [_KEYS] -> [_KEYS, d / 4] even and odd channels of the first
    half, even and odd ones of the second."""
    layout = layout_of("MMA_LHS")
    columns = pairs.shape[1]
    group = plgpu.broadcasted_iota(jnp.int32, pairs.shape, 1, layout=layout) >= FP4_GROUP // 2
    words = plgpu.layout_cast(lax.broadcast_in_dim(words, pairs.shape, [0]), layout)
    pairs = pairs.astype(jnp.int32)
    parts = []
    for half in range(2):
        first = half * columns * 2 // FP4_GROUP  # of the half's scales
        exponent = words >> (8 * first)
        if columns > FP4_GROUP // 2:
            exponent = jnp.where(group, words >> (8 * first + 8), exponent)
        scale = lax.bitcast_convert_type((exponent & 255) << 23, jnp.float32)
        parts += [(_e2m1(pairs >> (8 * odd + 4 * half)) * scale).astype(dtype) for odd in range(2)]
    return parts


def _e2m1(codes: jax.Array) -> jax.Array:
    """The numbers of E2M1 codes in the low four bits of int32: sign, two bits of exponent, one of mantissa."""
    size = codes & 7
    bits = jnp.where(size >= 2, (size << 22) + (126 << 23), jnp.where(size == 1, 126 << 23, 0))
    return lax.bitcast_convert_type(bits | ((codes & 8) << 28), jnp.float32)


def _score_part(keys: _Keys, q, weights, scores, scratch, interpret: bool) -> None:
    num_queries, heads, width = scratch["queries"].shape
    group = lax.axis_index("group")
    right, total = layout_of("MMA_RHS"), layout_of("MMA_ACC")
    for n in range(_SLOTS - 1):
        keys.bring(jnp.int32(n))

    @pl.when(keys.thread == 0)
    def _() -> None:
        for n in range(num_queries):
            here = scratch["queries_here"]
            plgpu.copy_gmem_to_smem(q.at[group * num_queries + n], scratch["queries"].at[n], here)

    plgpu.barrier_wait(scratch["queries_here"])

    def step(n, carry):
        parts, scale = keys.take(n)
        plgpu.commit_smem()  # all have read it: a copy may follow
        keys.bring(n + (_SLOTS - 1))

        def score(i, carry):
            products = plgpu.layout_cast(jnp.zeros((_KEYS, heads), jnp.float32), total)
            for d, x in zip(range(0, width, _DEPTH), parts, strict=True):
                y = scratch["queries"].at[i, :, pl.ds(d, _DEPTH)].transpose((1, 0))
                products = _matmul(products, x, plgpu.load(y, layout=right, optimized=False), interpret)
            query = group * num_queries + i
            weight = plgpu.load(weights.at[query], layout=total.reduce(0), optimized=False)
            weight = plgpu.layout_cast(lax.broadcast_in_dim(weight, (_KEYS, heads), [1]), total)
            sums = jnp.sum(jnp.maximum(products, 0.0) * weight, axis=1)
            if scale is not None:
                sums *= scale
            sums = jnp.where(sums == 0.0, 0.0, sums)  # -0 and 0 are a tie
            bits = lax.bitcast_convert_type(sums, jnp.int32)
            bits = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # int32 of the floats' order
            plgpu.store(scores.at[query, pl.ds(keys.entry(n), _KEYS)], bits, optimized=False)
            return carry

        return lax.fori_loop(0, num_queries, score, carry)

    lax.fori_loop(0, keys.count, step, 0)


def _matmul(total: jax.Array, a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    if interpret:  # which has no mma
        return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(total, a, b)


def layout_of(name: str) -> Any:
    """Of one of the three operands of a warpgroup's `mma` of 64 rows."""
    return getattr(plgpu.Layout, name)(jnp.bfloat16, m_warps=4)
