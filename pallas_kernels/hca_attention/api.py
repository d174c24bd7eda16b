"""Public function of the operation."""

from __future__ import annotations

import jax

from pallas_kernels import gpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.hca_attention import gpu, reference, tpu
from pallas_kernels.swa_attention.api import check_shapes, finish
from pallas_kernels.target import CPU, Target


def hca_attention(
    q: jax.Array,  # [NB, B, N, H]
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,  # entry w at table place w // entries_per_page
    sink: jax.Array,  # [N], or this device's part of it where several share the pages
    *,
    window: int,
    ratio: int,
    scale: float,
    target: Target = CPU,
) -> jax.Array:  # [NB, B, sinks, H] float32
    """A query at position p attends to its window and to entries w < (p + 1) // ratio. Raises ValueError on shapes.

    On a GPU with kernels it is one for what `gpu_attention.supports`, decode steps above all; else the jnp path.
    """
    check_shapes("hca_attention", q, blocks, window_pages, sink)
    check_shapes("hca_attention", q, blocks, entry_pages, sink)
    common = {"window": window, "ratio": ratio, "scale": scale}
    if target.has_tpu_kernels:
        partial = entry_pages.count > 1
        run = tpu.hca_attention(q, blocks, window_pages, entry_pages, sink, **common, target=target, partial=partial)
    elif gpu_attention.supports(q, [window_pages, entry_pages], target):
        partial = entry_pages.count > 1
        run = gpu.hca_attention(q, blocks, window_pages, entry_pages, sink, **common, target=target, partial=partial)
    else:
        run = reference.hca_attention(q, blocks, window_pages, entry_pages, **common)
    return finish(run, q, sink, entry_pages)
