"""Hyper-connections on a TPU: a site's reading is one pass over the streams, its writing another.

A grid step takes a tile of tokens with all their streams. Mixing weights lie [n, tokens], tokens along the lanes, so
that the twenty Sinkhorn rounds are a few register operations each; as separate XLA operations they would be forty
launches a site. Both passes are bound by the streams' bytes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import Target

if TYPE_CHECKING:
    from pallas_kernels.mhc_mix.api import MixConfig

_TOKENS = 128  # of a tile: the lanes of a register
_VMEM_LIMIT = 60 << 20


def mhc_read(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, config: MixConfig, *, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `api.mhc_read`."""
    s, num_tokens, width = streams.shape
    streams, tile = _tiled(streams)
    weights = jax.ShapeDtypeStruct((s * (s + 1), streams.shape[1]), jnp.float32)
    x, mixing = pl.pallas_call(
        functools.partial(_read, num_streams=s, width=width, config=config),
        grid=(streams.shape[1] // tile,),
        in_specs=[
            pl.BlockSpec((s, tile, width), lambda i: (0, i, 0)),
            pl.BlockSpec(fn.shape, lambda i: (0, 0)),
            pl.BlockSpec((fn.shape[0], 1), lambda i: (0, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ],
        out_specs=[
            pl.BlockSpec((tile, width), lambda i: (i, 0)),
            pl.BlockSpec((weights.shape[0], tile), lambda i: (0, i)),
        ],
        out_shape=[jax.ShapeDtypeStruct(streams.shape[1:], streams.dtype), weights],
        compiler_params=None if target.interpret else pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=pl.CostEstimate(
            flops=2 * fn.size * num_tokens + 4 * streams.size,
            bytes_accessed=streams.size * streams.dtype.itemsize * (s + 1) // s + fn.size * 4,
            transcendentals=num_tokens * fn.shape[0],
        ),
        interpret=target.interpret,
        name="mhc_read",
    )(streams, fn, base[:, None], scale)
    mixing = mixing[:, :num_tokens]
    return x[:num_tokens], mixing[:s], mixing[s:].reshape(s, s, num_tokens)


def mhc_write(streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array, *, target: Target) -> jax.Array:
    """As `api.mhc_write`."""
    s, num_tokens, width = streams.shape
    streams, tile = _tiled(streams)
    pad = streams.shape[1] - num_tokens
    out = jnp.pad(out, ((0, pad), (0, 0)))
    mixing = jnp.pad(jnp.concatenate([post, comb.reshape(s * s, num_tokens)]), ((0, 0), (0, pad)))
    mixed = pl.pallas_call(
        functools.partial(_write, num_streams=s),
        grid=(streams.shape[1] // tile,),
        in_specs=[
            pl.BlockSpec((s, tile, width), lambda i: (0, i, 0)),
            pl.BlockSpec((tile, width), lambda i: (i, 0)),
            pl.BlockSpec((mixing.shape[0], tile), lambda i: (0, i)),
        ],
        out_specs=pl.BlockSpec((s, tile, width), lambda i: (0, i, 0)),
        out_shape=jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        compiler_params=None if target.interpret else pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=pl.CostEstimate(
            flops=2 * (s + 1) * streams.size,
            bytes_accessed=streams.size * streams.dtype.itemsize * (2 * s + 1) // s,
            transcendentals=0,
        ),
        interpret=target.interpret,
        name="mhc_write",
    )(streams, out, mixing)
    return mixed[:, :num_tokens]


def _tiled(streams: jax.Array) -> tuple[jax.Array, int]:
    """The streams with whole tiles of tokens, and a tile's height."""
    num_tokens = streams.shape[1]
    tile = min(_TOKENS, -(-num_tokens // 8) * 8)
    return jnp.pad(streams, ((0, 0), (0, -num_tokens % tile), (0, 0))), tile


def _read(streams, fn, base, scale, x, mixing, *, num_streams, width, config):
    s = num_streams
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    tokens = streams.shape[1]
    z, squares = jnp.zeros((fn.shape[0], tokens), jnp.float32), jnp.zeros((8, tokens), jnp.float32)
    for k in range(s):
        part = streams[k].astype(jnp.float32)
        z += dot(fn[:, k * width : (k + 1) * width], part)
        squares += dot(jnp.ones((8, width), jnp.float32), part * part)  # sums along the lanes of the result
    z *= lax.rsqrt(squares[:1] / (s * width) + config.norm_eps)
    z_base = base[...]
    pre = jax.nn.sigmoid(scale[0] * z[:s] + z_base[:s]) + config.eps
    mixing[:s] = 2 * jax.nn.sigmoid(scale[1] * z[s : 2 * s] + z_base[s : 2 * s])
    logits = scale[2] * z[2 * s :] + z_base[2 * s :]
    rows = tuple(_softmax(logits[s * i : s * (i + 1)]) + config.eps for i in range(s))  # each [S, tokens]

    def columns(rows):
        total = sum(rows[1:], rows[0]) + config.eps
        return tuple(row / total for row in rows)

    def one_round(_, rows):
        return columns(tuple(row / (jnp.sum(row, axis=0, keepdims=True) + config.eps) for row in rows))

    rows = lax.fori_loop(0, config.sinkhorn_iters - 1, one_round, columns(rows))
    for i, row in enumerate(rows):
        mixing[s * (i + 1) : s * (i + 2)] = row
    by_token = pre.T  # [tokens, S]
    total = by_token[:, :1] * streams[0].astype(jnp.float32)
    for k in range(1, s):
        total += by_token[:, k : k + 1] * streams[k].astype(jnp.float32)
    x[...] = total.astype(x.dtype)


def _softmax(x):
    x = jnp.exp(x - jnp.max(x, axis=0, keepdims=True))
    return x / jnp.sum(x, axis=0, keepdims=True)


def _write(streams, out, mixing, mixed, *, num_streams):
    s = num_streams
    by_token = mixing[...].T  # [tokens, S + S * S]
    added = out[...].astype(jnp.float32)
    for k in range(s):
        total = by_token[:, k : k + 1] * added
        for j in range(s):
            column = s + s * j + k
            total += by_token[:, column : column + 1] * streams[j].astype(jnp.float32)
        mixed[k] = total.astype(mixed.dtype)
