"""The experts' weights and their activation."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Matrices(NamedTuple):
    """w13 [G, D, 2F] (gate, then up) and w2 [G, F, D], or their codes and scales (`pallas_kernels.dequantize`)."""

    w13: jax.Array
    w2: jax.Array
    w13_scale: jax.Array | None = None
    w2_scale: jax.Array | None = None


def clamped_swiglu(gate_up: jax.Array, limit: float) -> jax.Array:
    """[..., 2F] (gate, then up) -> [..., F], float32; the gate is clamped above only; limit 0 is no clamp."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up
