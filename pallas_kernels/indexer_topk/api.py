"""Public functions of the operation."""

from __future__ import annotations

import jax

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.indexer_topk import gpu, gpu_scores, native, reference, tpu
from pallas_kernels.indexer_topk.reference import index_scores, top_k_mask
from pallas_kernels.pool import in_key_basis
from pallas_kernels.target import CPU, Target

__all__ = ["index_scores", "indexer_topk", "top_k_mask"]


def indexer_topk(
    q: jax.Array,  # [NB, B, HI, dI]
    weights: jax.Array,  # [NB, B, HI] float32, signed, scales folded in
    blocks: QueryBlocks,
    key_pages: Pages,
    *,
    ratio: int,
    k: int,
    target: Target = CPU,
) -> jax.Array:
    """The k best-scoring entries among the visible ones (all, if fewer); ties go to the lowest index.

    Returns a mask [NB, B, max_entries] bool for B > 1, or from a TPU's kernel its bits (`chosen.pack`), and for B = 1
    indices [NB, k'] int32 (k' = min(k, max_entries); max_entries where there is none, after all others), since a decode
    row gathers its entries and a block shares them.
    Where several devices share the pages the choice is among the entries of all, and each gets a mask or indices of its
    own; the scores [NB, B, entries here] are then in memory, on a TPU from the kernel, as they are where there is none.
    Raises ValueError for shapes that do not fit.
    """
    if q.ndim != 4 or weights.shape != q.shape[:3]:
        raise ValueError(f"indexer_topk: weights {weights.shape} must be {q.shape[:3]}")
    form = key_pages.pool.format
    if form.width != q.shape[3]:
        raise ValueError(f"indexer_topk: keys of {form.width} channels do not fit q {q.shape}")
    q = in_key_basis(q, form)
    if key_pages.max_entries * key_pages.count > k:
        if target.has_tpu_kernels:
            return tpu.indexer_topk(q, weights, blocks, key_pages, ratio=ratio, k=k, target=target)
        if gpu_scores.supports(q, key_pages, target):
            return gpu.indexer_topk(q, weights, blocks, key_pages, ratio=ratio, k=k, target=target)
    scores_of = native.scores if native.supports(q, [key_pages], target) else None
    return reference.indexer_topk(q, weights, blocks, key_pages, ratio=ratio, k=k, scores_of=scores_of)
