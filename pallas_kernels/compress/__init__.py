"""Pools tokens into compressed entries, carrying partly filled windows in a small state."""

from pallas_kernels.compress.api import Finish, Pieces, compress
from pallas_kernels.compress.reference import finish

__all__ = ["Finish", "Pieces", "compress", "finish"]
