"""CSA attention at decode on a GPU: the window's pages are streamed, then the chosen entries gathered one by one."""

from __future__ import annotations

import jax

from pallas_kernels import gpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target


def csa_attention(
    q: jax.Array,
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,
    chosen: jax.Array,
    sink: jax.Array,
    *,
    window: int,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    """As `gpu_attention.attend`, for what it supports."""
    segments = [
        gpu_attention.window_keys(blocks, window_pages, window),
        gpu_attention.chosen_keys(blocks, entry_pages, chosen),
    ]
    return gpu_attention.attend(q, segments, sink, scale=scale, target=target, partial=partial)
