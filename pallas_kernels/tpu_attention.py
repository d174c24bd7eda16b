"""The TPU kernel of sliding-window and HCA attention, and of CSA prefill: keys are streamed page by page.

A grid step is one block of queries. It reads the pages its queries can see and no others, whatever the bucket: window
pages, then those entry pages that are visible (under a mask where entries are chosen). Each key is read once for all
queries and heads of the block; at decode that is what bounds the speed, in prefill it is the two matmuls.

In fast memory: the block's queries, two page buffers of each pool, the running softmax.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target
from pallas_kernels.tpu_softmax import LANES, Softmax, as_keys, stream

_VMEM_LIMIT = 100 << 20  # of 128 MiB on v5e and v6e, 64 MiB a core on v5p and tpu7x, where blocks are tuned smaller


def supports(pages: list[Pages], target: Target) -> bool:
    """Whether the TPU kernels take these: floats of whole lanes, or of any width where they are interpreted."""
    whole = all(p.pool.format.can_tile() for p in pages) or target.interpret
    return target.has_tpu_kernels and whole and not any(p.pool.format.quantised for p in pages)


def attend(
    q: jax.Array,  # [NB, B, N, H]
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages | None,
    chosen: jax.Array | None,  # [NB, B, max_entries] bool of the entries here
    sink: jax.Array,  # [N]
    *,
    window: int,
    ratio: int,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    """[NB, B, N, H] float32 with the sinks; `partial`: what this device's keys make of the softmax, [NB, B, N, ...]."""
    num_blocks, block, heads, width = q.shape
    if chosen is not None and block > 32:
        raise ValueError(f"a block of {block} queries with chosen entries is more than the 32 bits of their mask")
    rows = block * heads
    scalars, inputs, specs = _geometry(blocks, window_pages, entry_pages, window, ratio, block), [], []

    def add(array: jax.Array, spec: pl.BlockSpec) -> None:
        inputs.append(array)
        specs.append(spec)

    segments = [p for p in (window_pages, entry_pages) if p is not None]
    for pages in segments:
        table = pages.page_ids(blocks.row)[:, None]  # [NB, 1, P]
        add(table, pl.BlockSpec((1, 1, table.shape[2]), lambda i, _: (i, 0, 0), memory_space=pltpu.SMEM))
    add(q.reshape(num_blocks, rows, width), pl.BlockSpec((1, rows, width), lambda i, _: (i, 0, 0)))
    add(jnp.tile(sink.astype(jnp.float32), block)[:, None], pl.BlockSpec((rows, 1), lambda i, _: (0, 0)))
    for pages in segments:
        add(pages.pool.values, pl.BlockSpec(memory_space=pl.ANY))
    scratch: list[Any] = [pltpu.VMEM((2, *pages.pool.values.shape[1:]), pages.pool.values.dtype) for pages in segments]
    if chosen is not None:
        assert entry_pages is not None
        # A bit a query, so that the mask of a page is one short row.
        bits = jnp.sum(chosen.astype(jnp.int32) << jnp.arange(block, dtype=jnp.int32)[:, None], axis=1)
        bits = bits.reshape(num_blocks, -1, 1, entry_pages.entries_per_page)
        add(bits, pl.BlockSpec(memory_space=pl.ANY))
        scratch.append(pltpu.VMEM((2, *bits.shape[2:]), bits.dtype))
    scratch.append(pltpu.SemaphoreType.DMA((2, 2)))

    row_block = pl.BlockSpec((1, rows, width), lambda i, _: (i, 0, 0))
    lane_block = pl.BlockSpec((1, rows, LANES), lambda i, _: (i, 0, 0))
    shapes = [jax.ShapeDtypeStruct((num_blocks, rows, n), jnp.float32) for n in (width, LANES, LANES)]
    kernel = functools.partial(
        _kernel,
        segments=tuple((p.entries_per_page, p.table.shape[1], p.count) for p in segments),
        masked=chosen is not None,
        block=block,
        heads=heads,
        window=window,
        ratio=ratio,
        scale=scale,
    )
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks,),
            in_specs=specs,
            out_specs=[row_block, lane_block, lane_block] if partial else [row_block],
            scratch_shapes=[*scratch, *Softmax.scratch(rows, width)],
        ),
        out_shape=shapes if partial else shapes[:1],
        compiler_params=None if target.interpret else pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=_cost(q, segments, window, partial),
        interpret=target.interpret,
        name="paged_attention",
    )(scalars, *inputs)
    if not partial:
        return out[0].reshape(q.shape)
    total, maximum, denominator = (x.reshape(num_blocks, block, heads, -1) for x in out)
    return Running(maximum[..., :1], denominator[..., :1], total)


