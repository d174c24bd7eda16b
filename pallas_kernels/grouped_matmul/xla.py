"""The CPU form: a loop over the tiles in use, each a small dense matmul; its trip count is the work there is."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def grouped_matmul(x: jax.Array, weights: jax.Array, group: jax.Array, num_tiles: jax.Array) -> jax.Array:
    """x [P, K], weights [G, K, N], group [P / tile_rows] -> [P, N] float32."""
    tile_rows = x.shape[0] // group.shape[0]
    if tile_rows == 1:
        # One token: a loop would copy each matrix out of the stack before a matrix-vector product; a gather is 3 times
        # faster (0.55 against 1.7 ms for 4 of 16 experts of 512 x 512).
        used = jnp.arange(x.shape[0]) < num_tiles
        out = jnp.einsum("pk,pkn->pn", x, weights[group], preferred_element_type=jnp.float32)
        return jnp.where(used[:, None], out, 0)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(x, i * tile_rows, tile_rows)
        matrix = jax.lax.dynamic_index_in_dim(weights, group[i], keepdims=False)
        tile = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, tile, i * tile_rows, axis=0)

    return jax.lax.fori_loop(0, num_tiles, body, jnp.zeros((x.shape[0], weights.shape[-1]), jnp.float32))
