"""Manifold-constrained hyper-connections: reading a block's input from the residual streams, writing its output back."""

from pallas_kernels.mhc_mix.api import MixConfig, mhc_read, mhc_write, sinkhorn

__all__ = ["MixConfig", "mhc_read", "mhc_write", "sinkhorn"]
