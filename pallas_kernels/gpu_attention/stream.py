"""A segment of keys on its way through a ring of shared-memory buffers."""

from __future__ import annotations

import functools
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
    mask: Any  # [B, words], or None
    queries: list[jax.Array]  # those of the B that are attended to here
    arrays: list[Any]  # values and side words of the pool
    begin: jax.Array
    end: jax.Array
    ring: list[Any]  # a buffer [slots, CHUNK, n] of each array
    keys: Any  # [slots, CHUNK, H]: the ring itself, or where codes become keys
    chosen: Any  # [slots, CHUNK]: for several queries with masks, which of them have a key, a bit each
    arrived: Any  # a barrier a slot of the ring
    leads: jax.Array  # whether this warpgroup starts copies
    own: Any  # the slice of a chunk's keys that is this warpgroup's

    def run(self, add: Callable[..., Any], state):
        """The state after state = add(state, keys [CHUNK, H], chunk, slot, refill=...) for each chunk.

        `add` calls refill() once nobody reads the chunk before this one any more.
        """
        first, last = lax.div(self.begin, CHUNK), lax.div(self.end + (CHUNK - 1), CHUNK)
        ahead = self.ring[0].shape[0] - 1

        def copy(chunk, scan):
            slot = lax.rem(chunk - first, ahead + 1)
            bring = self._copy_entries if self.geometry.gathered else self._copy_pages
            return lax.cond(self.leads & (chunk < last), lambda: bring(chunk, slot, scan), lambda: scan)

        def step(chunk, carry):
            scan, state = carry
            slot = lax.rem(chunk - first, ahead + 1)
            plgpu.barrier_wait(self.arrived.at[slot])
            keys = self.keys.at[lax.rem(chunk - first, self.keys.shape[0])]
            if self.geometry.coded:
                # Of the two slots of keys this one was read two chunks ago, and all have met since.
                values, side = (buffer.at[slot, self.own] for buffer in self.ring)
                decode(values, side, keys.at[self.own], self.geometry.form)
                plgpu.commit_smem()  # before other warps read them
            scans = []
            state = add(state, keys, chunk, slot, refill=lambda: scans.append(copy(chunk + ahead, scan)))
            return scans[0], state

        scan = () if self.mask is None else (jnp.int32(-1), jnp.int32(0))
        for i in range(ahead):
            scan = copy(first + i, scan)
        return lax.fori_loop(first, last, step, (scan, state))[1]

    def _copy_pages(self, chunk, slot, scan):
        """The chunk's keys: a part of a page, or several pages; outside begin and end the nearest page once more."""
        size = min(self.geometry.epp, CHUNK)

        def body(i, carry):
            place = jnp.clip(chunk * CHUNK + i * size, self.begin, self.end - 1)
            page = self._page(place)
            for array, buffer in zip(self.arrays, self.ring, strict=True):
                source = array.at[page]
                if self.geometry.epp > size:
                    source = array.at[page, pl.ds(lax.rem(chunk * CHUNK, self.geometry.epp), size)]
                self._copy(source, buffer.at[slot, pl.ds(i * size, size)], slot)
            return carry

        lax.fori_loop(0, CHUNK // size, body, 0)
        return scan

    def _copy_entries(self, chunk, slot, scan):
        """The chunk's keys one by one; those past the end are the last one once more, or place 0."""
        values, *side = self.ring

        def body(j, scan):
            key = chunk * CHUNK + j
            if self.mask is None:
                entry = self.index[jnp.minimum(key, self.end - 1)]
            else:
                scan, word, bit = self._next(scan, key < self.end)
                place = word * CHUNK + bit
                entry = self._page(place) * self.geometry.epp + lax.rem(place, self.geometry.epp)
                if self.chosen is not None:
                    has = (((self.mask[q, word] >> bit) & 1) << i for i, q in enumerate(self.queries))
                    self.chosen[slot, j] = functools.reduce(jnp.bitwise_or, has)
            self._copy(self.arrays[0].at[entry], values.at[slot, j], slot)
            for buffer in side:
                first = entry * self.geometry.side_words
                self._copy(self.arrays[1].at[pl.ds(first, buffer.shape[2])], buffer.at[slot, j], slot, bulk=False)
            return scan

        return lax.fori_loop(0, CHUNK, body, scan)

    def _next(self, scan, wanted):
        """scan: (word of the masks, bits of it that some query has and that are yet to come). Goes one on if that is
        wanted; also the bit, by its word and place there."""

        def advance(scan):
            word = scan[0] + 1
            return word, functools.reduce(jnp.bitwise_or, (self.mask[q, word] for q in self.queries))

        word, bits = lax.while_loop(lambda scan: wanted & (scan[1] == 0), advance, scan)
        bit = jnp.where(wanted, 31 - lax.clz(bits), 0)
        return (word, jnp.where(wanted, bits ^ (1 << bit), bits)), jnp.where(wanted, word, 0), bit

    def _page(self, place):
        return self.index[lax.rem(lax.div(place, self.geometry.epp), self.index.shape[0])]

    def _copy(self, source, target, slot, bulk: bool = True) -> None:
        # A bulk copy takes any size, but neither makes tiles nor ends where the array does.
        bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if bulk and not self.geometry.tiled else None
        plgpu.copy_gmem_to_smem(source, target, self.arrived.at[slot], oob_mode=bounds)
