"""Stores entries in a pool, in place."""

from pallas_kernels.cache_write.api import NOWHERE, cache_write

__all__ = ["NOWHERE", "cache_write"]
