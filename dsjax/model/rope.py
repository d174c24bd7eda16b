"""Rotary embedding on the last channels of a vector, interleaved pairs, float32 (spec 2.4)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.config import LayerKind, ModelConfig
from pallas_kernels import rotary

CosSin = tuple[jax.Array, jax.Array]  # each [..., r/2], float32


def frequencies(config: ModelConfig, kind: LayerKind) -> np.ndarray:
    """Angular frequencies [r/2] of a layer: the main table for sliding layers, the compress table for the others.

    The compress table is YaRN's at every length, with truncated correction dims, as the released code has it.
    """
    r = config.qk_rope_head_dim
    base = config.rope_theta if kind is LayerKind.SLIDING else config.compress_rope_theta
    freq = base ** (-np.arange(0, r, 2, dtype=np.float64) / r)
    yarn = config.yarn
    if kind is LayerKind.SLIDING or yarn is None:
        return freq.astype(np.float32)

    def correction_dim(rotations: float) -> float:
        return r * math.log(yarn.original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(correction_dim(yarn.beta_fast)), 0)
    high = min(math.ceil(correction_dim(yarn.beta_slow)), r - 1)
    if low == high:
        high += 0.001  # the release's guard against a division by zero
    keep = 1 - np.clip((np.arange(r // 2) - low) / (high - low), 0, 1)
    return (freq / yarn.factor * (1 - keep) + freq * keep).astype(np.float32)


def cos_sin(freq: np.ndarray | jax.Array, positions: jax.Array) -> CosSin:
    """Tables for integer positions [...]: two arrays [..., r/2].

    Joined behind a barrier: XLA's CPU would compute a cosine again in each operation that uses it, for every head; an
    array joined along its last axis it keeps.
    """
    angle = positions.astype(jnp.float32)[..., None] * freq
    both = jax.lax.optimization_barrier(jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1))
    cos, sin = jnp.split(both, 2, axis=-1)
    return cos, sin


def rotate(x: jax.Array, table: CosSin, *, inverse: bool = False) -> jax.Array:
    """Rotates the last r channels of x [T, ..., d] by the angles of a table [T, r/2]."""
    cos, sin = table
    return rotary.rotate(x, cos, -sin if inverse else sin)
