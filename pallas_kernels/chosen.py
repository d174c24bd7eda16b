"""Masks of chosen entries as bits: what the TPU kernels of the indexer and of CSA attention pass from one to the other.

A bit a query keeps a block's mask small, and one row of 128 words is the part of it that 128 keys need.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.entry_format import LANES

MAX_QUERIES = 32  # of a block: bits of a word


@dataclass(frozen=True)
class MaskShape:
    """Of the mask of chosen entries [num_blocks, block, entries]."""

    num_blocks: int
    block: int
    entries: int

    def abstract(self, tiled: bool) -> jax.ShapeDtypeStruct:
        """As a target has it: bits where a TPU's kernels read it."""
        if tiled:
            return jax.ShapeDtypeStruct((self.num_blocks, -(-self.entries // LANES), LANES), jnp.int32)
        return jax.ShapeDtypeStruct((self.num_blocks, self.block, self.entries), jnp.bool_)


def pack(mask: jax.Array) -> jax.Array:
    """mask [NB, B, entries] bool -> [NB, ceil(entries / 128), 128] int32, query b in bit b. ValueError: B > 32."""
    num_blocks, block, entries = mask.shape
    if block > MAX_QUERIES:
        raise ValueError(
            f"a block of {block} queries with chosen entries is more than the {MAX_QUERIES} bits of a word"
        )
    bits = jnp.sum(mask.astype(jnp.int32) << jnp.arange(block, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    return jnp.pad(bits, ((0, 0), (0, -entries % LANES))).reshape(num_blocks, -1, LANES)


def unpack(bits: jax.Array, block: int, entries: int) -> jax.Array:
    """The mask [NB, block, entries] bool again."""
    words = bits.reshape(len(bits), 1, -1)[..., :entries]
    return (words >> jnp.arange(block, dtype=jnp.int32)[:, None]) & 1 == 1
