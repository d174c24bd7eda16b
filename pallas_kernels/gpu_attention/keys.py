"""Which keys the queries of a block see, and where they are."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Pages, QueryBlocks

CHUNK = 32  # keys attended to at a time: two of the mma's 16 along the second matmul's sum; the bits of a mask's word
_NOWHERE = 1 << 30  # begin of a query without keys: after that of all others


class Keys(NamedTuple):
    """A segment of the keys: each query sees places begin <= p < end of its row's sequence, where its mask is set."""

    index: jax.Array  # [NB, P] page ids, place p in page index[p // entries % P]; or [NB, k] the pool's entries
    pool: jax.Array  # [pages, entries, H], or gathered: [entries, H]
    begin: jax.Array  # [NB, B]
    end: jax.Array  # [NB, B]; 0 for a query not in use
    most: int  # places that a block can see
    mask: jax.Array | None = None  # [NB, B, most / CHUNK] int32, bit p % CHUNK of word p // CHUNK for place p

    @property
    def geometry(self) -> tuple[int, int]:
        """Entries of a page, 0 if gathered; places of the index."""
        return (self.pool.shape[1] if self.pool.ndim == 3 else 0), self.index.shape[1]


def window_keys(blocks: QueryBlocks, pages: Pages, window: int, block: int) -> Keys:
    """The last `window` positions up to each of a block's queries."""
    end = _counts(blocks, block)
    begin = jnp.maximum(0, end - window)
    return _paged(blocks, pages, begin, end, min(window - 1 + block, pages.max_entries))


def visible_keys(blocks: QueryBlocks, pages: Pages, ratio: int, block: int) -> Keys:
    """Every compressed entry that each of a block's queries sees."""
    end = _counts(blocks, block) // ratio
    return _paged(blocks, pages, jnp.zeros_like(end), end, pages.max_entries)


def chosen_keys(blocks: QueryBlocks, pages: Pages, ratio: int, chosen: jax.Array) -> Keys:
    """Of each query's visible entries those chosen: [NB, k] of a block's only query, those in use first, which are
    gathered; or [NB, B, max_entries] bool, whose pages are streamed."""
    if chosen.ndim == 2:
        count, entry = pages.chosen(blocks, chosen)
        pool = pages.pool.values.reshape(-1, pages.pool.format.width)
        return Keys(entry, pool, jnp.zeros_like(count)[:, None], count[:, None], chosen.shape[1])
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, -chosen.shape[2] % CHUNK)))
    bits = chosen.reshape(*chosen.shape[:2], -1, CHUNK).astype(jnp.uint32) << jnp.arange(CHUNK, dtype=jnp.uint32)
    mask = jax.lax.bitcast_convert_type(jnp.sum(bits, axis=3, dtype=jnp.uint32), jnp.int32)
    return visible_keys(blocks, pages, ratio, chosen.shape[1])._replace(mask=mask)


def _counts(blocks: QueryBlocks, block: int) -> jax.Array:
    """[NB, B] tokens up to each query and itself, 0 for queries not in use."""
    offset = jnp.arange(block)
    return jnp.where(offset < blocks.length[:, None], blocks.position[:, None] + offset + 1, 0)


def _paged(blocks: QueryBlocks, pages: Pages, begin: jax.Array, end: jax.Array, most: int) -> Keys:
    pool = pages.pool.values
    begin = jnp.where(end > 0, pages.num_here(begin), _NOWHERE)
    return Keys(pages.page_ids(blocks.row).astype(jnp.int32), pool, begin, pages.num_here(end), most)
