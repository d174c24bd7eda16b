"""Root-mean-square normalisation, in float32 with one cast at the end."""

from __future__ import annotations

import jax
from flax import nnx

from dsjax.model.param import constant
from pallas_kernels.rms_norm import rms_norm


class RMSNorm(nnx.Module):
    """scale * x / rms(x); the scale multiplies directly (it is not 1 + scale)."""

    def __init__(self, width: int, eps: float, axis: str | None = "embed"):
        self.scale = constant((width,), (axis,), 1.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps)
