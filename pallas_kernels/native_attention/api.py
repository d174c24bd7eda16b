"""Which entries of a pool a decode row attends to, and the operation that does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.entry_format import PLAIN
from pallas_kernels.native.emit import LANES
from pallas_kernels.native.entries import HEADS
from pallas_kernels.native_attention.kernel import ATTEND
from pallas_kernels.target import Target


class Entries(NamedTuple):
    """Of one layer of a pool."""

    pages: Pages
    place: jax.Array  # [NB, K] int32, which entries of the layer's pages in a row each query attends to; -1 for none


def supports(q: jax.Array, pages: Sequence[Pages], target: Target) -> bool:
    """Whether the kernel takes queries [NB, B, N, H] over these pages: decode rows over entries of floats."""
    _, block, heads, width = q.shape
    return (
        target.has_native_kernels
        and block == 1
        and heads % HEADS == 0
        and width % LANES == 0
        and all(p.count == 1 and p.pool.format.name == q.dtype.name and p.pool.format.name in PLAIN for p in pages)
        and (q.dtype == jnp.float32 or all(p.pool.format.as_bits for p in pages))
    )


def window_entries(blocks: QueryBlocks, pages: Pages, window: int) -> Entries:
    """The last `window` positions of each row, itself included."""
    key = blocks.position[:, None] + (1 - window) + jnp.arange(window)
    used = (key >= 0) & (blocks.length > 0)[:, None]
    return _entries(blocks, pages, jnp.maximum(key, 0), used)


def visible_entries(blocks: QueryBlocks, pages: Pages, ratio: int) -> Entries:
    """The compressed entries that are complete at each row's position."""
    entry = jnp.arange(pages.max_entries)[None]
    used = (entry < jax.lax.div(blocks.position + 1, ratio)[:, None]) & (blocks.length > 0)[:, None]
    return _entries(blocks, pages, jnp.broadcast_to(entry, used.shape), used)


def chosen_entries(blocks: QueryBlocks, pages: Pages, chosen: jax.Array) -> Entries:
    """Entries chosen [NB, k]; `max_entries` for none."""
    used = chosen < pages.max_entries
    return _entries(blocks, pages, jnp.where(used, chosen, 0), used)


def _entries(blocks: QueryBlocks, pages: Pages, index: jax.Array, used: jax.Array) -> Entries:
    epp, width = pages.entries_per_page, pages.table.shape[1]
    page = pages.table[blocks.row[:, None], jax.lax.rem(jax.lax.div(index, epp), width)]
    place = jnp.where(used, page * epp + jax.lax.rem(index, epp), -1)
    padding = -place.shape[1] % LANES
    return Entries(pages, jnp.pad(place, ((0, 0), (0, padding)), constant_values=-1))


def attend(q: jax.Array, window: Entries, others: Entries | None, sink: jax.Array, scale: float) -> jax.Array:
    """q [NB, 1, N, H] over the entries of both (keys and values in one) and the sinks [N] -> [NB, 1, N, H] float32."""
    parts = [window, others or Entries(window.pages, window.place[:, :0])]
    arrays, firsts = [], []
    for entries in parts:
        pages = entries.pages
        arrays += [pages.pool.values, entries.place]
        firsts.append(jnp.asarray(pages.layer * pages.num_pages * pages.entries_per_page, jnp.int32))
    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return ATTEND(q.dtype, shape, q, *arrays, jnp.stack(firsts), sink, jnp.full(1, scale, jnp.float32))
