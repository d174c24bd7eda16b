"""Window plus every visible compressed entry, under one softmax."""

from pallas_kernels.hca_attention.api import hca_attention

__all__ = ["hca_attention"]
