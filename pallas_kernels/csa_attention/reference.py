"""The meaning, in jnp; also the CPU path: decode rows gather their entries, blocks stream them under a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.groups import by_groups
from pallas_kernels.hca_attention.reference import attend_entries, visible_entries
from pallas_kernels.online_softmax import Running
from pallas_kernels.swa_attention.reference import attend_window, flat_queries, of_queries, per_head


def csa_attention(
    q: jax.Array,
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,
    chosen: jax.Array,
    *,
    window: int,
    ratio: int,
    scale: float,
) -> Running:
    """[NB, B, N, ...]"""

    def attend(blocks: QueryBlocks, q: jax.Array, chosen: jax.Array) -> Running:
        run = attend_window(q, blocks, window_pages, window=window, scale=scale)
        if chosen.ndim == 3:
            visible = visible_entries(blocks, q.shape[1], ratio)
            return of_queries(attend_entries(run, q, blocks, entry_pages, visible, chosen, scale), q)
        valid = chosen < entry_pages.max_entries
        keys = entry_pages.read_rows(blocks.row, jnp.where(valid, chosen, 0), valid, q.dtype)
        return of_queries(online_softmax.update(run, flat_queries(q), keys, per_head(valid[:, None], q), scale), q)

    return by_groups(attend, blocks, q, chosen)
