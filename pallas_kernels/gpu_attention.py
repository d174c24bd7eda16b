"""The Mosaic GPU kernel of decode attention: one query a row, keys streamed from pages or gathered one by one.

A block of threads is one row and up to 64 of its heads. It reads the keys its row sees and no others, 32 at a time:
pages (or parts of one) and gathered entries alike arrive by TMA in a ring of shared-memory buffers while earlier ones
are attended to. What bounds the speed is reading each key once a group of heads.

A warpgroup makes the logits of its part of a chunk's keys, all share them through shared memory, and each adds up its
part of the width: the sum over keys [heads, width] in float32 would not fit the registers of one. The matmuls are
`mma` (warp level), which Hopper and Blackwell both have. The sink is where the softmax starts: a key without a value.

Shared memory for 64 heads of width 512 in bfloat16: queries 64 KiB, buffers 128 KiB, logits and weights 12 KiB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

CHUNK = 32  # keys attended to at a time: two of the mma's 16 along the second matmul's sum
COLUMNS = 64  # of the weighted sum that one matmul adds to: its keys take 32 registers a thread
_MAX_WIDTH = 512  # whose buffers fit shared memory, and whose sums the registers
_FLOOR = -1e30  # of the maximum, finite, so that a row without a key gets weights 0 and not NaN
_MASKED = -2e30  # of a logit: below the floor, so that its weight is 0 whatever the maximum


class Keys(NamedTuple):
    """Where a segment of a row's keys is: places begin <= p < end of its own sequence."""

    index: jax.Array  # [NB, P] page ids, place p in page index[p // entries % P]; or [NB, k] the pool's entries
    pool: jax.Array  # [pages, entries, H], or gathered: [entries, H]
    begin: jax.Array  # [NB]
    end: jax.Array  # [NB]

    @property
    def geometry(self) -> tuple[int, int]:
        """Entries of a page, 0 if gathered; places of the index."""
        return (self.pool.shape[1] if self.pool.ndim == 3 else 0), self.index.shape[1]


def window_keys(blocks: QueryBlocks, pages: Pages, window: int) -> Keys:
    """The last `window` positions up to each block's only query."""
    end = jnp.where(blocks.length > 0, blocks.position + 1, 0)
    begin = jnp.maximum(0, end - window)
    return _paged(blocks, pages, pages.num_here(begin), pages.num_here(end))


