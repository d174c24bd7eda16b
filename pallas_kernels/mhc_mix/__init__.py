"""Manifold-constrained hyper-connections: a block reads its input from the residual streams and writes its output."""

from pallas_kernels.mhc_mix.api import MixConfig, mhc_read, mhc_write, sinkhorn

__all__ = ["MixConfig", "mhc_read", "mhc_write", "sinkhorn"]
