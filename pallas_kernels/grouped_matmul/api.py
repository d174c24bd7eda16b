"""The tile plan of a grouped matmul, and the matmul itself."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import gpu, tpu, tuning, xla
from pallas_kernels.target import CPU, Target


class Tiles(NamedTuple):
    """Rows laid out group after group, each group padded to whole tiles of `tile_rows` rows.

    P = number of padded rows, a static upper bound; only the first `num_tiles` tiles hold anything.
    """

    source: jax.Array  # [P] which assignment a padded row holds; out of range where none
    destination: jax.Array  # [A] padded row of each assignment; out of range for padding
    group: jax.Array  # [P / tile_rows] group of each tile
    num_tiles: jax.Array  # [] int32

    @property
    def tile_rows(self) -> int:
        return self.source.shape[0] // self.group.shape[0]


def group_tiles(groups: jax.Array, num_groups: int, num_devices: int = 1, target: Target = CPU) -> Tiles:
    """Plans the tiles for groups [T, k]: assignment a = t * k + j of row t belongs to group groups[t, j].

    One whose group is `num_groups` (padding, or another device's) gets no place; of `num_devices` devices with groups
    of their own each expects as many. Sorting is by counting, since XLA's CPU sort is slow.
    """
    rows, k = groups.shape
    num_assignments = rows * k
    tile_rows = tuning.tile_rows(target, num_assignments, num_groups * num_devices)
    flat = groups.reshape(-1)
    rank, count = ranks(flat, num_groups)
    tiles_of_group = (count + tile_rows - 1) // tile_rows  # [G]
    end = jnp.cumsum(tiles_of_group)
    max_tiles = min(num_assignments, num_assignments // tile_rows + num_groups)
    padded = max_tiles * tile_rows
    destination = (end - tiles_of_group)[jnp.minimum(flat, num_groups - 1)] * tile_rows + rank
    destination = jnp.where(flat < num_groups, destination, padded).astype(jnp.int32)
    source = jnp.full((padded,), num_assignments, jnp.int32)
    source = source.at[destination].set(jnp.arange(num_assignments, dtype=jnp.int32), mode="drop")
    group = jnp.sum(end[None, :] <= jnp.arange(max_tiles)[:, None], axis=1).astype(jnp.int32)
    return Tiles(source, destination, jnp.minimum(group, num_groups - 1), end[-1].astype(jnp.int32))


def ranks(groups: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """groups [A] -> how many before each have the same group, [A] (0 where it is `num_groups`), and the sizes [G]."""
    member = groups[:, None] == jnp.arange(num_groups)  # [A, G]
    return jnp.sum(jnp.where(member, jnp.cumsum(member, axis=0) - 1, 0), axis=1), jnp.sum(member, axis=0)


def grouped_matmul(
    x: jax.Array, weights: jax.Array, tiles: Tiles, scale: jax.Array | None = None, target: Target = CPU
) -> jax.Array:
    """x [P, K] in the order of `tiles`, weights [G, K, N] -> [P, N] float32; rows of unused tiles are zero.

    With a `scale`, `weights` are FP8 or FP4 codes (see `pallas_kernels.dequantize`), widened a group at a time.
    Raises ValueError for shapes that do not fit.
    """
    if x.ndim != 2 or x.shape[0] != tiles.source.shape[0]:
        raise ValueError(f"grouped_matmul: x {x.shape} must have the plan's {tiles.source.shape[0]} rows")
    packed = 2 if weights.dtype == jnp.int8 else 1
    if weights.ndim != 3 or weights.shape[1] * packed != x.shape[1]:
        raise ValueError(f"grouped_matmul: weights {weights.shape} do not fit x {x.shape}")
    if target.has_tpu_kernels:
        return tpu.grouped_matmul(x, weights, tiles.group, tiles.num_tiles, scale, target=target)
    if gpu.supports(x, weights, tiles.tile_rows, target):
        return gpu.grouped_matmul(x, weights, tiles.group, tiles.num_tiles, scale, target=target)
    return xla.grouped_matmul(x, weights, tiles.group, tiles.num_tiles, scale)
