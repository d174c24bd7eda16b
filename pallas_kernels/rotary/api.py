"""Public function of the operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rotary import native
from pallas_kernels.target import traced_target


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, eps: float | None = None) -> jax.Array:
    """Rotates the last r channels of x [T, ..., d] by angles of cosine and sine [T, r/2], float32: x's shape and type.

    With `eps` x is first divided by its root mean square over d, `eps` added to the mean. What is traced for a CPU with
    native code takes one pass over x.
    """
    half = cos.shape[-1]
    if native.supports(x, half) and traced_target().has_native_kernels:
        return native.rotate(x, cos, sin, eps)
    cos, sin = (t.reshape(t.shape[0], *[1] * (x.ndim - 2), half) for t in (cos, sin))
    out = x.astype(jnp.float32)
    if eps is not None:
        out *= jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
    pairs = out[..., x.shape[-1] - 2 * half :].reshape(*x.shape[:-1], half, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(*x.shape[:-1], 2 * half)
    return jnp.concatenate([out[..., : x.shape[-1] - 2 * half], turned], axis=-1).astype(x.dtype)
