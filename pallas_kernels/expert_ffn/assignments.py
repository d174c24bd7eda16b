"""What every form of the experts' sum does around its products: tokens to their places, and results back."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def tokens_at(place: jax.Array, num_places: int, k: int) -> jax.Array:
    """place [T * k] of each assignment, out of range for none -> whose token is at each place, 0 where none is."""
    token = jnp.arange(place.shape[0], dtype=jnp.int32) // k
    return jnp.zeros((num_places,), jnp.int32).at[place].set(token, mode="drop")


def weighted_sum(out: jax.Array, place: jax.Array, weights: jax.Array) -> jax.Array:
    """out [P, D] at each assignment's place [T * k], 0 for one out of range, weights [T, k] -> [T, D]."""
    out = jnp.take(out, place, axis=0, mode="fill", fill_value=0).reshape(*weights.shape, -1)
    return jnp.sum(out * weights[..., None], axis=1)
