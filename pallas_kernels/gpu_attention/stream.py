"""A segment of keys on its way into a ring of shared-memory buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.gpu_attention.keys import CHUNK

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel


def num_copies(geometry: tuple[int, int], width: int) -> int:
    """Copies that bring one chunk."""
    epp, _ = geometry
    return max(1, CHUNK // epp) if epp else CHUNK * (width // _copy_size(width))


def _copy_size(width: int) -> int:
    """Elements of an entry that one copy brings, at most the 256 of a dimension."""
    return 256 if width % 256 == 0 else 128


class Stream(NamedTuple):
    """One warpgroup starts the copies, all wait for them."""

    index: Any  # [P] or [k]
    pool: Any
    begin: jax.Array
    end: jax.Array
    buffers: Any  # [slots, CHUNK, H]
    arrived: Any  # a barrier a slot
    places: int  # P or k
    leads: jax.Array

    def run(self, add: Callable[..., Any], state):
        """The state after state = add(state, keys [CHUNK, H], chunk, refill=...) for each chunk.

        `add` calls refill() once nobody reads the chunk before this one any more.
        """
        first, last = lax.div(self.begin, CHUNK), lax.div(self.end + (CHUNK - 1), CHUNK)
        ahead = self.buffers.shape[0] - 1

        def copy(chunk) -> None:
            @pl.when(self.leads & (chunk < last))
            def _() -> None:
                slot = lax.rem(chunk - first, ahead + 1)
                bring = _copy_pages if len(self.pool.shape) == 3 else _copy_entries
                bring(self, self.buffers.at[slot], self.arrived.at[slot], chunk)

        def step(chunk, state):
            slot = lax.rem(chunk - first, ahead + 1)
            plgpu.barrier_wait(self.arrived.at[slot])
            return add(state, self.buffers.at[slot], chunk, refill=lambda: copy(chunk + ahead))

        for i in range(ahead):
            copy(first + i)
        return lax.fori_loop(first, last, step, state)


def _copy_pages(keys: Stream, buffer, arrived, chunk) -> None:
    """The chunk's keys: a part of a page, or several pages; those past the end are the last page once more."""
    epp = keys.pool.shape[1]
    size = min(epp, CHUNK)
    for i in range(CHUNK // size):
        place = jnp.minimum(chunk * CHUNK + i * size, keys.end - 1)
        page = keys.index[lax.rem(lax.div(place, epp), keys.places)]
        source = keys.pool.at[page]
        if epp > size:
            source = keys.pool.at[page, pl.ds(lax.rem(chunk * CHUNK, epp), size)]
        plgpu.copy_gmem_to_smem(source, buffer.at[pl.ds(i * size, size)], arrived)


def _copy_entries(keys: Stream, buffer, arrived, chunk) -> None:
    """The chunk's keys one by one; those past the end are the last one once more."""
    width = keys.pool.shape[1]
    size = _copy_size(width)

    def body(j, carry):
        entry = keys.index[jnp.minimum(chunk * CHUNK + j, keys.end - 1)]
        for c in range(0, width, size):
            plgpu.copy_gmem_to_smem(keys.pool.at[entry, pl.ds(c, size)], buffer.at[j, pl.ds(c, size)], arrived)
        return carry

    lax.fori_loop(0, CHUNK, body, 0)