def _geometry(
    blocks: QueryBlocks, window_pages: Pages, entry_pages: Pages | None, window: int, ratio: int, block: int
) -> jax.Array:
    """[NB, 7] int32: position, length, the device's index among those that share the pages; then the window pages'
    range and the entry pages' end, as places in the device's own sequence of pages; visible entries."""
    used = blocks.length > 0
    end = blocks.position + blocks.length
    low = jnp.maximum(0, blocks.position - window + 1)
    index = jnp.full_like(blocks.row, window_pages.index)
    epp = window_pages.entries_per_page
    first = window_pages.num_here(low) // epp
    last = jnp.where(used, -(-window_pages.num_here(end) // epp), first)
    visible = jnp.zeros_like(end) if entry_pages is None else jnp.where(used, end // ratio, 0)
    entry_last = visible if entry_pages is None else -(-entry_pages.num_here(visible) // entry_pages.entries_per_page)
    return jnp.stack([blocks.position, blocks.length, index, first, last, entry_last, visible], axis=1)


def _kernel(scalars, *refs, segments, masked, block, heads, window, ratio, scale):
    n = len(segments)
    tables, (q_ref, sink_ref), pools = refs[:n], refs[n : n + 2], refs[n + 2 : 2 * n + 2]
    rest = refs[2 * n + 2 :]
    mask_pool = rest[0] if masked else None
    rest = rest[1:] if masked else rest
    num_out = len(rest) - n - masked - 4
    outs, buffers = rest[:num_out], rest[num_out : num_out + n]
    mask_buffer = rest[num_out + n] if masked else None
    semaphores, softmax = rest[-4], Softmax(*rest[-3:])
    i = pl.program_id(0)
    position, length, index, first, last, entry_last, visible = (scalars[i, k] for k in range(7))
    rows = block * heads
    q = q_ref[0]
    offset = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) // heads
    query, in_use = position + offset, offset < length
    softmax.start()

    def attend_pages(which: int, begin, end, sees, holds, mask_buffer=None) -> None:
        """`sees(entry)` [M, K]: what each query may see; `holds(entry)` [K, 1]: what was written."""
        epp, width, count = segments[which]

        def copy(j, slot):
            page = tables[which][0, 0, lax.rem(j, width)]
            dmas = [pltpu.make_async_copy(pools[which].at[page], buffers[which].at[slot], semaphores.at[0, slot])]
            if mask_buffer is not None and mask_pool is not None:
                dmas.append(pltpu.make_async_copy(mask_pool.at[i, j], mask_buffer.at[slot], semaphores.at[1, slot]))
            return dmas

        def use(j, slot):
            def entries(shape, axis):
                return (j * epp + lax.broadcasted_iota(jnp.int32, shape, axis)) * count + index

            keys = as_keys(buffers[which][slot], q.dtype)
            keys = jnp.where(holds(entries((epp, 1), 0)), keys, jnp.zeros_like(keys))  # 0 x NaN is NaN
            mask = sees(entries((rows, epp), 1)) & in_use
            if mask_buffer is not None:
                mask &= (mask_buffer[slot] >> offset) & 1 == 1
            softmax.add(q, keys, mask, scale)

        stream(begin, end, copy, use)

    low = jnp.maximum(0, position - window + 1)
    attend_pages(
        0,
        first,
        last,
        lambda e: (e <= query) & (e > query - window),
        lambda e: (e >= low) & (e < position + length),
    )
    if n > 1:
        attend_pages(
            1, jnp.int32(0), entry_last, lambda e: e < (query + 1) // ratio, lambda e: e < visible, mask_buffer
        )
    if num_out == 1:
        outs[0][0] = softmax.finish(sink_ref[...])
    else:
        for out, value in zip(outs, (softmax.total, softmax.maximum, softmax.denominator), strict=True):
            out[0] = value[...]


def _cost(q: jax.Array, segments: list[Pages], window: int, partial: bool) -> pl.CostEstimate:
    """Upper bounds from the shapes: every entry the tables can name is visible."""
    num_blocks, block, _, width = q.shape
    keys = min(window - 1 + block, segments[0].max_entries) + (segments[1].max_entries if len(segments) > 1 else 0)
    page_bytes = segments[0].pool.values.dtype.itemsize * width
    out_bytes = q.size * 4 + (2 * q.size // width * LANES * 4 if partial else 0)
    return pl.CostEstimate(
        flops=4 * q.size * keys,
        bytes_accessed=q.size * q.dtype.itemsize + num_blocks * keys * page_bytes + out_bytes,
        transcendentals=q.size // width * keys,
    )
