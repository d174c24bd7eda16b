"""Sizes of the TPU kernel, not measured."""

from __future__ import annotations

CHUNK = 1024  # entries that arrive together: one tile of a decode row's scores; 256 KiB of bfloat16 keys


def digit_bits(block: int) -> int:
    """Bits of the k-th largest score that one pass over the scores settles.

    A pass of d bits makes 2 ** d - 1 comparisons a score, and ends in a sum across lanes that takes about as long as
    a hundred comparisons of a register: one query has few registers of scores, a block has many.
    """
    return 4 if block == 1 else 2
