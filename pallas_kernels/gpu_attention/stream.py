"""A segment of keys on its way through a ring of shared-memory buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.gpu_attention.codes import decode
from pallas_kernels.gpu_attention.keys import CHUNK, Geometry

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel


class Stream(NamedTuple):
    """One warpgroup starts the copies, all wait for them, and each makes keys of its part of a chunk's codes."""

    geometry: Geometry
    index: Any  # [P] or [k]
    arrays: list[Any]  # values and side words of the pool
    begin: jax.Array
    end: jax.Array
    ring: list[Any]  # a buffer [slots, CHUNK, n] of each array
    keys: Any  # [slots, CHUNK, H]: the ring itself, or where codes become keys
    arrived: Any  # a barrier a slot of the ring
    leads: jax.Array  # whether this warpgroup starts copies
    own: Any  # the slice of a chunk's keys that is this warpgroup's

    def run(self, add: Callable[..., Any], state):
        """The state after state = add(state, keys [CHUNK, H], chunk, refill=...) for each chunk.

        `add` calls refill() once nobody reads the chunk before this one any more.
        """
        first, last = lax.div(self.begin, CHUNK), lax.div(self.end + (CHUNK - 1), CHUNK)
        ahead = self.ring[0].shape[0] - 1

        def copy(chunk) -> None:
            @pl.when(self.leads & (chunk < last))
            def _() -> None:
                slot = lax.rem(chunk - first, ahead + 1)
                (self._copy_pages if self.geometry.epp else self._copy_entries)(chunk, slot)

        def step(chunk, state):
            slot = lax.rem(chunk - first, ahead + 1)
            plgpu.barrier_wait(self.arrived.at[slot])
            keys = self.keys.at[lax.rem(chunk - first, self.keys.shape[0])]
            if self.geometry.coded:
                # Of the two slots of keys this one was read two chunks ago, and all have met since.
                values, side = (buffer.at[slot, self.own] for buffer in self.ring)
                decode(values, side, keys.at[self.own], self.geometry.form)
                plgpu.commit_smem()  # before other warps read them
            return add(state, keys, chunk, refill=lambda: copy(chunk + ahead))

        for i in range(ahead):
            copy(first + i)
        return lax.fori_loop(first, last, step, state)

    def _copy_pages(self, chunk, slot) -> None:
        """The chunk's keys: a part of a page, or several pages; outside begin and end the nearest page once more."""
        epp, places = self.geometry.epp, self.index.shape[0]
        size = min(epp, CHUNK)
        for i in range(CHUNK // size):
            place = jnp.clip(chunk * CHUNK + i * size, self.begin, self.end - 1)
            page = self.index[lax.rem(lax.div(place, epp), places)]
            for array, buffer in zip(self.arrays, self.ring, strict=True):
                source = array.at[page]
                if epp > size:
                    source = array.at[page, pl.ds(lax.rem(chunk * CHUNK, epp), size)]
                self._copy(source, buffer.at[slot, pl.ds(i * size, size)], slot)

    def _copy_entries(self, chunk, slot) -> None:
        """The chunk's keys one by one; those past the end are the last one once more."""

        def body(j, carry):
            entry = self.index[jnp.minimum(chunk * CHUNK + j, self.end - 1)]
            values, *side = self.ring
            self._copy(self.arrays[0].at[entry], values.at[slot, j], slot)
            for words in side:
                first = entry * self.geometry.side_words
                self._copy(self.arrays[1].at[pl.ds(first, words.shape[2])], words.at[slot, j], slot, bulk=False)
            return carry

        lax.fori_loop(0, CHUNK, body, 0)

    def _copy(self, source, target, slot, bulk: bool = True) -> None:
        # A bulk copy takes any size, but neither makes tiles nor ends where the array does.
        bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if bulk and not self.geometry.tiled else None
        plgpu.copy_gmem_to_smem(source, target, self.arrived.at[slot], oob_mode=bounds)
