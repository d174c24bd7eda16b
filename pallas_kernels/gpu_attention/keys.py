"""Which keys the queries of a block see, and where they are."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import Pages, QueryBlocks

CHUNK = 32  # keys attended to at a time: two of the mma's 16 along the second matmul's sum; the bits of a mask's word
_NOWHERE = 1 << 30  # begin of a query without keys: after that of all others


class Geometry(NamedTuple):
    """What of a segment's shape its copies depend on."""

    epp: int  # entries of a page
    gathered: bool  # one by one
    form: str  # name of the entries' format
    width: int
    dtype: str  # of the values
    side_words: int  # of an entry, 0 without

    @property
    def coded(self) -> bool:
        return self.side_words > 0

    @property
    def tiled(self) -> bool:
        """Whether pages of keys are copied as the tiles that matmuls read; entries are no whole tiles."""
        return not self.gathered and not self.coded

    @property
    def ring(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """The buffers that entries which are no tiles arrive in, [slots, CHUNK, n] each: 64 KiB of floats for a width
        of 512, or 80 of codes."""
        if self.coded:
            words = -(-self.side_words // 32) * 32 if self.gathered else self.side_words  # a copy has 128 bytes or more
            return ((4, CHUNK, self.width), self.dtype), ((4, CHUNK, words), "uint32")
        return (((2, CHUNK, self.width), self.dtype),)

    @property
    def entry_bytes(self) -> int:
        """That are read for an entry."""
        buffers = self.ring if not self.tiled else (((self.width,), self.dtype),)
        return sum(shape[-1] * jnp.dtype(dtype).itemsize for shape, dtype in buffers)

    @property
    def num_copies(self) -> int:
        """That bring one chunk."""
        return (CHUNK if self.gathered else max(1, CHUNK // self.epp)) * (1 + self.coded)


class Keys(NamedTuple):
    """A segment of the keys: each query sees places begin <= p < end of its row's sequence, or those that its mask has.

    What is gathered has a list of entries, or is found in the mask.
    """

    index: jax.Array  # [NB, P] page ids, place p in page index[p // entries % P]; or [NB, k], the list
    arrays: list[jax.Array]  # values and side words of the pool [pages, entries, n]; gathered [entries, n] and [n]
    geometry: Geometry
    begin: jax.Array  # [NB, B]
    end: jax.Array  # [NB, B]
    most: int  # places that a block can see
    mask: jax.Array | None = None  # [NB, B, most / CHUNK] int32, bit p % CHUNK of word p // CHUNK for place p

    @property
    def listed(self) -> bool:
        return self.geometry.gathered and self.mask is None


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
    """Of each query's visible entries those chosen: [NB, k] of a block's only query, those in use first; or a mask
    [NB, B, max_entries]. They are gathered."""
    if chosen.ndim == 2:
        count, entry = pages.chosen(blocks, chosen)
        begin, end = jnp.zeros_like(count)[:, None], count[:, None]
        return _gathered(Keys(entry, _arrays(pages), _geometry(pages), begin, end, chosen.shape[1]))
    keys = visible_keys(blocks, pages, ratio, chosen.shape[1])
    chosen &= jnp.arange(chosen.shape[2]) < keys.end[..., None]
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, -chosen.shape[2] % CHUNK)))
    bits = chosen.reshape(*chosen.shape[:2], -1, CHUNK).astype(jnp.uint32) << jnp.arange(CHUNK, dtype=jnp.uint32)
    mask = lax.bitcast_convert_type(jnp.sum(bits, axis=3, dtype=jnp.uint32), jnp.int32)
    return _gathered(keys._replace(mask=mask))


def together(keys: Keys, queries: int) -> Keys:
    """For queries that go through their masks together, so many at a time: begin and end count what they find."""
    if keys.mask is None:
        return keys
    found = functools.reduce(jnp.bitwise_or, (keys.mask[:, i::queries] for i in range(queries)))
    count = jnp.repeat(jnp.sum(lax.population_count(found), axis=2), queries, axis=1)
    return keys._replace(begin=jnp.zeros_like(count), end=count)


def _gathered(keys: Keys) -> Keys:
    values, *side = keys.arrays
    arrays = [values.reshape(-1, values.shape[2]), *(x.reshape(-1) for x in side)]
    return keys._replace(arrays=arrays, geometry=keys.geometry._replace(gathered=True))


def _counts(blocks: QueryBlocks, block: int) -> jax.Array:
    """[NB, B] tokens up to each query and itself, 0 for queries not in use."""
    offset = jnp.arange(block)
    return jnp.where(offset < blocks.length[:, None], blocks.position[:, None] + offset + 1, 0)


def _paged(blocks: QueryBlocks, pages: Pages, begin: jax.Array, end: jax.Array, most: int) -> Keys:
    begin, end = pages.num_here(begin), pages.num_here(end)
    begin = jnp.where(begin < end, begin, _NOWHERE)
    index = pages.page_ids(blocks.row).astype(jnp.int32)
    return Keys(index, _arrays(pages), _geometry(pages), begin, end, most)


def _arrays(pages: Pages) -> list[jax.Array]:
    return [x for x in (pages.pool.values, pages.pool.side) if x is not None]


def _geometry(pages: Pages) -> Geometry:
    form, dtype = pages.pool.format, pages.pool.values.dtype.name
    words = form.side_words if form.quantised else 0
    return Geometry(pages.entries_per_page, False, form.name, form.width, dtype, words)
