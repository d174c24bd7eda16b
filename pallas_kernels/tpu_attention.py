"""The TPU kernel of sliding-window, HCA and CSA attention.

A grid step is one block of queries. It reads the entries its queries can see and no others, whatever the bucket: those
of the window, then compressed ones, under one softmax. Compressed entries are streamed page by page (under a mask where
some are chosen); a decode row of CSA gathers its chosen entries, which lie anywhere, each by a DMA of its own. Each key
is read once for all queries and heads of the block; at decode that is what bounds the speed, or how many DMAs the chip
keeps in flight where entries are gathered; in prefill it is the two matmuls.

In fast memory: the block's queries, two buffers of 128 entries of each pool, the running softmax. In scalar memory: the
blocks, eight rows of the page tables and of the choice. Nothing is computed outside the kernel, so that it has no
temporary arrays: page ids, ranges and counts are scalars of the grid step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chosen as masks
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.entry_format import LANES
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target
from pallas_kernels.tpu_pages import STEP, TILE_ROWS, Gathered, Layout, Streamed, run, start
from pallas_kernels.tpu_softmax import Softmax, to_column

_VMEM_LIMIT = 60 << 20  # of 64 MiB a core on v5p and tpu7x, and of 128 MiB on v5e and v6e
_WINDOW_UNIT = 16  # entries of the least part of a window page that is read: whole tiles of any format


class _Sizes(NamedTuple):
    """What is known when the kernel is compiled."""

    block: int  # queries
    heads: int
    window: int
    ratio: int
    scale: float
    window_layout: Layout
    entry_layout: Layout | None
    chosen_rows: int  # of a block of the choice in scalar memory; 0: nothing is gathered
    max_entries: int


def supports(pages: list[Pages], target: Target) -> bool:
    """Whether the TPU kernels take these: entries of whole lanes, or floats of any width where they are interpreted."""

    def fits(p: Pages) -> bool:
        form = p.pool.format
        return p.pool.tiled if form.quantised else form.can_tile() or target.interpret

    return target.has_tpu_kernels and all(fits(p) for p in pages)


def attend(
    q: jax.Array,  # [NB, B, N, H]
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages | None,
    chosen: jax.Array | None,  # [NB, k] places for B = 1, those in use first; else a mask, as bits or [NB, B, entries]
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
    rows = block * heads
    gathered = chosen.shape[1] if chosen is not None and block == 1 else 0
    sizes = _Sizes(
        block,
        heads,
        window,
        ratio,
        scale,
        Layout.of(window_pages),
        None if entry_pages is None else Layout.of(entry_pages, gathered),
        min(TILE_ROWS, num_blocks) if gathered else 0,
        0 if entry_pages is None else entry_pages.max_entries,
    )

    def row_block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda i, *_: (i, 0, 0))

    inputs: list[Any] = [q.reshape(num_blocks, rows, width), sink.astype(jnp.float32)[None]]
    specs: list[Any] = [row_block(rows, width), pl.BlockSpec((1, len(sink)), lambda i, *_: (0, 0))]
    scratch: list[Any] = [Softmax.scratch(rows, width)]
    for pages, layout in ((window_pages, sizes.window_layout), (entry_pages, sizes.entry_layout)):
        arrays, array_specs, buffers = [], [], []
        if pages is not None and layout is not None:
            arrays, array_specs = layout.inputs(pages)
            buffers = layout.scratch(pages, gathered=pages is entry_pages and gathered > 0)
        inputs.append(arrays)
        specs.append(array_specs)
        scratch.append(buffers)
    choice, choice_specs, buffers = _choice(chosen, sizes)
    layers = [window_pages.layer, 0 if entry_pages is None else entry_pages.layer, window_pages.index]
    where = blocks.row, blocks.position, blocks.length
    out = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(num_blocks,),
            in_specs=[*specs, choice_specs],
            out_specs=[row_block(rows, width), *([row_block(rows, LANES)] * (2 * partial))],
            scratch_shapes=[*scratch, buffers],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_blocks, rows, n), jnp.float32) for n in (width, *([LANES] * (2 * partial)))
        ],
        compiler_params=None if target.interpret is not False else pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=_cost(q, window_pages, entry_pages, chosen, window, partial),
        interpret=target.interpret,
        name="paged_attention",
    )(*where, *(jnp.asarray(x, jnp.int32).reshape(1) for x in layers), *inputs, choice)
    if not partial:
        return out[0].reshape(q.shape)
    total, maximum, denominator = (x.reshape(num_blocks, block, heads, -1) for x in out)
    return Running(maximum[..., :1], denominator[..., :1], total)


def _choice(chosen: jax.Array | None, sizes: _Sizes) -> tuple[list[jax.Array], list[pl.BlockSpec], list[Any]]:
    """What the kernel needs of the choice: arrays, where they are, buffers."""
    layout, rows = sizes.entry_layout, sizes.chosen_rows
    if chosen is None or layout is None:
        return [], [], []
    if not rows:
        if layout.step != STEP:
            raise ValueError(f"csa_attention: {layout.epp} entries a page must divide {STEP}")
        bits = masks.pack(chosen) if chosen.dtype == jnp.bool_ else chosen
        buffers = [pltpu.VMEM((2, 1, LANES), jnp.int32), pltpu.SemaphoreType.DMA((2,))]
        return [bits], [pl.BlockSpec(memory_space=pl.ANY)], buffers
    chosen = jnp.pad(chosen, ((0, 0), (0, -chosen.shape[1] % layout.step)), constant_values=sizes.max_entries)
    # As scalars, and where side words must be told apart by entry also as a vector.
    spaces = [pltpu.SMEM, pltpu.VMEM][: 1 + layout.form.quantised]
    shape = (rows, chosen.shape[1])
    specs = [pl.BlockSpec(shape, lambda i, *_: (i // rows, 0), memory_space=space) for space in spaces]
    return [chosen] * len(spaces), specs, []


def _kernel(
    row,
    position,
    length,
    window_layer,
    entry_layer,
    index,
    q_ref,
    sink_ref,
    window_refs,
    entry_refs,
    choice,
    *rest,
    sizes,
):
    *outs, state, window_buffers, entry_buffers, choice_buffers = rest
    i = pl.program_id(0)
    rows = _Rows(i, row[i], position[i], length[i], index[0])
    softmax, q = Softmax(*state), q_ref[0]
    query = rows.position + lax.broadcasted_iota(jnp.int32, (sizes.block, 1), 0)
    keys: list[Any] = [_window(sizes, rows, query, window_layer[0], window_refs, window_buffers)]
    if sizes.chosen_rows:
        keys.append(_gathered(sizes, rows, entry_layer[0], entry_refs, choice, entry_buffers))
    elif sizes.entry_layout is not None:
        keys.append(_visible(sizes, rows, query, entry_layer[0], entry_refs, choice, entry_buffers, choice_buffers))
    for source, _ in keys:
        start(source)
    softmax.start()
    for source, sees in keys:

        def use(number, slot, source=source, sees=sees):
            mask = sees(number, slot) & (query < rows.end)
            softmax.add(q, source.keys(number, slot, q.dtype), mask, sizes.scale)

        run(source, use)
    if len(outs) == 1:
        sink = to_column(sink_ref[...])
        outs[0][0] = softmax.finish(jnp.concatenate([sink] * sizes.block))
    else:
        for out, value in zip(outs, (softmax.total, softmax.maximum, softmax.denominator), strict=True):
            out[0] = value[...]


class _Rows(NamedTuple):
    """Of a grid step: block, its row, first position and queries in use; the device's index."""

    block: Any
    row: Any
    position: Any
    length: Any
    index: Any

    @property
    def end(self) -> Any:
        return self.position + self.length

    def used(self, num: Any) -> Any:
        """`num`, or none where the block is not used."""
        return jnp.where(self.length > 0, num, 0)


