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
    q: jax.Array,  # [NB, B, HI, dI], or [T, HI, dI] where blocks have a packing
    weights: jax.Array,  # [NB, B, HI] or [T, HI], float32, signed, scales folded in
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
    if q.ndim != (4 if blocks.packing is None else 3) or weights.shape != q.shape[:-1]:
        raise ValueError(f"indexer_topk: q {q.shape} must be packed as blocks are and weights {weights.shape} as it is")
    form = key_pages.pool.format
    if form.width != q.shape[-1]:
        raise ValueError(f"indexer_topk: keys of {form.width} channels do not fit q {q.shape}")
    q = in_key_basis(q, form)
    if native.supports(q, blocks, [key_pages], target):
        token = blocks.tokens(q)
        flat, flat_weights = q.reshape(-1, *q.shape[-2:]), weights.reshape(-1, weights.shape[-1])

        def scores(blocks: QueryBlocks, token: jax.Array, pages: Pages) -> jax.Array:
            return native.scores(flat, flat_weights, token, blocks, pages, ratio=ratio)

        return reference.choose(scores, blocks.unpacked(), (token,), key_pages, ratio=ratio, k=k)
    if blocks.packing is not None:
        q, weights, blocks = blocks.packing.blocked(q), blocks.packing.blocked(weights), blocks.unpacked()
    if key_pages.max_entries * key_pages.count > k:
        if target.has_tpu_kernels:
            return tpu.indexer_topk(q, weights, blocks, key_pages, ratio=ratio, k=k, target=target)
        if gpu_scores.supports(q, key_pages, target):
            return gpu.indexer_topk(q, weights, blocks, key_pages, ratio=ratio, k=k, target=target)
    return reference.indexer_topk(q, weights, blocks, key_pages, ratio=ratio, k=k)
