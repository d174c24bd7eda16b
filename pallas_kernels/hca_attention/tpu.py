"""HCA attention on a TPU: the streaming kernel over the window's pages and every visible entry's."""

from __future__ import annotations

import jax

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target
from pallas_kernels.tpu_attention import attend


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
    """As `tpu_attention.attend`."""
    common = {"window": window, "ratio": ratio, "scale": scale, "target": target, "partial": partial}
    return attend(q, blocks, window_pages, entry_pages, None, sink, **common)
