"""Sliding-window attention over the paged window pool."""

from pallas_kernels.swa_attention.api import swa_attention

__all__ = ["swa_attention"]
