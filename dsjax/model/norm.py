"""Root-mean-square normalisation, in float32 with one cast at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.model.param import constant


def rms(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """scale * x / rms(x); the scale multiplies directly (it is not 1 + scale)."""

    def __init__(self, width: int, eps: float, axis: str | None = "embed"):
        self.scale = constant((width,), (axis,), 1.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms(x, self.eps) * self.scale[...]).astype(x.dtype)
