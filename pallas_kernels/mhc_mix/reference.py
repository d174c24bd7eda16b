"""The meaning, in jnp; also the CPU path. Mixing weights have the token axis last: on the CPU that halves the cost."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.mhc_mix.api import MixConfig

_HIGHEST = jax.lax.Precision.HIGHEST


def coefficients(fn: jax.Array, streams: jax.Array, eps: float) -> jax.Array:
    """fn [n, S*D] applied to rms(flattened streams [S, T, D]): [n, T] float32."""
    num_streams, _, width = streams.shape
    x = streams.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=(0, 2)) + eps)  # [T]
    if x.shape[1] == 1:
        return jnp.dot(fn, x.reshape(-1, 1), precision=_HIGHEST) * scale
    # A product a stream: one over both axes makes XLA's CPU transpose the streams first. The barrier keeps it from
    # making that of the sum again.
    by_stream = fn.reshape(-1, num_streams, width).transpose(1, 2, 0)
    parts = jax.lax.optimization_barrier(jnp.einsum("std,sdn->stn", x, by_stream, precision=_HIGHEST))
    return functools.reduce(jnp.add, parts).T * scale


def sinkhorn(c: jax.Array, iters: int, eps: float) -> jax.Array:
    """Makes c [S, S, T] (already softmaxed over axis 1) nearly doubly stochastic; ends on columns (axis 0 sums).

    A loop, never unrolled: XLA takes 37 s to compile eight unrolled sites and runs them an order slower.
    """

    def columns(c: jax.Array) -> jax.Array:
        return c / (jnp.sum(c, axis=0, keepdims=True) + eps)

    def body(_, c: jax.Array) -> jax.Array:
        return columns(c / (jnp.sum(c, axis=1, keepdims=True) + eps))

    return jax.lax.fori_loop(0, iters - 1, body, columns(c))


def mhc_read(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, config: MixConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    s = streams.shape[0]
    z, base = coefficients(fn, streams, config.norm_eps), base[:, None]
    pre = jax.nn.sigmoid(scale[0] * z[:s] + base[:s]) + config.eps
    post = 2 * jax.nn.sigmoid(scale[1] * z[s : 2 * s] + base[s : 2 * s])
    comb = (scale[2] * z[2 * s :] + base[2 * s :]).reshape(s, s, -1)
    comb = sinkhorn(jax.nn.softmax(comb, axis=1) + config.eps, config.sinkhorn_iters, config.eps)
    return weighted_sum(pre, streams).astype(streams.dtype), post, comb


def mhc_write(streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    mixed = post[:, :, None] * out.astype(jnp.float32)
    for j in range(streams.shape[0]):  # written out: XLA's CPU dot or sum over j is several times slower
        mixed += comb[j][:, :, None] * streams[j].astype(jnp.float32)
    return mixed.astype(streams.dtype)


def weighted_sum(weights: jax.Array, streams: jax.Array) -> jax.Array:
    """sum_s weights [S, T] * streams [S, T, D], in float32; written out because XLA's CPU dot over S is slower."""
    total = weights[0][:, None] * streams[0].astype(jnp.float32)
    for s in range(1, streams.shape[0]):
        total += weights[s][:, None] * streams[s].astype(jnp.float32)
    return total
