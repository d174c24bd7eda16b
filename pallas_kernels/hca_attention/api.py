"""Public function of the operation."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import gpu_attention, native_attention, tpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.hca_attention import reference
from pallas_kernels.swa_attention.api import check_shapes, finish, of_packed
from pallas_kernels.target import CPU, Target


def hca_attention(
    q: jax.Array,  # [NB, B, N, H], or [T, N, H] where blocks have a packing
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,  # entry w at table place w // entries_per_page
    sink: jax.Array,  # [N], or this device's part of it where several share the pages
    *,
    window: int,
    ratio: int,
    scale: float,
    target: Target = CPU,
) -> jax.Array:  # q's shape, of N those that have sinks; float32, or what is rounded from it to q's type
    """A query at position p attends to its window and to entries w < (p + 1) // ratio. Raises ValueError on shapes.

    On a GPU with kernels it is one for what `gpu_attention.supports`, on a CPU for what `native_attention.supports`,
    else the jnp path.
    """
    check_shapes("hca_attention", q, blocks, window_pages, sink)
    check_shapes("hca_attention", q, blocks, entry_pages, sink)
    pages, sizes = (window_pages, entry_pages), {"window": window, "ratio": ratio}
    block = blocks.tokens(q).shape[1]
    if native_attention.supports(q, blocks, pages, target):
        near = native_attention.window_entries(blocks, block, window_pages, window)
        far = native_attention.visible_entries(blocks, block, entry_pages, ratio)
        return native_attention.attend(q, blocks, near, far, sink, scale)
    if blocks.packing is not None:
        same: Any = {**sizes, "scale": scale, "target": target}
        return of_packed(lambda q, blocks: hca_attention(q, blocks, *pages, sink, **same), q, blocks)
    kernel: Any = {"scale": scale, "target": target, "partial": entry_pages.count > 1}
    if tpu_attention.supports(list(pages), target):
        run = tpu_attention.attend(q, blocks, *pages, None, sink, **sizes, **kernel)
    elif gpu_attention.supports(q, list(pages), target):
        keys = [
            gpu_attention.window_keys(blocks, window_pages, window, q.shape[1]),
            gpu_attention.visible_keys(blocks, entry_pages, ratio, q.shape[1]),
        ]
        run = gpu_attention.attend(q, keys, sink, **kernel)
    else:
        run = reference.hca_attention(q, blocks, *pages, **sizes, scale=scale)
    return finish(run, q, sink, entry_pages)
