"""The meaning of the grouped matmul: every row times its group's matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def grouped_matmul(x: jax.Array, weights: jax.Array, group: jax.Array, num_tiles: jax.Array) -> jax.Array:
    """x [P, K], weights [G, K, N], group [P / tile_rows] -> [P, N] float32."""
    tile_rows = x.shape[0] // group.shape[0]
    row_group = jnp.repeat(group, tile_rows)
    out = jnp.einsum("pk,pkn->pn", x.astype(jnp.float32), weights[row_group].astype(jnp.float32))
    used = jnp.arange(x.shape[0]) < num_tiles * tile_rows
    return jnp.where(used[:, None], out, 0)
