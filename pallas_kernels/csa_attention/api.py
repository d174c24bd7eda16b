"""Public function of the operation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import chosen as masks
from pallas_kernels import gpu_attention, native_attention, tpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.csa_attention import reference
from pallas_kernels.swa_attention.api import check_shapes, finish, of_packed
from pallas_kernels.target import CPU, Target


def csa_attention(
    q: jax.Array,  # [NB, B, N, H], or [T, N, H] where blocks have a packing
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,
    chosen: jax.Array,  # as indexer_topk returns it: mask [NB, B, entries] of those here, or its bits (chosen.pack);
    # for B = 1 indices [NB, k], those in use first
    sink: jax.Array,  # [N], or this device's part of it where several share the pages
    *,
    window: int,
    ratio: int,
    scale: float,
    target: Target = CPU,
) -> jax.Array:  # q's shape, of N those that have sinks; float32, or what is rounded from it to q's type
    """A query attends to its window and to its chosen entries. Raises ValueError for shapes that do not fit.

    On a GPU with kernels it is one for what `gpu_attention.supports`, on a CPU for what `native_attention.supports`,
    else the jnp path.
    """
    check_shapes("csa_attention", q, blocks, window_pages, sink)
    check_shapes("csa_attention", q, blocks, entry_pages, sink)
    block = blocks.tokens(q).shape[1]
    if chosen.ndim != (2 if block == 1 else 3):
        raise ValueError(f"csa_attention: chosen {chosen.shape} must be indices for B=1 and a mask for B={block}")
    pages, sizes = (window_pages, entry_pages), {"window": window, "ratio": ratio}
    if native_attention.supports(q, blocks, pages, target):
        near = native_attention.window_entries(blocks, block, window_pages, window)
        far = native_attention.chosen_entries(blocks, entry_pages, chosen)
        return native_attention.attend(q, blocks, near, far, sink, scale)
    if blocks.packing is not None:
        same: Any = {**sizes, "scale": scale, "target": target}
        return of_packed(lambda q, blocks: csa_attention(q, blocks, *pages, chosen, sink, **same), q, blocks)
    has_kernel = tpu_attention.supports([window_pages, entry_pages], target)
    if chosen.ndim == 3 and chosen.dtype != jnp.bool_ and not has_kernel:
        chosen = masks.unpack(chosen, block, entry_pages.max_entries)
    kernel: Any = {"scale": scale, "target": target, "partial": entry_pages.count > 1}
    if has_kernel:
        run = tpu_attention.attend(q, blocks, *pages, chosen, sink, **sizes, **kernel)
    elif gpu_attention.supports(q, list(pages), target):
        keys = [
            gpu_attention.window_keys(blocks, window_pages, window, q.shape[1]),
            gpu_attention.chosen_keys(blocks, entry_pages, ratio, chosen),
        ]
        run = gpu_attention.attend(q, keys, sink, **kernel)
    else:
        run = reference.csa_attention(q, blocks, *pages, chosen, **sizes, scale=scale)
    return finish(run, q, sink, entry_pages)
