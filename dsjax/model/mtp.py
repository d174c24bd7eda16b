"""The multi-token-prediction block: drafts token i + 2 from the streams at i and token i + 1 (spec 2.8)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.config import ModelConfig
from dsjax.model.mhc import HyperHead
from dsjax.model.norm import RMSNorm
from dsjax.model.param import Linear


class MTP(nnx.Module):
    """Joins streams and the next token's embedding, runs a sliding block; embedding and head are shared."""

    def __init__(self, config: ModelConfig, block: Any, rngs: nnx.Rngs, dtype: jnp.dtype):
        d, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(d, eps)
        self.hnorm = RMSNorm(d, eps)
        self.e_proj = Linear(rngs, (d, d), ("embed", None), dtype, config.quant_method)
        self.h_proj = Linear(rngs, (d, d), ("embed", None), dtype, config.quant_method)
        self.block = block  # a transformer.Block; the transformer builds it, since it imports this module
        self.hc_head = HyperHead(config, rngs)
        self.norm = RMSNorm(d, eps)

    def inputs(self, streams: jax.Array, embedded: jax.Array) -> jax.Array:
        """streams [S, T, D] at i, embedded [T, D] of token i + 1 -> the block's input streams [S, T, D]."""
        joined = self.e_proj(self.enorm(embedded), jnp.float32) + self.h_proj(self.hnorm(streams), jnp.float32)
        return joined.astype(streams.dtype)

    def outputs(self, streams: jax.Array) -> jax.Array:
        """The block's output streams [S, T, D] -> [T, D], ready for the shared head."""
        return self.norm(self.hc_head(streams))
