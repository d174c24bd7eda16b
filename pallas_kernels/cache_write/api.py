"""Public function of the operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write import gpu, tpu
from pallas_kernels.pool import Pool
from pallas_kernels.target import CPU, Target

NOWHERE = 1 << 30  # a slot past every pool, for padding; adding a layer's offset keeps it there and below 2**31


def cache_write(
    pool: Pool,
    slots: jax.Array,  # [T] int32: page * entries_per_page + entry within one layer; NOWHERE is dropped
    entries: jax.Array,  # [T, width]
    *,
    layer: int | jax.Array,
    num_pages: int,
    target: Target = CPU,
) -> Pool:
    """The pool with the entries written, in any order. A slot is written at most once.

    On a GPU it is a kernel for quantised entries; for floats XLA's scatter is in place too. Raises ValueError for
    entries of another width.
    """
    if entries.ndim != 2 or entries.shape[1] != pool.format.width:
        raise ValueError(f"cache_write: entries {entries.shape} must be [T, {pool.format.width}]")
    if tpu.supports(pool, target):
        return tpu.cache_write(pool, slots, entries, layer=layer, num_pages=num_pages, target=target)
    if gpu.supports(pool, target):
        return gpu.cache_write(pool, slots, entries, layer=layer, num_pages=num_pages, target=target)
    if slots.shape[0] == 1:
        # XLA turns a scatter of one row into a slice and an update, and then copies the pool at every layer.
        slots = jnp.pad(slots, (0, 1), constant_values=NOWHERE)
        entries = jnp.concatenate([entries, entries])
    return pool.write(slots + layer * num_pages * pool.entries_per_page, entries)
