"""Pools tokens into compressed entries, carrying partly filled windows in a small state."""

from pallas_kernels.compress.api import Pieces, compress

__all__ = ["Pieces", "compress"]
