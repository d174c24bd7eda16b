"""The meaning, in jnp; also the CPU path: index keys are streamed, and scored only if there is a choice to make."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import collectives
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.groups import by_groups
from pallas_kernels.hca_attention.reference import stream, visible_entries
from pallas_kernels.pool import Pool


def indexer_topk(
    q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages, *, ratio: int, k: int
) -> jax.Array:
    """As `api.indexer_topk`, of blocks of queries."""

    def scores(blocks: QueryBlocks, q: jax.Array, weights: jax.Array, pages: Pages) -> jax.Array:
        return _scores(q, weights, blocks, pages, visible_entries(blocks, q.shape[1], ratio))

    return choose(scores, blocks, (q, weights), pages, ratio=ratio, k=k)


def choose(
    scores_of: Callable[..., jax.Array],
    blocks: QueryBlocks,
    arrays: tuple[jax.Array, ...],
    pages: Pages,
    *,
    ratio: int,
    k: int,
) -> jax.Array:
    """The choice by scores_of(blocks, *arrays, pages) [NB, B, entries], for arrays [NB, B, ...] of queries."""
    block = arrays[0].shape[1]
    is_block = block > 1  # of a row's queries, for which the choice is a mask
    if pages.max_entries * pages.count <= k:
        return _everything(pages, visible_entries(blocks, block, ratio), is_block)
    if pages.count > 1:
        return best_of_all(scores_of(blocks, *arrays, pages), pages, k)

    def of_group(blocks: QueryBlocks, *arrays: jax.Array) -> jax.Array:
        visible = visible_entries(blocks, arrays[0].shape[1], ratio)

        def best(pool: Pool) -> jax.Array:
            scores = scores_of(blocks, *arrays, pages._replace(pool=pool))
            if is_block:
                return top_k_mask(scores, k)
            top, place = jax.lax.top_k(scores[:, 0], k)
            return jnp.where(top > -jnp.inf, place, pages.max_entries)

        everything = jnp.max(visible) <= k
        return jax.lax.cond(everything, lambda _: _everything(pages, visible, is_block, k), best, pages.pool)

    return by_groups(of_group, blocks, *arrays)


def _everything(pages: Pages, visible: jax.Array, is_block: bool, k: int | None = None) -> jax.Array:
    """What to return where no choice is to be made: a mask, or at most k indices."""
    place = jnp.arange(pages.max_entries)
    mask = pages.entry(place) < visible[..., None]
    if is_block:
        return mask
    return jnp.where(mask[:, 0, :k], place[:k], pages.max_entries)


def best_of_all(scores: jax.Array, pages: Pages, k: int) -> jax.Array:
    """scores [NB, B, entries here], -inf where not visible -> which of them are chosen among those of all devices.

    Each device offers its best; all then know the k best of all, and each keeps those that are its own. A device's
    chosen entries are the first of its own order (score, then index), so ties are settled as on one device.
    """
    top, place = jax.lax.top_k(scores, min(k, pages.max_entries))  # ties: lowest place, so lowest entry
    entry = pages.entry(place)
    offered = jnp.stack([jax.lax.bitcast_convert_type(top, jnp.int32), entry], axis=-1)
    offered = collectives.all_gather(offered, pages.axis, axis=2)  # [NB, B, candidates, 2]
    all_top, all_entry = jax.lax.bitcast_convert_type(offered[..., 0], jnp.float32), offered[..., 1]
    worst = jax.lax.top_k(all_top, k)[0][..., -1:]
    spare = k - jnp.sum(all_top > worst, axis=-1, keepdims=True)  # how many of those equal to the worst are chosen
    tied = jnp.sort(jnp.where(all_top == worst, all_entry, jnp.iinfo(jnp.int32).max), axis=-1)
    last = jnp.take_along_axis(tied, spare - 1, axis=-1)
    if scores.shape[1] > 1:
        mask = (scores > worst) | ((scores == worst) & (pages.entry(jnp.arange(pages.max_entries)) <= last))
        return mask & (scores > -jnp.inf)
    chosen = ((top > worst) | ((top == worst) & (entry <= last))) & (top > -jnp.inf)
    return jnp.where(chosen, place, pages.max_entries)[:, 0]


def _scores(q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages, visible: jax.Array) -> jax.Array:
    """[NB, B, max_entries] float32 of the entries here, -inf where not visible."""
    most = pages.num_here(jnp.max(visible, axis=1))

    def body(first_entry, begin, first_page, count, scores: jax.Array) -> jax.Array:
        place = first_entry + jnp.arange(count * pages.entries_per_page)
        keys = pages.read_pages(blocks.row, first_page, count, q.dtype)
        keys = jnp.where((place < most[:, None])[..., None], keys, 0)
        part = jax.vmap(index_scores)(q, weights, keys)
        part = jnp.where(pages.entry(place) < visible[..., None], part, -jnp.inf)
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
    """Where the k largest of the last axis are; ties go to the lowest index, -inf is never chosen. -> bool."""
    # The barriers keep XLA's CPU at its selection of k: what is then cut out of the result makes it sort whole rows.
    # One for both results would become the user of their tuple, at which XLA's compiler for several devices aborts.
    top, place = map(jax.lax.optimization_barrier, jax.lax.top_k(scores, k))
    worst = top[..., -1:]
    last = jnp.max(jnp.where(top == worst, place, -1), axis=-1, keepdims=True)  # of those equal to it that are chosen
    tied = (scores == worst) & (jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1) <= last)
    return ((scores > worst) | tied) & (scores > -jnp.inf)
