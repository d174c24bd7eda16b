"""Public functions of the operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import native
from pallas_kernels.target import traced_target


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """scale [d] * x / rms(x) over the last axis of x [..., d], `eps` added to the mean of squares: x's shape and type.

    It is computed in float32 and rounded once. What is traced for a CPU with native code is one operation.
    """
    if native.supports(x) and traced_target().has_native_kernels:
        return native.rms_norm(x, scale, eps)
    return normalised(x, scale, eps).astype(x.dtype)


def normalised(x: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """`rms_norm` in plain JAX, in float32; without a scale it is 1."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x if scale is None else x * scale
