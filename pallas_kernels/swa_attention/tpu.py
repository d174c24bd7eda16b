"""Sliding-window attention on a TPU: the streaming kernel over the window's pages alone."""

from __future__ import annotations

import jax

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target
from pallas_kernels.tpu_attention import attend


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
    """As `tpu_attention.attend`."""
    common = {"window": window, "ratio": 1, "scale": scale, "target": target, "partial": partial}
    return attend(q, blocks, window_pages, None, None, sink, **common)
