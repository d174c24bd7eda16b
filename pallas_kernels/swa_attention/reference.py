"""The meaning, in jnp; also the CPU path."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running


def swa_attention(
    q: jax.Array, blocks: QueryBlocks, pages: Pages, sink: jax.Array, *, window: int, scale: float
) -> jax.Array:
    return finish(attend_window(q, blocks, pages, window=window, scale=scale), q, sink)


def attend_window(q: jax.Array, blocks: QueryBlocks, pages: Pages, *, window: int, scale: float) -> Running:
    """The window's part of the softmax of q [NB, B, N, H]; the keys a block needs are read once for all its queries."""
    block = q.shape[1]
    query = blocks.position[:, None] + jnp.arange(block)  # [NB, B] positions
    key = blocks.position[:, None] + jnp.arange(1 - window, block)  # [NB, window - 1 + B] positions
    written = (key >= 0) & (key < (blocks.position + blocks.length)[:, None])
    keys = pages.read_rows(blocks.row, jnp.maximum(key, 0), written)
    offset = query[:, :, None] - key[:, None, :]
    mask = (offset >= 0) & (offset < window) & written[:, None, :]
    queries = flat_queries(q)
    return online_softmax.update(online_softmax.start(queries), queries, keys, per_head(mask, q), scale)


def flat_queries(q: jax.Array) -> jax.Array:
    """[NB, B, N, H] -> [NB, B * N, H]: one matmul a block."""
    return q.reshape(q.shape[0], -1, q.shape[3])


def per_head(mask: jax.Array, q: jax.Array) -> jax.Array:
    """mask [NB, B, K] -> [NB, B * N, K]."""
    return jnp.repeat(mask, q.shape[2], axis=1)


def finish(run: Running, q: jax.Array, sink: jax.Array) -> jax.Array:
    return online_softmax.finish(run, jnp.tile(sink, q.shape[1])).reshape(q.shape)
