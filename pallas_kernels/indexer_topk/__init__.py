"""Scores the index keys of each query's row and selects the best visible entries."""

from pallas_kernels.indexer_topk.api import index_scores, indexer_topk, top_k_mask

__all__ = ["index_scores", "indexer_topk", "top_k_mask"]
