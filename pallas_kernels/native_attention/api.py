"""Which entries of a pool a block of queries attends to, and the operation that does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.entry_format import PLAIN
from pallas_kernels.native.emit import LANES
from pallas_kernels.native.machine_code import has_feature
from pallas_kernels.native_attention.kernel import ATTEND
from pallas_kernels.target import Target

_ROWS = 128  # queries times heads that are multiplied with an entry at once


class Entries(NamedTuple):
    """Of one layer of a pool."""

    pages: Pages
    place: jax.Array  # [NB, K] int32, which entries of the layer's pages; anything where no query uses one
    used: jax.Array  # [NB, B, K] bool


def supports(q: jax.Array, blocks: QueryBlocks, pages: Sequence[Pages], target: Target) -> bool:
    """Whether the kernel takes queries [..., N, H] over these pages: entries of floats.

    A CPU with matrix units (AMX) multiplies blocks of bfloat16 queries faster by XLA's library.
    """
    return (
        target.has_native_kernels
        and all(p.count == 1 and p.pool.format.name == q.dtype.name and p.pool.format.name in PLAIN for p in pages)
        and (_takes_floats(q) if q.dtype == jnp.float32 else _takes_bits(q, blocks, pages))
    )


def _takes_floats(q: jax.Array) -> bool:
    return q.shape[-1] % LANES == 0


def _takes_bits(q: jax.Array, blocks: QueryBlocks, pages: Sequence[Pages]) -> bool:
    whole = q.shape[-1] % (2 * LANES) == 0 and all(p.pool.format.as_bits for p in pages)
    return whole and (blocks.tokens(q).shape[1] == 1 or not has_feature("amx-bf16"))


def window_entries(blocks: QueryBlocks, block: int, pages: Pages, window: int) -> Entries:
    """Of each of `block` queries the last `window` positions, its own included."""
    offset = jnp.arange(window + block - 1)
    position = blocks.position[:, None] + (1 - window) + offset
    query = jnp.arange(block)[:, None]
    near = (offset >= query) & (offset < query + window)
    return _entries(blocks, pages, jnp.maximum(position, 0), near & (position >= 0)[:, None])


def visible_entries(blocks: QueryBlocks, block: int, pages: Pages, ratio: int) -> Entries:
    """The compressed entries that are complete at each position of `block` queries."""
    entry = jnp.arange(pages.max_entries)
    count = jax.lax.div(blocks.position[:, None] + jnp.arange(block) + 1, ratio)
    return _entries(blocks, pages, jnp.broadcast_to(entry, (len(count), len(entry))), entry < count[..., None])


def chosen_entries(blocks: QueryBlocks, pages: Pages, chosen: jax.Array) -> Entries:
    """Entries chosen: a mask [NB, B, max_entries], or for blocks of one query [NB, k], `max_entries` for none."""
    if chosen.ndim == 3:
        entry = jnp.arange(pages.max_entries)
        return _entries(blocks, pages, jnp.broadcast_to(entry, (len(chosen), len(entry))), chosen)
    used = chosen < pages.max_entries
    return _entries(blocks, pages, jnp.where(used, chosen, 0), used[:, None])


def _entries(blocks: QueryBlocks, pages: Pages, index: jax.Array, used: jax.Array) -> Entries:
    if used.shape[-1] != index.shape[1]:
        raise ValueError(f"a mask {used.shape} of entries does not fit {index.shape[1]} entries")
    epp, width = pages.entries_per_page, pages.table.shape[1]
    page = pages.table[blocks.row[:, None], jax.lax.rem(jax.lax.div(index, epp), width)]
    padding = (0, -index.shape[1] % LANES)
    place = jnp.pad(page * epp + jax.lax.rem(index, epp), ((0, 0), padding))
    return Entries(pages, place, jnp.pad(used, ((0, 0), (0, 0), padding)))


def attend(
    q: jax.Array, blocks: QueryBlocks, window: Entries, others: Entries | None, sink: jax.Array, scale: float
) -> jax.Array:
    """q [..., N, H] over the entries of both (keys and values in one) and the sinks [N] -> q's shape and type, zeros
    for queries that are not in use. Packed ones are one after the other, those in use first."""
    none = Entries(window.pages, window.place[:, :0], window.used[..., :0])
    arrays, firsts = [], []
    for entries in (window, others or none):
        arrays += [entries.pages.pool.values, entries.place, entries.used]
        firsts.append(jnp.asarray(entries.pages.first_entry, jnp.int32))
    heads, token = q.shape[-2], blocks.tokens(q)
    block = token.shape[1]
    group = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * block <= _ROWS))
    numbers = jnp.stack(firsts), sink, jnp.full(1, scale, jnp.float32), np.array([group], np.int32)
    flat = q.reshape(-1, *q.shape[-2:])
    shape = jax.ShapeDtypeStruct(flat.shape, q.dtype)
    out = ATTEND(q.dtype, shape, flat, token[:, 0], blocks.length, *arrays, *numbers).reshape(q.shape)
    if blocks.packing is not None:
        return out
    return jnp.where((jnp.arange(block) < blocks.length[:, None])[..., None, None], out, 0)
