"""How a parameter is declared: its shape, logical axes and initial values, once.

Abstract shapes (`nnx.eval_shape`), initialisation, checkpoint loading and shardings all derive from this.
Matmuls run at the highest precision (the two ways into the model set it): on accelerators the default rounds float32
operands to bfloat16 and flips expert choices; bfloat16 operands are not affected by it.
Logical axes: vocab embed heads q_lora kv head_dim group o_lora expert ffn streams, or None.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

HIGHEST = jax.lax.Precision.HIGHEST


class Buffer(nnx.Variable):
    """A tensor of the checkpoint that is not trained: nnx.grad leaves it alone."""


def normal(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: jnp.dtype = jnp.float32,
    *,
    fan_in: int | None = None,
) -> nnx.Param:
    """A weight drawn from N(0, 1/fan_in); `fan_in` defaults to the second last axis (kernels are [..., in, out])."""
    scale = 1.0 / math.sqrt(fan_in if fan_in is not None else shape[-2])
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * scale).astype(dtype), logical_axes=axes)


def constant(shape: tuple[int, ...], axes: tuple[str | None, ...], value: float, dtype: jnp.dtype = jnp.float32):
    return nnx.Param(jnp.full(shape, value, dtype), logical_axes=axes)


class Linear(nnx.Module):
    """y = x @ kernel without bias; accumulates in float32 whatever the storage type."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str | None, str | None], dtype: jnp.dtype):
        self.kernel = normal(rngs, shape, axes, dtype)  # [in, out]

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None, precision=None) -> jax.Array:
        y = jnp.dot(x, self.kernel[...], preferred_element_type=jnp.float32, precision=precision)
        return y.astype(out_dtype or x.dtype)
