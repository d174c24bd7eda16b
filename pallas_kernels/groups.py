"""Query blocks a group at a time, for the jnp paths: a step pays for the blocks it uses, not for those it could.

A mixed step has room for a partly filled block of every row, and its decoding rows fill one query of theirs: padded to
whole blocks, 24 of them beside 488 tokens of a prompt cost as much attention as another 488.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import QueryBlocks

GROUP_BLOCKS = 16  # large enough for the matmuls, small enough that a group's keys are of like length

Out = TypeVar("Out")


def by_groups(body: Callable[..., Out], blocks: QueryBlocks, *arrays: jax.Array) -> Out:
    """body(blocks, *arrays) for arrays [NB, B, ...], whose results are [NB, B, ...]; zero for queries not in use.

    Groups up to the last block of several queries are taken whole; of the others only the first query is. So a step is
    cheapest with the blocks of several queries first and the unused ones last.
    """
    num_blocks, size = arrays[0].shape[:2]
    if size == 1 or num_blocks <= GROUP_BLOCKS:
        return body(blocks, *arrays)

    def past_last(at_least: int) -> jax.Array:
        return jnp.max(jnp.where(blocks.length >= at_least, jnp.arange(1, num_blocks + 1), 0))

    def loop(num_queries: int, first: jax.Array | int, last: jax.Array, out: Out) -> Out:
        """Blocks first .. last, in groups of which the last may begin earlier."""

        def group(i: jax.Array, out: Out) -> Out:
            at = jnp.minimum(first + i * GROUP_BLOCKS, num_blocks - GROUP_BLOCKS)

            def cut(x: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(x, at, GROUP_BLOCKS)

            # A group may begin among blocks of more queries, of which only the first is taken then.
            here = QueryBlocks(cut(blocks.row), cut(blocks.position), jnp.minimum(cut(blocks.length), num_queries))
            part = body(here, *(cut(x)[:, :num_queries] for x in arrays))
            return jax.tree.map(lambda x, p: jax.lax.dynamic_update_slice(x, p, (at, *[0] * (x.ndim - 1))), out, part)

        return jax.lax.fori_loop(0, -(-(last - first) // GROUP_BLOCKS), group, out)

    whole = jax.eval_shape(body, blocks, *arrays)
    # No number is above infinity, which XLA does not know: zeros that seem to depend on the layer's arrays. A constant
    # would be one for all layers, of which XLA's CPU makes every layer's copy at the step's start.
    zero = jnp.ravel(arrays[0])[0] > jnp.inf
    out = jax.tree.map(lambda x: jnp.broadcast_to(zero.astype(x.dtype), x.shape), whole)
    several = past_last(2)
    out = loop(size, 0, several, out)
    taken = -(-several // GROUP_BLOCKS) * GROUP_BLOCKS
    return loop(1, taken, jnp.maximum(past_last(1), taken), out)
