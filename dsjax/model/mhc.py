"""Manifold-constrained hyper-connections: the residual streams and how a sub-layer reads and writes them (spec 2.2).

Streams are [S, T, D] and mixing weights have the token axis last: on the CPU that halves the cost of a site.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.config import ModelConfig
from dsjax.model.param import HIGHEST, constant, normal


def _coefficients(fn: jax.Array, streams: jax.Array, eps: float) -> jax.Array:
    """fn [n, S*D] applied to rms(flattened streams): [n, T] float32."""
    num_streams, _, width = streams.shape
    x = streams.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=(0, 2)) + eps)  # [T]
    z = jnp.einsum("nsd,std->nt", fn.reshape(-1, num_streams, width), x, precision=HIGHEST)
    return z * scale


def sinkhorn(c: jax.Array, iters: int, eps: float) -> jax.Array:
    """Makes c [S, S, T] (already softmaxed over axis 1) nearly doubly stochastic; ends on columns (axis 0 sums).

    A loop, never unrolled: XLA takes 37 s to compile eight unrolled sites and runs them an order slower.
    """

    def columns(c: jax.Array) -> jax.Array:
        return c / (jnp.sum(c, axis=0, keepdims=True) + eps)

    def body(_, c: jax.Array) -> jax.Array:
        return columns(c / (jnp.sum(c, axis=1, keepdims=True) + eps))

    return jax.lax.fori_loop(0, iters - 1, body, columns(c))


class HyperConnection(nnx.Module):
    """One site: mixes S streams into a block's input, and the block's output back into the streams."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        s = config.hc_mult
        self.fn = normal(rngs, ((2 + s) * s, s * config.hidden_size), (None, None), fan_in=s * config.hidden_size)
        self.base = constant(((2 + s) * s,), (None,), 0.0)
        self.scale = constant((3,), (None,), 1.0)
        self.config = config

    def read(self, streams: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """streams [S, T, D] -> block input [T, D], write weights [S, T], mixing matrix [S, S, T]."""
        s, cfg = self.config.hc_mult, self.config
        z = _coefficients(self.fn[...], streams, cfg.rms_norm_eps)
        base, scale = self.base[...][:, None], self.scale[...]
        pre = jax.nn.sigmoid(scale[0] * z[:s] + base[:s]) + cfg.hc_eps
        post = 2 * jax.nn.sigmoid(scale[1] * z[s : 2 * s] + base[s : 2 * s])
        comb = (scale[2] * z[2 * s :] + base[2 * s :]).reshape(s, s, -1)
        comb = sinkhorn(jax.nn.softmax(comb, axis=1) + cfg.hc_eps, cfg.hc_sinkhorn_iters, cfg.hc_eps)
        return _weighted_sum(pre, streams).astype(streams.dtype), post, comb

    def write(self, streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
        """X'_k = post_k * out + sum_j comb[j, k] X_j, accumulated in float32 and cast once."""
        mixed = post[:, :, None] * out.astype(jnp.float32)
        for j in range(self.config.hc_mult):  # written out: XLA's CPU dot or sum over j is several times slower
            mixed += comb[j][:, :, None] * streams[j].astype(jnp.float32)
        return mixed.astype(streams.dtype)


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
        z = _coefficients(self.fn[...], streams, self.config.rms_norm_eps)
        weights = jax.nn.sigmoid(self.scale[...] * z + self.base[...][:, None]) + self.config.hc_eps
        return _weighted_sum(weights, streams).astype(streams.dtype)


def _weighted_sum(weights: jax.Array, streams: jax.Array) -> jax.Array:
    """sum_s weights [S, T] * streams [S, T, D], in float32; written out because XLA's CPU dot over S is slower."""
    total = weights[0][:, None] * streams[0].astype(jnp.float32)
    for s in range(1, streams.shape[0]):
        total += weights[s][:, None] * streams[s].astype(jnp.float32)
    return total
