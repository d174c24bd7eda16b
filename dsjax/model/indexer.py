"""The indexer of a CSA layer: scores compressed entries and picks the best for each query (spec 2.6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.axes import SHARD
from dsjax.config import LayerKind, ModelConfig
from dsjax.model.compressor import Compressor
from dsjax.model.param import HIGHEST, Linear
from dsjax.model.rope import CosSin, frequencies, rotate
from pallas_kernels import collectives
from pallas_kernels.indexer_topk import index_scores


class Indexer(nnx.Module):
    """Its own queries, signed head weights and compressed keys."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(
            rngs, (config.q_lora_rank, heads * width), ("q_lora", "index_heads"), dtype, config.quant_method
        )
        self.weights_proj = Linear(rngs, (config.hidden_size, heads), ("embed", None), dtype)
        self.compressor = Compressor(
            config.hidden_size,
            width,
            config.csa_ratio,
            True,
            frequencies(config, LayerKind.CSA),
            config.rms_norm_eps,
            rngs,
            dtype,
        )
        self.config = config

    def queries(self, x: jax.Array, c_q: jax.Array, table: CosSin) -> tuple[jax.Array, jax.Array]:
        """x [T, D], c_q [T, q_lora] -> queries [T, HI, dI] and head weights [T, HI] float32, scales included.

        Devices split the projection and then share the queries: a score is a sum over all heads, and the scores of a
        long context are many more than the queries.
        """
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        q = self.wq_b(c_q).reshape(x.shape[0], -1, width)
        q = rotate(q, table)
        q = collectives.all_gather(q, SHARD, axis=1)
        return q, self.weights_proj(x, jnp.float32, HIGHEST) * (heads * width) ** -0.5

    def full(self, x: jax.Array, c_q: jax.Array, table: CosSin, tap=None) -> jax.Array:
        """One whole sequence: x [S, D] -> which of the C entries each query attends to, [S, C] bool."""
        keys = self.compressor.full(x)  # [C, dI]
        q, weights = self.queries(x, c_q, table)
        scores = index_scores(q, weights, keys)
        if tap is not None:
            tap("index_scores", scores)
        num_entries = keys.shape[0]
        visible = jnp.arange(num_entries) < ((jnp.arange(x.shape[0]) + 1) // self.config.csa_ratio)[:, None]
        k = self.config.index_topk
        if num_entries <= k:
            return visible
        _, chosen = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), k)  # ties: lowest index first
        rows = jnp.arange(x.shape[0])[:, None]
        return jnp.zeros(visible.shape, bool).at[rows, chosen].set(True) & visible
