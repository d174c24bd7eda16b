"""Rotation of interleaved pairs of channels, float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the last r channels of x [..., d] by angles of cosine and sine [..., r/2] (broadcast over the leading
    axes of x)."""
    half = cos.shape[-1]
    pairs = x[..., x.shape[-1] - 2 * half :].astype(jnp.float32).reshape(*x.shape[:-1], half, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(*x.shape[:-1], 2 * half)
    return jnp.concatenate([x[..., : x.shape[-1] - 2 * half], turned.astype(x.dtype)], axis=-1)
