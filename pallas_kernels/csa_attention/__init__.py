"""Window plus the indexer's choice of compressed entries, under one softmax."""

from pallas_kernels.csa_attention.api import csa_attention

__all__ = ["csa_attention"]
