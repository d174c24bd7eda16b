"""Sliding-window attention at decode on a GPU: the window's pages are streamed."""

from __future__ import annotations

import jax

from pallas_kernels import gpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target


def swa_attention(
    q: jax.Array,
    blocks: QueryBlocks,
    window_pages: Pages,
    sink: jax.Array,
    *,
    window: int,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    """As `gpu_attention.attend`, for what it supports."""
    segments = [gpu_attention.window_keys(blocks, window_pages, window)]
    return gpu_attention.attend(q, segments, sink, scale=scale, target=target, partial=partial)
