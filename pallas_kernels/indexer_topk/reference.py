"""The meaning, in jnp; also the CPU path: index keys are streamed, and scored only if there is a choice to make."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.hca_attention.reference import stream, visible_entries


def indexer_topk(
    q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages, *, ratio: int, k: int
) -> jax.Array:
    visible = visible_entries(q, blocks, ratio)  # [NB, B]
    num_entries = pages.max_entries
    decode = q.shape[1] == 1
    k = min(k, num_entries)

    def everything(_) -> jax.Array:
        if decode:
            index = jnp.broadcast_to(jnp.arange(k), (q.shape[0], k))
            return jnp.where(index < visible, index, num_entries)
        return jnp.arange(num_entries) < visible[..., None]

    def best(pool: jax.Array) -> jax.Array:
        scores = _scores(q, weights, blocks, pages._replace(pool=pool), visible)
        if decode:
            top, index = jax.lax.top_k(scores[:, 0], k)
            return jnp.where(top > -jnp.inf, index, num_entries)
        return top_k_mask(scores, k)

    if num_entries <= k:
        return everything(None)
    return jax.lax.cond(jnp.max(visible) <= k, everything, best, pages.pool)


def _scores(q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages, visible: jax.Array) -> jax.Array:
    """[NB, B, max_entries] float32, -inf where not visible."""
    most = jnp.max(visible, axis=1)

    def body(first_entry, begin, first_page, count, scores: jax.Array) -> jax.Array:
        entry = first_entry + jnp.arange(count * pages.entries_per_page)
        keys = pages.read_pages(blocks.row, first_page, count)
        keys = jnp.where((entry < most[:, None])[..., None], keys, 0)
        part = jax.vmap(index_scores)(q, weights, keys)
        part = jnp.where(entry < visible[..., None], part, -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores, part, first_entry, axis=2)

    start = jnp.full((*q.shape[:2], pages.max_entries), -jnp.inf, jnp.float32)
    return stream(pages, jnp.max(most), body, start)


def index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """q [T, HI, dI], weights [T, HI], keys [C, dI] -> sum over heads of weight * relu(q . key), [T, C] float32."""
    t, heads, width = q.shape
    products = jnp.einsum("md,cd->mc", q.reshape(t * heads, width), keys, preferred_element_type=jnp.float32)
    products = jax.nn.relu(products).reshape(t, heads, -1)
    scores = jnp.einsum("thc,th->tc", products, weights, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(scores == 0, 0.0, scores)  # -0 and 0 are a tie, which the lowest index wins


def top_k_mask(scores: jax.Array, k: int) -> jax.Array:
    """Where the k largest of the last axis are; ties go to the lowest index, -inf is never chosen. -> bool.

    Finds the k-th largest value by its bits, 32 passes of counting: several times faster than XLA's CPU top_k
    on wide rows.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # unsigned order = float order

    def body(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        enough = jnp.sum(ordered >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(enough, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, body, jnp.zeros((*scores.shape[:-1], 1), jnp.uint32))
    above, equal = ordered > threshold, ordered == threshold
    spare = k - jnp.sum(above, axis=-1, keepdims=True)
    return (above | (equal & (jnp.cumsum(equal, axis=-1) <= spare))) & (scores > -jnp.inf)
