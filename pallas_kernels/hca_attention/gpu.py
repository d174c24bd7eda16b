"""HCA attention at decode on a GPU: the window's pages and then every visible entry's are streamed."""

from __future__ import annotations

import jax

from pallas_kernels import gpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target


def hca_attention(
    q: jax.Array,
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,
    sink: jax.Array,
    *,
    window: int,
    ratio: int,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    """As `gpu_attention.attend`, for what it supports."""
    segments = [
        gpu_attention.window_keys(blocks, window_pages, window),
        gpu_attention.visible_keys(blocks, entry_pages, ratio),
    ]
    return gpu_attention.attend(q, segments, sink, scale=scale, target=target, partial=partial)