# Keys of a block: where they come from, and what each query sees of a step of them [queries or 1, step].


def _window(sizes: _Sizes, rows: _Rows, query: jax.Array, layer: Any, refs: Any, buffers: Any):
    layout = sizes.window_layout
    lo = layout.num_here(jnp.maximum(0, rows.position - sizes.window + 1), rows.index)
    hi = rows.used(layout.num_here(rows.end, rows.index))
    unit = _WINDOW_UNIT if layout.epp % _WINDOW_UNIT == 0 else layout.epp
    source = Streamed(layout, layer, rows.row, lo, hi, unit, refs, buffers)

    def sees(number: Any, slot: Any) -> jax.Array:
        entry = source.places(number, (1, layout.step), 1) * layout.count + rows.index
        return (entry <= query) & (entry > query - sizes.window)

    return source, sees


def _visible(
    sizes: _Sizes, rows: _Rows, query: jax.Array, layer: Any, refs: Any, choice: Any, buffers: Any, choice_buffers: Any
):
    """Every entry whose window is over, or of these the chosen."""
    layout = sizes.entry_layout
    assert layout is not None
    hi = rows.used(layout.num_here(rows.end // sizes.ratio, rows.index))

    def mask(number: Any, slot: Any) -> list[Any]:
        buffer, semaphores = choice_buffers
        return [pltpu.make_async_copy(choice[0].at[rows.block, pl.ds(number, 1)], buffer.at[slot], semaphores.at[slot])]

    source = Streamed(layout, layer, rows.row, jnp.int32(0), hi, layout.epp, refs, buffers, mask if choice else None)

    def sees(number: Any, slot: Any) -> jax.Array:
        entry = source.places(number, (1, layout.step), 1) * layout.count + rows.index
        visible = entry < (query + 1) // sizes.ratio
        return visible & ((choice_buffers[0][slot] >> (query - rows.position)) & 1 == 1) if choice else visible

    return source, sees


def _gathered(sizes: _Sizes, rows: _Rows, layer: Any, refs: Any, choice: Any, buffers: Any):
    """The chosen entries of a decode row."""
    layout = sizes.entry_layout
    assert layout is not None
    block = lax.rem(rows.block, sizes.chosen_rows)
    num = rows.used(Gathered.count(choice[0], block, sizes.max_entries))
    source = Gathered(layout, layer, rows.row, block, num, [*refs, *choice], buffers)
    return source, lambda number, slot: source.places(number, (1, layout.step), 1) < num


def _cost(
    q: jax.Array, window_pages: Pages, entry_pages: Pages | None, chosen: jax.Array | None, window: int, partial: bool
) -> pl.CostEstimate:
    """Upper bounds from the shapes: every block is full, and every entry that the tables can name is visible."""
    num_blocks, block, heads, width = q.shape
    keys = -(-(window - 1 + block) // window_pages.count)
    per_block = keys * _entry_bytes(window_pages) + 4 * (1 + keys // window_pages.entries_per_page)
    if entry_pages is not None:
        gathered = chosen is not None and block == 1
        more = chosen.shape[1] if chosen is not None and gathered else entry_pages.max_entries
        per_block += more * _entry_bytes(entry_pages, gathered) + 4 * min(more, entry_pages.table.shape[1])
        per_block += 4 * more if chosen is not None else 0
        keys += more
    out_bytes = 4 * q.size + (2 * 4 * LANES * q.size // width if partial else 0)
    return pl.CostEstimate(
        flops=4 * q.size * keys,
        bytes_accessed=q.size * q.dtype.itemsize + num_blocks * (per_block + 12) + out_bytes + 4 * heads,
        transcendentals=q.size // width * keys,
    )


def _entry_bytes(pages: Pages, gathered: bool = False) -> int:
    """That are read for an entry: alone, its side words come in a row of 128."""
    values, side = pages.pool.values, pages.pool.side
    of_values = values.dtype.itemsize * values.size // (values.shape[0] * pages.entries_per_page)
    if side is None:
        return of_values
    return of_values + 4 * (LANES if gathered else side.size // (side.shape[0] * pages.entries_per_page))
