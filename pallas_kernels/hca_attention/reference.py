"""The meaning, in jnp; also the CPU path: pages are streamed, as many as the longest row needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.groups import by_groups
from pallas_kernels.online_softmax import Running
from pallas_kernels.swa_attention.reference import attend_window, flat_queries, of_queries, per_head

STREAM_ENTRIES = 128  # entries read at a time: large enough for the matmul, small enough not to overshoot a short row


def hca_attention(
    q: jax.Array,
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,
    *,
    window: int,
    ratio: int,
    scale: float,
) -> Running:
    """[NB, B, N, ...]"""

    def attend(blocks: QueryBlocks, q: jax.Array) -> Running:
        run = attend_window(q, blocks, window_pages, window=window, scale=scale)
        visible = visible_entries(blocks, q.shape[1], ratio)
        return of_queries(attend_entries(run, q, blocks, entry_pages, visible, None, scale), q)

    return by_groups(attend, blocks, q)


def visible_entries(blocks: QueryBlocks, block: int, ratio: int) -> jax.Array:
    """[NB, B] how many entries each of `block` queries may use; 0 for padding."""
    offset = jnp.arange(block)
    count = jax.lax.div(blocks.position[:, None] + offset + 1, ratio)
    return jnp.where(offset < blocks.length[:, None], count, 0)


def stream(pages: Pages, num_entries: jax.Array, body, carry):
    """Calls body(first entry, first new entry, first page, pages, carry) over the first `num_entries` entries here."""
    count = min(max(1, STREAM_ENTRIES // pages.entries_per_page), pages.table.shape[1])
    step = count * pages.entries_per_page

    def loop(i: jax.Array, carry):
        # the last part of a table that `count` does not divide is read again from its end; body masks by entry
        first = jnp.minimum(i * count, pages.table.shape[1] - count)
        return body(first * pages.entries_per_page, i * step, first, count, carry)

    return jax.lax.fori_loop(0, (num_entries + step - 1) // step, loop, carry)


def attend_entries(
    run: Running,
    q: jax.Array,
    blocks: QueryBlocks,
    pages: Pages,
    visible: jax.Array,  # [NB, B]
    chosen: jax.Array | None,  # [NB, B, max_entries] bool of the entries here, or every visible one
    scale: float,
) -> Running:
    """Adds the compressed entries to a running softmax."""
    queries = flat_queries(q)
    most = pages.num_here(jnp.max(visible, axis=1))  # [NB]

    def body(first_entry, begin, first_page, count, run: Running) -> Running:
        entry = first_entry + jnp.arange(count * pages.entries_per_page)
        keys = pages.read_pages(blocks.row, first_page, count, q.dtype)
        keys = jnp.where((entry < most[:, None])[..., None], keys, 0)  # what was never written may be NaN
        mask = (pages.entry(entry) < visible[..., None]) & (entry >= begin)
        if chosen is not None:
            mask &= jax.lax.dynamic_slice_in_dim(chosen, first_entry, entry.shape[0], axis=2)
        return online_softmax.update(run, queries, keys, per_head(mask, q), scale)

    return stream(pages, jnp.max(most), body, run)
