"""What the TPU attention kernels share: a softmax in fast memory that keys are added to, and pages streamed into it.

For one block of queries, M = queries x heads rows: maximum and denominator [M, 128] (a lane holds what all hold, since
one lane costs a whole register) and the weighted sum [M, H], float32. Pages come by DMA into two buffers in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import dot_precision

LANES = 128
_FLOOR = -1e30  # of the maximum: finite, so that a query without a key gets weights 0 and not NaN
_MASKED = -2e30  # of a logit: below the floor, so that its weight is 0 whatever the maximum


class Softmax(NamedTuple):
    """References to the running state."""

    maximum: Any
    denominator: Any
    total: Any

    @staticmethod
    def scratch(rows: int, width: int) -> list[Any]:
        return [pltpu.VMEM((rows, n), jnp.float32) for n in (LANES, LANES, width)]

    def start(self) -> None:
        self.maximum[...] = jnp.full(self.maximum.shape, _FLOOR, jnp.float32)
        self.denominator[...] = jnp.zeros(self.denominator.shape, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)

    def add(self, q: jax.Array, keys: jax.Array, mask: jax.Array, scale: float) -> None:
        """Adds keys [K, H], which are the values too, under mask [M, K]; q [M, H]. Keys must be finite."""
        dot = functools.partial(lax.dot_general, precision=dot_precision(q.dtype), preferred_element_type=jnp.float32)
        logits = dot(q, keys, (((1,), (1,)), ((), ()))) * scale
        logits = jnp.where(mask, logits, _MASKED)
        before = self.maximum[:, :1]
        maximum = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        weights, decay = jnp.exp(logits - maximum), jnp.exp(before - maximum)
        self.maximum[...] = jnp.broadcast_to(maximum, self.maximum.shape)
        self.denominator[...] = self.denominator[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
        added = dot(weights.astype(keys.dtype), keys, (((1,), (0,)), ((), ())))
        self.total[...] = self.total[...] * decay + added

    def finish(self, sink: jax.Array) -> jax.Array:
        """With the sink logits [M, 1], keys without a value: [M, H]."""
        before = self.maximum[:, :1]
        maximum = jnp.maximum(before, sink)
        decay = jnp.exp(before - maximum)
        return self.total[...] * decay / (self.denominator[:, :1] * decay + jnp.exp(sink - maximum))


def stream(
    first: jax.Array,
    last: jax.Array,
    copy: Callable[[jax.Array, jax.Array], list[Any]],  # (number, buffer) -> the DMAs that fill a buffer
    use: Callable[[jax.Array, jax.Array], None],  # the same arguments, once they are done
) -> None:
    """Runs `use` for first <= number < last, while the next one's DMAs are on their way."""

    @pl.when(first < last)
    def _() -> None:
        for dma in copy(first, lax.rem(first, 2)):
            dma.start()

    def body(i: jax.Array, carry: int) -> int:
        @pl.when(i + 1 < last)
        def _() -> None:
            for dma in copy(i + 1, lax.rem(i + 1, 2)):
                dma.start()

        for dma in copy(i, lax.rem(i, 2)):
            dma.wait()
        use(i, lax.rem(i, 2))
        return carry

    lax.fori_loop(first, last, body, 0)


def as_keys(page: jax.Array, dtype: Any) -> jax.Array:
    """A page [K, H] or [K, H / 128, 128] as [K, H] of the queries' type."""
    return page.reshape(page.shape[0], -1).astype(dtype)
