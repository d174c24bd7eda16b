"""Manifold-constrained hyper-connections: the residual streams and how a sub-layer reads and writes them (spec 2.2).

Streams are [S, T, D] and mixing weights have the token axis last: on the CPU that halves the cost of a site.
"""

from __future__ import annotations

import jax
from flax import nnx

from dsjax.config import ModelConfig
from dsjax.model.param import constant, normal
from pallas_kernels.mhc_mix import MixConfig, mhc_read, mhc_write
from pallas_kernels.mhc_mix.reference import coefficients, weighted_sum
from pallas_kernels.target import CPU, Target


class HyperConnection(nnx.Module):
    """One site: mixes S streams into a block's input, and the block's output back into the streams."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        s = config.hc_mult
        self.fn = normal(rngs, ((2 + s) * s, s * config.hidden_size), (None, None), fan_in=s * config.hidden_size)
        self.base = constant(((2 + s) * s,), (None,), 0.0)
        self.scale = constant((3,), (None,), 1.0)
        self.config = config

    def read(self, streams: jax.Array, target: Target = CPU) -> tuple[jax.Array, jax.Array, jax.Array]:
        """streams [S, T, D] -> block input [T, D], write weights [S, T], mixing matrix [S, S, T]."""
        cfg = self.config
        config = MixConfig(cfg.hc_sinkhorn_iters, cfg.hc_eps, cfg.rms_norm_eps)
        return mhc_read(streams, self.fn[...], self.base[...], self.scale[...], config, target)

    def write(
        self, streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array, target: Target = CPU
    ) -> jax.Array:
        """X'_k = post_k * out + sum_j comb[j, k] X_j, accumulated in float32 and cast once."""
        return mhc_write(streams, out, post, comb, target)


class HyperHead(nnx.Module):
    """Mixes the last streams into one vector, before the final norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        s = config.hc_mult
        self.fn = normal(rngs, (s, s * config.hidden_size), (None, None), fan_in=s * config.hidden_size)
        self.base = constant((s,), (None,), 0.0)
        self.scale = constant((1,), (None,), 1.0)
        self.config = config

    def __call__(self, streams: jax.Array) -> jax.Array:
        """[S, T, D] -> [T, D]."""
        z = coefficients(self.fn[...], streams, self.config.rms_norm_eps)
        weights = jax.nn.sigmoid(self.scale[...] * z + self.base[...][:, None]) + self.config.hc_eps
        return weighted_sum(weights, streams).astype(streams.dtype)
