"""How queries and pages are laid out for every attention kernel.

Queries come in blocks: B consecutive tokens of one row, the last block of a row partly filled. A decode step has B = 1.
Pools hold the pages of all layers, in one of several formats (`entry_format`); a page table holds page ids of one
layer, the same for every layer of a kind, so layer l reads page `id + l * pages`. Page ids of unused table places may
be anything: they are masked.

Where several devices share a cache, every page's entries are dealt out over them: entry e of a row is on device
e % count, as the (e // count)-th entry there. Ids and tables are the same on all; each reads its entries, and what
they make of them is merged.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import collectives
from pallas_kernels.pool import Pool


class Packing(NamedTuple):
    """Where the queries of blocks are among a step's T packed tokens."""

    token: jax.Array  # [NB, B] int32 of each query, one after the other in a block; T where there is none
    place: jax.Array  # [T] int32, b * B + j of each token; anything for padding

    def blocked(self, x: jax.Array) -> jax.Array:
        """[T, ...] -> [NB, B, ...]; a query that there is not repeats the last token."""
        if self.token.shape == (x.shape[0], 1):  # a decode step: block i is token i
            return x[:, None]
        return x.at[self.token].get(mode="clip")

    def packed(self, x: jax.Array) -> jax.Array:
        """[NB, B, ...] -> [T, ...]."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.token.shape[1] == 1 else flat.at[self.place].get(mode="clip")


class QueryBlocks(NamedTuple):
    """NB blocks; an unused block has `length` 0. With a packing queries come packed, [T, ...], else [NB, B, ...]."""

    row: jax.Array  # [NB] int32, row of the page tables; any row where length is 0
    position: jax.Array  # [NB] int32, absolute position of the block's first query
    length: jax.Array  # [NB] int32, queries in use, 0..B
    packing: Packing | None = None

    def tokens(self, queries: jax.Array) -> jax.Array:
        """[NB, B] which of the tokens that queries [T, ...] or [NB, B, ...] have in a row each one is."""
        if self.packing is not None:
            return self.packing.token
        num_blocks, block = queries.shape[:2]
        return jnp.arange(num_blocks * block).reshape(num_blocks, block)

    def unpacked(self) -> QueryBlocks:
        return self._replace(packing=None)


class Pages(NamedTuple):
    """One layer's view of a paged pool, or of the part of it that this device holds."""

    pool: Pool
    table: jax.Array  # [R, P] int32, page ids in [0, num_pages)
    layer: int | jax.Array
    num_pages: int
    axis: str = ""  # mesh axis whose devices share the pages; "" is this device alone

    @property
    def count(self) -> int:
        """Devices that share the pages."""
        return collectives.size(self.axis) if self.axis else 1

    @property
    def index(self) -> jax.Array | int:
        """Which of them this is."""
        return collectives.index(self.axis) if self.axis else 0

    @property
    def entries_per_page(self) -> int:
        return self.pool.entries_per_page

    @property
    def max_entries(self) -> int:
        """Entries of a row that fit here."""
        return self.table.shape[1] * self.entries_per_page

    @property
    def first_entry(self) -> int | jax.Array:
        """Which entry of the pool is the layer's first."""
        return self.layer * self.num_pages * self.entries_per_page

    def num_here(self, num_entries: jax.Array) -> jax.Array:
        """How many of a row's first `num_entries` entries are here."""
        if self.count == 1:
            return num_entries
        return (num_entries + (self.count - 1 - self.index)) // self.count

    def entry(self, place: jax.Array) -> jax.Array:
        """Which entry of its row the `place`-th one here is."""
        return place if self.count == 1 else place * self.count + self.index

    def page_ids(self, row: jax.Array) -> jax.Array:
        """[NB, P] the tables of rows row [NB], as pages of the pool."""
        return (self.table + self.layer * self.num_pages)[row]

    def chosen(self, blocks: QueryBlocks, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each block's entries here, place [NB, k] (max_entries: none), those in use first: how many there are [NB],
        and which entries of the pool they are [NB, k], entry 0 for none."""
        used = place < self.max_entries
        count = jnp.where(blocks.length > 0, jnp.sum(used, axis=1, dtype=jnp.int32), 0)
        place = jnp.where(used, place, 0)
        page = self.table[blocks.row[:, None], place // self.entries_per_page] + self.layer * self.num_pages
        entry = page * self.entries_per_page + place % self.entries_per_page
        return count, jnp.where(used, entry, 0).astype(jnp.int32)

    def read_pages(self, row: jax.Array, first_page: jax.Array, count: int, dtype: jnp.dtype) -> jax.Array:
        """Whole pages first_page .. first_page + count of each row in row [NB] -> [NB, count * entries, width].

        Quantised entries are given in `dtype`, others in their own.
        """
        ids = jax.lax.dynamic_slice_in_dim(self.table, first_page, count, axis=1)[row]
        pages = self.pool.take_pages(ids + self.layer * self.num_pages, dtype)
        return pages.reshape(row.shape[0], count * self.entries_per_page, -1)

    def read_rows(self, row: jax.Array, index: jax.Array, valid: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The index-th entries here, index [NB, K] (a ring over the table) of rows row [NB]; zero where not `valid`."""
        epp, width = self.entries_per_page, self.table.shape[1]
        # The layer comes in last, so that what comes before is the same for every layer and computed once.
        place = jax.lax.rem(jax.lax.div(index, epp), width)
        page = self.table[row[:, None], place]
        slot = page * epp + jax.lax.rem(index, epp)
        rows = self.pool.take_entries(slot + self.layer * self.num_pages * epp, dtype)
        return jnp.where(valid[..., None], rows, 0)
