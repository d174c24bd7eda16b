"""The meaning, in jnp; also the CPU path."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.groups import by_groups
from pallas_kernels.online_softmax import Running


def attend_window(q: jax.Array, blocks: QueryBlocks, pages: Pages, *, window: int, scale: float) -> Running:
    """The window's part of the softmax of q [NB, B, N, H], as [NB, B * N, ...].

    The keys a block needs are read once for all its queries.
    """
    block = q.shape[1]
    query = blocks.position[:, None] + jnp.arange(block)  # [NB, B] positions
    key = _keys_here(blocks, pages, window, block)
    written = (key >= 0) & (key < (blocks.position + blocks.length)[:, None])
    keys = pages.read_rows(blocks.row, jnp.maximum(key, 0) // pages.count, written, q.dtype)
    offset = query[:, :, None] - key[:, None, :]
    mask = (offset >= 0) & (offset < window) & written[:, None, :]
    queries = flat_queries(q)
    return online_softmax.update(online_softmax.start(queries), queries, keys, per_head(mask, q), scale)


def swa_attention(q: jax.Array, blocks: QueryBlocks, pages: Pages, *, window: int, scale: float) -> Running:
    """[NB, B, N, ...]"""

    def attend(blocks: QueryBlocks, q: jax.Array) -> Running:
        return of_queries(attend_window(q, blocks, pages, window=window, scale=scale), q)

    return by_groups(attend, blocks, q)


def _keys_here(blocks: QueryBlocks, pages: Pages, window: int, block: int) -> jax.Array:
    """[NB, K] positions of the keys in this device's pages that a block's queries may see; some before position 0."""
    first = blocks.position[:, None] + (1 - window)
    if pages.count == 1:
        return first + jnp.arange(window - 1 + block)
    first += jnp.mod(pages.index - first, pages.count)
    return first + pages.count * jnp.arange(-(-(window - 1 + block) // pages.count))


def flat_queries(q: jax.Array) -> jax.Array:
    """[NB, B, N, H] -> [NB, B * N, H]: one matmul a block."""
    return q.reshape(q.shape[0], -1, q.shape[3])


def of_queries(run: Running, q: jax.Array) -> Running:
    """[NB, B * N, ...] -> [NB, B, N, ...] of q [NB, B, N, H]."""
    return Running(*(x.reshape(*q.shape[:3], -1) for x in run))


def per_head(mask: jax.Array, q: jax.Array) -> jax.Array:
    """mask [NB, B, K] -> [NB, B * N, K]."""
    return jnp.repeat(mask, q.shape[2], axis=1)


def finish(run: Running, q: jax.Array, sink: jax.Array, pages: Pages) -> jax.Array:
    """The softmax over all devices' keys: [NB, B, sinks, H]. Where q has the heads of all the devices that share the
    pages and `sink` those of this one, the result is of these."""
    blocks, block, heads, width = q.shape
    run = online_softmax.merge(run, pages.axis, scatter=heads != sink.shape[0])
    run = Running(*(x.reshape(blocks, block * sink.shape[0], -1) for x in run))
    out = online_softmax.finish(run, jnp.tile(sink, block))
    return out.reshape(blocks, block, sink.shape[0], width)
