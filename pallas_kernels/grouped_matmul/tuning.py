"""Sizes of the grouped matmul's tiles."""

from __future__ import annotations

from pallas_kernels.target import Target

MAX_SINGLE_ROWS = 8  # on a CPU more rows than this share tiles; released models route a token to 6 experts


def tile_rows(target: Target, num_assignments: int, num_groups: int) -> int:
    """Rows a tile: few at decode, where weights are what is read; more at prefill, for the matmul's efficiency.

    CPU, measured on two Zen 4 cores: 1 row a tile is best for one token's few assignments, 8 rows up to about 16
    assignments a group, then 32. TPU, not measured: 16 rows are one bfloat16 tile, 128 the height of the matmul unit.
    GPU, not measured: 16 rows are the least an `mma` has; 128 are what the registers of a block hold the sums of.
    """
    many = num_assignments > 16 * num_groups
    if target.has_tpu_kernels or target.has_gpu_kernels:
        return 128 if many else 16
    if num_assignments <= MAX_SINGLE_ROWS:
        return 1
    return 32 if many else 8
