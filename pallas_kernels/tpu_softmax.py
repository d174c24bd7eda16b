"""A softmax in a TPU's fast memory that keys are added to.

For one block of queries, M = queries x heads rows: maximum and denominator [M, 128] (a lane holds what all hold, since
one lane costs a whole register) and the weighted sum [M, H], float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.entry_format import LANES
from pallas_kernels.target import dot_precision

_FLOOR = -1e30  # of the maximum: finite, so that a query without a key gets weights 0 and not NaN
_MASKED = -2e30  # added to a logit: far below the floor, so that its weight is 0 whatever the maximum


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
        """Adds keys [K, H], which are the values too, to q [M, H] under mask [queries, K]. Keys must be finite."""
        dot = functools.partial(lax.dot_general, precision=dot_precision(q.dtype), preferred_element_type=jnp.float32)
        logits = dot(q, keys, (((1,), (1,)), ((), ()))) * scale
        logits += per_head(jnp.where(mask, 0.0, _MASKED), len(q))
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


def per_head(x: jax.Array, rows: int) -> jax.Array:
    """x [queries, K], the same for all heads of a query -> [rows, K], or [1, K], which is that for one query."""
    queries, keys = x.shape
    if queries == 1:
        return x
    return jnp.broadcast_to(x[:, None], (queries, rows // queries, keys)).reshape(rows, keys)


def to_column(row: jax.Array) -> jax.Array:
    """[1, n] float32 along the lanes -> [n, 1]."""
    n = row.shape[1]
    diagonal = lax.broadcasted_iota(jnp.int32, (n, n), 0) == lax.broadcasted_iota(jnp.int32, (n, n), 1)
    return jnp.sum(jnp.where(diagonal, row, 0.0), axis=1, keepdims=True)
