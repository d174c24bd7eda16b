"""How a parameter is declared: its shape, logical axes and initial values, once.

Abstract shapes (`nnx.eval_shape`), initialisation, checkpoint loading and shardings all derive from this.
Matmuls run at the highest precision (the two ways into the model set it): on accelerators the default rounds float32
operands to bfloat16 and flips expert choices; bfloat16 operands are not affected by it.
Logical axes are the fields of `dsjax.sharding.Rules`, which may be split, those in its WHOLE, or None.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.dequantize import FP4_BLOCK, FP8_BLOCK, dequantize
from pallas_kernels.matmul import matmul

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


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: jnp.dtype,
    stored: str | None = None,
) -> tuple[nnx.Variable, nnx.Variable | None]:
    """A matrix [..., in, out] and its scale: in `dtype` without one, or as a checkpoint stores it, "fp8" or "fp4".

    Code and scale have the weight's axes, so that both are cut alike. A stored weight starts as zero: it is loaded.
    """
    if stored is None:
        return normal(rngs, shape, axes, dtype), None
    *stack, k, n = shape
    if stored == "fp8":
        codes, scale = jnp.zeros(shape, jnp.float8_e4m3fn), (-(-k // FP8_BLOCK), -(-n // FP8_BLOCK))
        scales = jnp.ones((*stack, *scale), jnp.float32)
    elif stored == "fp4":
        # The scales stay bytes: there is one for every 16 bytes of codes, and float32 would make a quarter more of all.
        codes = jnp.zeros((*stack, k // 2, n), jnp.int8)
        scales = jnp.full((*stack, -(-k // FP4_BLOCK), n), 127, jnp.uint8)
    else:
        raise ValueError(f"stored={stored!r} must be fp8, fp4 or None")
    return Buffer(codes, logical_axes=axes), Buffer(scales, logical_axes=axes)


def widen(kernel: nnx.Variable, scale: nnx.Variable | None, dtype: jnp.dtype) -> jax.Array:
    """The matrix of `weight` as numbers; `dtype` is that of a stored one."""
    return kernel[...] if scale is None else dequantize(kernel[...], scale[...], dtype)


class Linear(nnx.Module):
    """y = x @ kernel without bias; accumulates in float32 whatever the storage type."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        shape: tuple[int, int],
        axes: tuple[str | None, str | None],
        dtype: jnp.dtype,
        stored: str | None = None,
    ):
        self.kernel, self.scale = weight(rngs, shape, axes, dtype, stored)  # [in, out]

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None, precision=None) -> jax.Array:
        kernel = widen(self.kernel, self.scale, x.dtype)
        return matmul(x, kernel, precision).astype(out_dtype or x.dtype)
