"""The CPU form: a loop over the tiles in use, each a small dense matmul; its trip count is the work there is."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.dequantize import dequantize


def grouped_matmul(
    x: jax.Array, weights: jax.Array, group: jax.Array, num_tiles: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """x [P, K], weights [G, K, N], or their codes and scale, group [P / tile_rows] -> [P, N] float32."""

    def matrix(take: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return take(weights) if scale is None else dequantize(take(weights), take(scale), x.dtype)

    tile_rows = x.shape[0] // group.shape[0]
    if tile_rows == 1:
        # One token: a loop would copy each matrix out of the stack before a matrix-vector product; a gather is 3 times
        # faster (0.55 against 1.7 ms for 4 of 16 experts of 512 x 512).
        used = jnp.arange(x.shape[0]) < num_tiles
        out = jnp.einsum("pk,pkn->pn", x, matrix(lambda a: a[group]), preferred_element_type=jnp.float32)
        return jnp.where(used[:, None], out, 0)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(x, i * tile_rows, tile_rows)
        chosen = matrix(lambda a: jax.lax.dynamic_index_in_dim(a, group[i], keepdims=False))
        tile = jnp.dot(rows, chosen, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, tile, i * tile_rows, axis=0)

    return jax.lax.fori_loop(0, num_tiles, body, jnp.zeros((x.shape[0], weights.shape[-1]), jnp.float32))
