"""Attention over keys that arrive in parts: running maximum, denominator and weighted sum, all float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import collectives

FEW_QUERIES = 32
_FLOOR = -1e30  # instead of -inf, so that a query without any key yet gives weights 0, not NaN


class Running(NamedTuple):
    maximum: jax.Array  # [NB, M, 1]
    denominator: jax.Array  # [NB, M, 1]
    total: jax.Array  # [NB, M, H]


def start(queries: jax.Array) -> Running:
    """For queries [NB, M, H]."""
    shape = (*queries.shape[:2], 1)
    return Running(
        jnp.full(shape, _FLOOR, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(queries.shape, jnp.float32)
    )


def update(run: Running, queries: jax.Array, keys: jax.Array, mask: jax.Array, scale: float) -> Running:
    """Adds keys [NB, K, H] (they are the values too; finite where masked) under mask [NB, M, K]."""
    logits = _products(queries, keys) * scale
    logits = jnp.where(mask, logits, -jnp.inf)
    maximum = jnp.maximum(run.maximum, jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - maximum)
    decay = jnp.exp(run.maximum - maximum)
    total = jnp.einsum("bmk,bkh->bmh", weights.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    return Running(
        maximum,
        run.denominator * decay + jnp.sum(weights, axis=-1, keepdims=True),
        run.total * decay + total,
    )


def _products(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[NB, M, K] float32. For a decode step's few queries the keys come first: XLA's CPU repacks the second operand."""
    if queries.shape[1] > FEW_QUERIES:
        return jnp.einsum("bmh,bkh->bmk", queries, keys, preferred_element_type=jnp.float32)
    products = jnp.einsum("bkh,bmh->bkm", keys, queries, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(products).transpose(0, 2, 1)


def merge(run: Running, axis: str, scatter: bool) -> Running:
    """Joins what the devices of a mesh axis made of their own keys, for arrays [NB, B, N, ...].

    With `scatter` each device gets its part of the heads N, else every device gets all.
    """
    if not axis or collectives.size(axis) == 1:
        return run
    maximum = collectives.pmax(run.maximum, axis)
    decay = jnp.exp(run.maximum - maximum)
    sums = jnp.concatenate([run.total * decay, run.denominator * decay], axis=-1)  # one collective for both
    if scatter:
        sums = collectives.psum_scatter(sums, axis, axis=2)
        maximum = collectives.local_part(maximum, axis, axis=2)
    else:
        sums = collectives.psum(sums, axis)
    return Running(maximum, sums[..., -1:], sums[..., :-1])


def finish(run: Running, sink: jax.Array) -> jax.Array:
    """Adds the sink logits [M] (a key without a value) and divides. -> [NB, M, H] float32."""
    sink = sink[None, :, None].astype(jnp.float32)
    maximum = jnp.maximum(run.maximum, sink)
    decay = jnp.exp(run.maximum - maximum)
    return run.total * decay / (run.denominator * decay + jnp.exp(sink - maximum))
