"""The running softmax of a thread block's rows, a row being one head of one query."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.gpu_attention.keys import CHUNK

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

COLUMNS = 64  # of the weighted sum that one matmul adds to: its keys take 32 registers a thread
FLOOR = -1e30  # of the maximum, finite, so that a row without a key gets weights 0 and not NaN
_MASKED = -2e30  # of a logit: below the floor, so that its weight is 0 whatever the maximum


class Seen(NamedTuple):
    """The places from `first` up to `last` that some row sees, and those that each does: from `begin` up to `end`."""

    first: jax.Array
    last: jax.Array
    begin: Callable[[], jax.Array]  # [M], or a number for all rows
    end: Callable[[], jax.Array]
    chosen: Any  # [slots, CHUNK] or None: of these the ones that have the bit of the row's query


class Softmax:
    """State: (maximum [M], denominator [M], sums [M, COLUMNS] of this warpgroup)."""

    def __init__(self, scratch, heads: int, threads: int, thread, scale: float, interpret: bool):
        self.scratch, self.heads, self.threads, self.thread = scratch, heads, threads, thread
        rows, width = self.rows, self.width = scratch["queries"].shape
        self.scale, self.interpret = scale, interpret
        layout = functools.partial(_layout, m_warps=rows // 16)
        self.left, self.right, self.sum = (layout(name) for name in ("MMA_LHS", "MMA_RHS", "MMA_ACC"))
        self.row = self.sum.reduce(1)
        # Of this warpgroup: its keys of a chunk, and its columns of the sums.
        self.own = pl.ds(thread * (CHUNK // threads), CHUNK // threads)
        own = width // threads
        self.columns = [pl.ds(thread * own + c, COLUMNS) for c in range(0, own, COLUMNS)]

    def meet(self) -> None:
        """All warpgroups have come here."""
        if self.threads > 1:
            plgpu.barrier_arrive(self.scratch["together"])
            plgpu.barrier_wait(self.scratch["together"])

    def read_all(self) -> None:
        """All have come here and read the keys so far: copies may go where those were."""
        plgpu.commit_smem()
        self.meet()

    def start(self, maximum, denominator):
        zero = plgpu.layout_cast(jnp.zeros((self.rows, COLUMNS), jnp.float32), self.sum)
        load = functools.partial(plgpu.load, layout=self.row, optimized=False)
        return load(maximum), load(denominator), (zero,) * len(self.columns)

    def keep(self, place, values: list[jax.Array]) -> Callable[[], jax.Array]:
        """As `of_queries`; what is [M] waits in place [warpgroups, M] in shared memory, as registers are short."""
        result = self.of_queries(values)
        if not result.ndim:
            return lambda: result
        ref = place.at[self.thread]
        plgpu.store(ref, result, optimized=False)
        return lambda: plgpu.load(ref, layout=self.row, optimized=False)

    def of_queries(self, values: list[jax.Array]) -> jax.Array:
        """A number a query, each of as many rows: as [M], or the number itself where there is one query."""
        if len(values) == 1:
            return values[0]
        query = self._query()
        result = plgpu.layout_cast(jnp.full((self.rows,), values[0]), self.row)
        for i, value in enumerate(values[1:], 1):
            result = jnp.where(query >= i, value, result)
        return result

    def _query(self) -> jax.Array:
        """[M] which of the queries here a row is of."""
        return lax.div(plgpu.broadcasted_iota(jnp.int32, (self.rows,), 0, layout=self.row), self.heads)

    def add(self, state, keys, chunk: jax.Array, slot: jax.Array, seen: Seen, refill: Callable[[], None]):
        """Adds what is seen of a chunk's keys [CHUNK, H]; calls `refill` once no other is read."""
        maximum, denominator, sums = state
        logits, weights = self.scratch["logits"], self.scratch["weights"]
        plgpu.store(logits.at[:, self.own], self._logits(keys.at[self.own]), optimized=False)
        self.read_all()
        refill()
        self._clear(keys, seen.first - chunk * CHUNK, seen.last - chunk * CHUNK)
        x = plgpu.load(logits, layout=self.sum, optimized=False) * self.scale
        x = jnp.where(self._sees(chunk, slot, seen), x, _MASKED)
        top = jnp.maximum(maximum, jnp.max(x, axis=1))
        x = jnp.exp(x - self._spread(top, CHUNK))
        decay = jnp.exp(maximum - top)
        denominator = denominator * decay + jnp.sum(x, axis=1)

        @pl.when(self.thread == 0)
        def _() -> None:
            plgpu.store(weights, x.astype(weights.dtype), optimized=False)

        self.meet()
        x = plgpu.load(weights, layout=self.left, optimized=False)
        spread = self._spread(decay, COLUMNS)
        sums = tuple(
            self._matmul(total * spread, x, plgpu.load(keys.at[:, columns], layout=self.right, optimized=False))
            for total, columns in zip(sums, self.columns, strict=True)
        )
        return top, denominator, sums

    def finish(self, state, outs: list[Any]) -> None:
        """Writes sums / denominator; or sums, maximum, denominator where there are places for all."""
        maximum, denominator, sums = state
        divisor = self._spread(denominator, COLUMNS)
        for total, columns in zip(sums, self.columns, strict=True):
            value = total if len(outs) > 1 else total / divisor
            plgpu.store(outs[0].at[:, columns], value, optimized=False)
        if len(outs) > 1:

            @pl.when(self.thread == 0)
            def _() -> None:
                plgpu.store(outs[1], maximum, optimized=False)
                plgpu.store(outs[2], denominator, optimized=False)

    def _logits(self, keys) -> jax.Array:
        """[M, K] of keys [K, H], unscaled; in a loop, so that few of the queries are in registers."""
        queries, depth = self.scratch["queries"], 64

        def body(i, total):
            part = pl.ds(i * depth, depth)
            a = plgpu.load(queries.at[:, part], layout=self.left, optimized=False)
            b = plgpu.load(keys.at[:, part].transpose((1, 0)), layout=self.right, optimized=False)
            return self._matmul(total, a, b)

        zero = plgpu.layout_cast(jnp.zeros((self.rows, keys.shape[0]), jnp.float32), self.sum)
        return lax.fori_loop(0, self.width // depth, body, zero)

    def _sees(self, chunk: jax.Array, slot: jax.Array, seen: Seen) -> jax.Array:
        """[M, CHUNK] whether a row sees a key."""

        def spread(x: jax.Array) -> jax.Array:
            return self._spread(x, CHUNK) if x.ndim else x

        place = plgpu.broadcasted_iota(jnp.int32, (self.rows, CHUNK), 1, layout=self.sum)
        begin, end = (spread(x() - chunk * CHUNK) for x in (seen.begin, seen.end))
        sees = (place >= begin) & (place < end)
        if seen.chosen is None:
            return sees
        chosen = plgpu.load(seen.chosen.at[slot], layout=self.sum.reduce(0), optimized=False)
        chosen = plgpu.layout_cast(lax.broadcast_in_dim(chosen, place.shape, [1]), self.sum)
        return sees & ((chosen >> spread(self._query())) & 1 == 1)

    def _clear(self, keys, begin, end) -> None:
        """Zeros for what is no row's key: weight 0 times NaN is NaN. Each warpgroup does its own columns."""

        @pl.when((begin > 0) | (end < CHUNK))
        def _() -> None:
            layout = _layout("MMA_ACC", m_warps=1)
            place = plgpu.broadcasted_iota(jnp.int32, (CHUNK, COLUMNS), 0, layout=layout)
            for columns in self.columns:
                x = plgpu.load(keys.at[:, columns], layout=layout, optimized=False)
                x = jnp.where((place >= begin) & (place < end), x, jnp.zeros_like(x))
                plgpu.store(keys.at[:, columns], x, optimized=False)
            plgpu.commit_smem()  # before the next copy into it

    def _spread(self, x: jax.Array, columns: int) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (self.rows, columns), [0]), self.sum)

    def _matmul(self, total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        if self.interpret:  # which has no mma
            return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(total, a, b)


def _layout(name: str, m_warps: int) -> Any:
    return getattr(plgpu.Layout, name)(jnp.bfloat16, m_warps=m_warps)
