"""Public functions of the operation. What is traced for a CPU with native code takes one pass over x."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import normalised
from pallas_kernels.rotary import native
from pallas_kernels.target import traced_target


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the last r channels of x [T, ..., d] by angles of cosine and sine [T, r/2], float32: x's shape and type.

    It is computed in float32 and rounded once.
    """
    if native.supports(x, cos.shape[-1]) and traced_target().has_native_kernels:
        return native.rotate(x, cos, sin)
    return _rotated(x.astype(jnp.float32), cos, sin).astype(x.dtype)


def normalise_and_rotate(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    scale: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`rotate` of scale [d] * x / rms(x) over d, `eps` added to the mean of squares; without a scale it is 1.

    The result has x's type, or if x is float32 a `dtype`; only that is rounded.
    """
    dtype = jnp.dtype(dtype or x.dtype)
    if native.supports(x, cos.shape[-1], dtype) and traced_target().has_native_kernels:
        return native.normalise_and_rotate(x, cos, sin, eps, scale, dtype)
    return _rotated(normalised(x, scale, eps), cos, sin).astype(dtype)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """In plain JAX, of float32."""
    half = cos.shape[-1]
    cos, sin = (t.reshape(t.shape[0], *[1] * (x.ndim - 2), half) for t in (cos, sin))
    pairs = x[..., x.shape[-1] - 2 * half :].reshape(*x.shape[:-1], half, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(*x.shape[:-1], 2 * half)
    return jnp.concatenate([x[..., : x.shape[-1] - 2 * half], turned], axis=-1)
