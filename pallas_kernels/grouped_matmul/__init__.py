"""Rows sorted into groups, each group multiplied by its own matrix."""

from pallas_kernels.grouped_matmul.api import Tiles, group_tiles, grouped_matmul, ranks

__all__ = ["Tiles", "group_tiles", "grouped_matmul", "ranks"]