def visible_keys(blocks: QueryBlocks, pages: Pages, ratio: int) -> Keys:
    """Every compressed entry that each block's only query sees."""
    visible = jnp.where(blocks.length > 0, (blocks.position + 1) // ratio, 0)
    end = pages.num_here(visible)
    return _paged(blocks, pages, jnp.zeros_like(end), end)


def chosen_keys(blocks: QueryBlocks, pages: Pages, chosen: jax.Array) -> Keys:
    """The entries chosen [NB, k], those in use first."""
    count, entry = pages.chosen(blocks, chosen)
    pool = pages.pool.reshape(pages.pool.shape[0] * pages.entries_per_page, -1)
    return Keys(entry, pool, jnp.zeros_like(count), count)


def _paged(blocks: QueryBlocks, pages: Pages, begin: jax.Array, end: jax.Array) -> Keys:
    return Keys(pages.page_ids(blocks.row).astype(jnp.int32), pages.pool.reshape(*pages.pool.shape[:2], -1), begin, end)


def supports(q: jax.Array, pages: list[Pages], target: Target) -> bool:
    """Whether the kernel takes these: one query a block, widths of 128 to 512, bfloat16 pages of 8, 16 or 32 k entries.

    Float32 too where it is interpreted, for exact comparisons.
    """
    block, width = q.shape[1], q.shape[3]
    dtypes = (jnp.bfloat16, jnp.float32) if target.interpret else (jnp.bfloat16,)
    return (
        target.has_gpu_kernels
        and block == 1
        and width % (2 * COLUMNS) == 0
        and width <= _MAX_WIDTH
        and q.dtype in dtypes
        and all(p.pool.dtype == q.dtype for p in pages)
        and all(p.entries_per_page in (8, 16) or p.entries_per_page % CHUNK == 0 for p in pages)
    )


def attend(
    q: jax.Array,  # [NB, 1, N, H]
    segments: list[Keys],
    sink: jax.Array,  # [N]
    *,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    """[NB, 1, N, H] float32 with the sinks; `partial`: what this device's keys make of the softmax, [NB, 1, N, ...]."""
    num_blocks, _, heads, width = q.shape
    group = 64 if heads > 32 else 32 if heads > 16 else 16  # heads of a block of threads
    threads = 2 if group > 16 else 1
    groups = -(-heads // group)
    pad = ((0, 0), (0, groups * group - heads))
    queries = jnp.pad(q[:, 0], (*pad, (0, 0)))
    if partial:
        start = jnp.full((1, heads), _FLOOR, jnp.float32), jnp.zeros((1, heads), jnp.float32)
    else:
        start = sink.astype(jnp.float32)[None], jnp.ones((1, heads), jnp.float32)
    start = [jnp.pad(x, pad)[0] for x in start]
    ranges = jnp.stack([x for keys in segments for x in (keys.begin, keys.end)], axis=1).astype(jnp.int32)
    arrays = [x for keys in segments for x in (keys.index, keys.pool)]

    shapes = [jax.ShapeDtypeStruct((num_blocks, groups * group, *last), jnp.float32) for last in ((width,), (), ())]
    tiles = (plgpu.TilingTransform((8, 128 // q.dtype.itemsize)), plgpu.SwizzleTransform(128))
    gathers = [keys.pool.ndim == 2 for keys in segments]
    slots = 2 if any(gathers) else 4
    buffer = (slots, CHUNK, width)
    geometry = tuple(keys.geometry for keys in segments)
    scratch = {
        "queries": plgpu.SMEM((group, width), q.dtype, transforms=tiles),
        "pages": plgpu.SMEM(buffer, q.dtype, transforms=tiles),
        "gathered": plgpu.SMEM(buffer, q.dtype) if any(gathers) else None,  # a row is no whole tile
        "logits": plgpu.SMEM((group, CHUNK), jnp.float32),
        "weights": plgpu.SMEM((group, CHUNK), q.dtype),
        "queries_here": plgpu.Barrier(),
        "keys_here": [plgpu.Barrier(num_arrivals=_num_copies(g, width), num_barriers=slots) for g in geometry],
        "together": plgpu.Barrier(num_arrivals=threads),
    }
    constants = {
        "geometry": geometry,
        "group": group,
        "threads": threads,
        "scale": scale,
        "interpret": target.interpret,
    }

    def decode_attention(*refs):
        num_in = 4 + len(arrays)
        _kernel(refs[:4], refs[4:num_in], refs[num_in:-1], refs[-1], **constants)

    out = plgpu.kernel(
        decode_attention,
        out_type=shapes if partial else shapes[:1],
        scratch_types=[scratch],
        grid=(num_blocks, groups),
        grid_names=("row", "group"),
        num_threads=threads,
        thread_name="warpgroup",
        # With layouts written out: inferring them takes minutes.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=_cost(q, segments),
        interpret=plgpu.InterpretGPUParams() if target.interpret else None,
    )(ranges, queries, *start, *arrays)
    total, *rest = (x[:, None, :heads] for x in out)
    return Running(rest[0][..., None], rest[1][..., None], total) if partial else total


def _num_copies(geometry: tuple[int, int], width: int) -> int:
    """Copies that bring one chunk."""
    epp, _ = geometry
    return max(1, CHUNK // epp) if epp else CHUNK * (width // _copy_size(width))


def _copy_size(width: int) -> int:
    """Elements of an entry that one copy brings, at most the 256 of a dimension."""
    return 256 if width % 256 == 0 else 128


def _kernel(inputs, arrays, outs, scratch, *, geometry, group, threads, scale, interpret):
    ranges, q, start_maximum, start_denominator = inputs
    row, thread = lax.axis_index("row"), lax.axis_index("warpgroup")
    heads = pl.ds(lax.axis_index("group") * group, group)
    width = q.shape[2]
    softmax = _Softmax(scratch, group, width, threads, thread, scale, interpret)

    @pl.when(thread == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q.at[row, heads], scratch["queries"], scratch["queries_here"])

    plgpu.barrier_wait(scratch["queries_here"])
    state = softmax.start(start_maximum.at[heads], start_denominator.at[heads])
    for n, (epp, places) in enumerate(geometry):
        stream = _Stream(
            index=arrays[2 * n].at[row],
            pool=arrays[2 * n + 1],
            begin=ranges[row, 2 * n],
            end=ranges[row, 2 * n + 1],
            buffers=scratch["pages" if epp else "gathered"],
            arrived=scratch["keys_here"][n],
            places=places,
            leads=thread == 0,
        )
        if n:
            softmax.meet()  # all have read the last buffers of the segment before
        state = stream.run(softmax, state)
    softmax.finish(state, [out.at[row, heads] for out in outs])


class _Stream(NamedTuple):
    """A segment of a row's keys on its way into the ring of buffers; one warpgroup starts the copies."""

    index: Any  # [P] or [k]
    pool: Any
    begin: jax.Array
    end: jax.Array
    buffers: Any  # [slots, CHUNK, H]
    arrived: Any  # a barrier a slot
    places: int  # P or k
    leads: jax.Array

    def run(self, softmax: _Softmax, state):
        first, last = lax.div(self.begin, CHUNK), lax.div(self.end + (CHUNK - 1), CHUNK)
        ahead = self.buffers.shape[0] - 1

        def copy(chunk) -> None:
            @pl.when(self.leads & (chunk < last))
            def _() -> None:
                slot = lax.rem(chunk - first, ahead + 1)
                bring = _copy_pages if len(self.pool.shape) == 3 else _copy_entries
                bring(self, self.buffers.at[slot], self.arrived.at[slot], chunk)

        def step(chunk, state):
            slot = lax.rem(chunk - first, ahead + 1)
            plgpu.barrier_wait(self.arrived.at[slot])
            begin, end = self.begin - chunk * CHUNK, self.end - chunk * CHUNK
            # The next copy goes where the chunk before was, which nobody reads any more once the logits are there.
            return softmax.add(state, self.buffers.at[slot], begin, end, lambda: copy(chunk + ahead))

        for i in range(ahead):
            copy(first + i)
        return lax.fori_loop(first, last, step, state)


def _copy_pages(keys: _Stream, buffer, arrived, chunk) -> None:
    """The chunk's keys: a part of a page, or several pages; those past the end are the last page once more."""
    epp = keys.pool.shape[1]
    size = min(epp, CHUNK)
    for i in range(CHUNK // size):
        place = jnp.minimum(chunk * CHUNK + i * size, keys.end - 1)
        page = keys.index[lax.rem(lax.div(place, epp), keys.places)]
        source = keys.pool.at[page]
        if epp > size:
            source = keys.pool.at[page, pl.ds(lax.rem(chunk * CHUNK, epp), size)]
        plgpu.copy_gmem_to_smem(source, buffer.at[pl.ds(i * size, size)], arrived)


def _copy_entries(keys: _Stream, buffer, arrived, chunk) -> None:
    """The chunk's keys one by one; those past the end are the last one once more."""
    width = keys.pool.shape[1]
    size = _copy_size(width)

    def body(j, carry):
        entry = keys.index[jnp.minimum(chunk * CHUNK + j, keys.end - 1)]
        for c in range(0, width, size):
            plgpu.copy_gmem_to_smem(keys.pool.at[entry, pl.ds(c, size)], buffer.at[j, pl.ds(c, size)], arrived)
        return carry

    lax.fori_loop(0, CHUNK, body, 0)


class _Softmax:
    """The running softmax of a group of heads: (maximum [M], denominator [M], sums [M, COLUMNS] of this warpgroup)."""

    def __init__(self, scratch, group: int, width: int, threads: int, thread, scale: float, interpret: bool):
        self.scratch, self.group, self.width, self.threads, self.thread = scratch, group, width, threads, thread
        self.scale, self.interpret = scale, interpret
        layout = functools.partial(_layout, m_warps=group // 16)
        self.left, self.right, self.sum = (layout(name) for name in ("MMA_LHS", "MMA_RHS", "MMA_ACC"))
        self.heads = self.sum.reduce(1)
        own = width // threads
        self.columns = [pl.ds(thread * own + c, COLUMNS) for c in range(0, own, COLUMNS)]  # of this warpgroup

    def meet(self) -> None:
        """All warpgroups have come here."""
        if self.threads > 1:
            plgpu.barrier_arrive(self.scratch["together"])
            plgpu.barrier_wait(self.scratch["together"])

    def start(self, maximum, denominator):
        zero = plgpu.layout_cast(jnp.zeros((self.group, COLUMNS), jnp.float32), self.sum)
        load = functools.partial(plgpu.load, layout=self.heads, optimized=False)
        return load(maximum), load(denominator), (zero,) * len(self.columns)

    def add(self, state, keys, begin, end, refill: Callable[[], None]):
        """Adds those of a chunk's keys [CHUNK, H] at begin <= place < end; calls `refill` once no other is read."""
        maximum, denominator, sums = state
        logits, weights = self.scratch["logits"], self.scratch["weights"]
        own = pl.ds(self.thread * (CHUNK // self.threads), CHUNK // self.threads)
        plgpu.store(logits.at[:, own], self._logits(keys.at[own]), optimized=False)
        self.meet()
        refill()
        self._clear(keys, begin, end)
        shape = (self.group, CHUNK)
        place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self.sum)
        x = plgpu.load(logits, layout=self.sum, optimized=False) * self.scale
        x = jnp.where((place >= begin) & (place < end), x, _MASKED)
        top = jnp.maximum(maximum, jnp.max(x, axis=1))
        x = jnp.exp(x - self._spread(top, shape))
        decay = jnp.exp(maximum - top)
        denominator = denominator * decay + jnp.sum(x, axis=1)

        @pl.when(self.thread == 0)
        def _() -> None:
            plgpu.store(weights, x.astype(weights.dtype), optimized=False)

        self.meet()
        x = plgpu.load(weights, layout=self.left, optimized=False)
        spread = self._spread(decay, (self.group, COLUMNS))
        sums = tuple(
            self._matmul(total * spread, x, plgpu.load(keys.at[:, columns], layout=self.right, optimized=False))
            for total, columns in zip(sums, self.columns, strict=True)
        )
        return top, denominator, sums

    def finish(self, state, outs: list[Any]) -> None:
        """Writes sums / denominator; or sums, maximum, denominator where there are places for all."""
        maximum, denominator, sums = state
        divisor = self._spread(denominator, (self.group, COLUMNS))
        for total, columns in zip(sums, self.columns, strict=True):
            value = total if len(outs) > 1 else total / divisor
            plgpu.store(outs[0].at[:, columns], value, optimized=False)
        if len(outs) > 1:

            @pl.when(self.thread == 0)
            def _() -> None:
                plgpu.store(outs[1], maximum, optimized=False)
                plgpu.store(outs[2], denominator, optimized=False)

    def _logits(self, keys) -> jax.Array:
        """[M, K] of keys [K, H], unscaled; in a loop, so that few of the queries are in registers."""
        queries, depth = self.scratch["queries"], 64

        def body(i, total):
            part = pl.ds(i * depth, depth)
            a = plgpu.load(queries.at[:, part], layout=self.left, optimized=False)
            b = plgpu.load(keys.at[:, part].transpose((1, 0)), layout=self.right, optimized=False)
            return self._matmul(total, a, b)

        zero = plgpu.layout_cast(jnp.zeros((self.group, keys.shape[0]), jnp.float32), self.sum)
        return lax.fori_loop(0, self.width // depth, body, zero)

    def _clear(self, keys, begin, end) -> None:
        """Zeros for what is no key of the row: weight 0 times NaN is NaN. Each warpgroup does its own columns."""

        @pl.when((begin > 0) | (end < CHUNK))
        def _() -> None:
            layout = _layout("MMA_ACC", m_warps=1)
            place = plgpu.broadcasted_iota(jnp.int32, (CHUNK, COLUMNS), 0, layout=layout)
            for columns in self.columns:
                x = plgpu.load(keys.at[:, columns], layout=layout, optimized=False)
                x = jnp.where((place >= begin) & (place < end), x, jnp.zeros_like(x))
                plgpu.store(keys.at[:, columns], x, optimized=False)
            plgpu.commit_smem()  # before the next copy into it

    def _spread(self, x: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [0]), self.sum)

    def _matmul(self, total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        if self.interpret:  # which has no mma
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(total, a, b)


def _layout(name: str, m_warps: int) -> Any:
    return getattr(plgpu.Layout, name)(jnp.bfloat16, m_warps=m_warps)


def _cost(q: jax.Array, segments: list[Keys]) -> pl.CostEstimate:
    """Upper bounds from the shapes: every place of every index is a key."""
    keys = sum(places * (epp or 1) for epp, places in (s.geometry for s in segments))
    return pl.CostEstimate(
        flops=4 * q.size * keys,
        bytes_accessed=q.size * (q.dtype.itemsize + 4) + q.shape[0] * keys * q.shape[3] * q.dtype.itemsize,
        transcendentals=q.size // q.shape[3] * keys,
    )
