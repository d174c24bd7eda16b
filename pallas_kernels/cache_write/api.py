"""Public function of the operation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

NOWHERE = 1 << 30  # a slot past every pool, for padding; adding a layer's offset keeps it there and below 2**31


def cache_write(
    pool: jax.Array,  # [layers * pages, entries_per_page, width], or an entry as [width / 128, 128]
    slots: jax.Array,  # [T] int32: page * entries_per_page + entry within one layer; NOWHERE is dropped
    entries: jax.Array,  # [T, width]
    *,
    layer: int | jax.Array,
    num_pages: int,
) -> jax.Array:
    """The pool with the entries written. A slot is written at most once. Raises ValueError for other widths."""
    width = math.prod(pool.shape[2:])
    if entries.ndim != 2 or entries.shape[1] != width:
        raise ValueError(f"cache_write: entries {entries.shape} must be [T, {width}]")
    flat = pool.reshape(-1, *pool.shape[2:])
    entries = entries.reshape(-1, *pool.shape[2:])
    if slots.shape[0] == 1:
        # XLA turns a scatter of one row into a slice and an update, and then copies the pool at every layer.
        slots = jnp.pad(slots, (0, 1), constant_values=NOWHERE)
        entries = jnp.concatenate([entries, entries])
    index = slots + layer * num_pages * pool.shape[1]
    flat = flat.at[index].set(entries.astype(pool.dtype), mode="drop")
    return flat.reshape(pool.shape)
