"""Scores and selection of index keys on a GPU: a kernel each, with the scores of some blocks in memory between them.

Scores (`gpu_scores`) are int32 of the floats' order in the device's memory, at most _SCORE_BYTES of them (or one
block's): the blocks of a long prompt are taken some at a time. Only what the rows see is written and read, 4 bytes a
query and entry where a bfloat16 key has 256.

The second kernel selects for one query: its scores are brought into shared memory where they fit (up to _IN_SHARED
entries, a context of 196,608 tokens), else read again from the device's memory in every pass. It finds the k-th largest
by its bits, two a pass, by counting; then, if too many are equal to it, the entry before which those are taken.
A block none of whose queries sees more than k entries is not scored, and a query that does not is not searched.
What comes out is a bit an entry. A decode row's bits become indices outside the kernels, by a few XLA operations on
[NB, entries / 32] and [NB, k].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.indexer_topk.gpu_scores import layout_of, score
from pallas_kernels.target import Target

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

_WORD = 32
_TILE = 64 * _WORD  # entries of the second kernel at a time, 16 a thread
_IN_SHARED = 24 * _TILE  # of 227 KiB; 192 KiB of scores
_SCORE_BYTES = 32 << 20  # of scores at a time; less than the second-level cache
_LOWEST = -(1 << 31)  # of a score that counts for nothing: below every float's


def indexer_topk(
    q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages, *, ratio: int, k: int, target: Target
) -> jax.Array:
    """As `api.indexer_topk`, for more than k entries on one device."""
    num_blocks, block = q.shape[:2]
    offset = jnp.arange(block, dtype=jnp.int32)
    seen = jnp.where(offset < blocks.length[:, None], (blocks.position[:, None] + offset + 1) // ratio, 0)
    seen = seen.astype(jnp.int32)
    padded = -(-pages.max_entries // _TILE) * _TILE
    at_once = max(
        n
        for n in range(1, num_blocks + 1)
        if num_blocks % n == 0 and (n == 1 or n * block * padded * 4 <= _SCORE_BYTES)
    )

    def some(first: jax.Array) -> jax.Array:
        """Of blocks first .. first + at_once."""
        part = lax.dynamic_slice_in_dim(seen, first, at_once)
        scores = score(q, weights, blocks, pages, part, first, padded, k=k, target=target)
        return _select(scores, part, k=k, target=target)

    words = lax.map(some, jnp.arange(0, num_blocks, at_once)).reshape(num_blocks, block, -1)
    if block == 1:
        return _indices(words[:, 0], k, pages.max_entries)
    bits = (words[..., None] >> jnp.arange(_WORD, dtype=jnp.int32)) & 1 == 1
    return bits.reshape(num_blocks, block, -1)[..., : pages.max_entries]


def _select(scores: jax.Array, seen: jax.Array, *, k: int, target: Target) -> jax.Array:
    """scores [NB, B, entries], of which seen [NB, B] are visible -> bits of the k best, [NB, B, entries / 32] int32."""
    num_blocks, block, entries = scores.shape
    tiles = entries // _TILE
    here = plgpu.SMEM((tiles, _TILE // _WORD, _WORD), jnp.int32) if entries <= _IN_SHARED else None

    def indexer_select(seen, scores, words, here):
        block, query = lax.axis_index("block"), lax.axis_index("query")
        _select_one(seen[block, query], scores.at[block, query], words.at[block, query], here, k)

    return plgpu.kernel(
        indexer_select,
        out_type=jax.ShapeDtypeStruct((num_blocks, block, entries // _WORD), jnp.int32),
        scratch_types=[here],
        grid=(num_blocks, block),
        grid_names=("block", "query"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=pl.CostEstimate(
            flops=scores.size * 100,  # 17 passes of three comparisons and sums
            bytes_accessed=scores.size * 4 + scores.size // 8 + seen.size * 4,
            transcendentals=0,
        ),
        interpret=plgpu.InterpretGPUParams() if target.interpret else None,
    )(seen, scores.reshape(num_blocks, block, tiles, _TILE // _WORD, _WORD))


def _select_one(seen, scores, words, here, k: int) -> None:
    shape = (_TILE // _WORD, _WORD)
    flat = plgpu.Layout.WG_STRIDED(shape, vec_size=4)  # the one whose sum over everything there is
    num_tiles = lax.div(seen + (_TILE - 1), _TILE)

    def entries(tile, layout):
        row, lane = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in range(2))
        return tile * _TILE + row * _WORD + lane

    def score(tile, layout):
        """Of a tile; what the query does not see is the lowest."""
        if here is not None:
            return plgpu.load(here.at[tile], layout=layout, optimized=False)
        x = plgpu.load(scores.at[tile], layout=layout, optimized=False)
        return jnp.where(entries(tile, layout) < seen, x, _LOWEST)

    def count(tests) -> list[jax.Array]:
        """How many entries pass each test(score, entry)."""

        def body(tile, totals):
            x, entry = score(tile, flat), entries(tile, flat)
            return tuple(total + jnp.where(test(x, entry), 1, 0) for total, test in zip(totals, tests, strict=True))

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), flat)
        return [jnp.sum(total) for total in lax.fori_loop(0, num_tiles, body, (zero,) * len(tests))]

    def search(bits: int, start, test, holds):
        """The largest start + x, x of `bits` bits, for which `holds`(how many pass `test`); for less it does."""
        passes = -(-bits // 2)

        def body(n, value):
            shift = 2 * (passes - 1 - n)
            candidates = [value + (jnp.int32(c) << shift) for c in range(1, 4)]
            counts = count([lambda x, entry, c=c: test(x, entry, c) for c in candidates])
            steps = sum(jnp.where(holds(c), 1, 0) for c in counts)
            return value + (steps << shift)

        return lax.fori_loop(0, passes, body, start)

    def write(chosen) -> None:
        """The bits of the entries that are chosen(tile, layout)."""
        layout = layout_of("MMA_ACC")
        lane = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)

        def body(tile, carry):
            bits = jnp.where(chosen(tile, layout), jnp.int32(1) << lane, 0)
            plgpu.store(words.at[pl.ds(tile * shape[0], shape[0])], jnp.sum(bits, axis=1), optimized=False)
            return carry

        lax.fori_loop(0, num_tiles, body, 0)
        zero = plgpu.layout_cast(jnp.zeros((shape[0],), jnp.int32), layout.reduce(1))

        def clear(tile, carry):
            plgpu.store(words.at[pl.ds(tile * shape[0], shape[0])], zero, optimized=False)
            return carry

        lax.fori_loop(num_tiles, scores.shape[0], clear, 0)

    @pl.when(seen <= k)
    def _() -> None:
        write(lambda tile, layout: entries(tile, layout) < seen)

    @pl.when(seen > k)
    def _() -> None:
        if here is not None:

            def bring(tile, carry):
                x = plgpu.load(scores.at[tile], layout=flat, optimized=False)
                plgpu.store(here.at[tile], jnp.where(entries(tile, flat) < seen, x, _LOWEST), optimized=False)
                return carry

            lax.fori_loop(0, num_tiles, bring, 0)
            plgpu.commit_smem()
        threshold = search(32, jnp.int32(_LOWEST), lambda x, _, c: x >= c, lambda n: n >= k)
        above, equal = count([lambda x, _: x > threshold, lambda x, _: x == threshold])
        limit = lax.cond(
            equal > k - above,
            lambda: search(
                (scores.shape[0] * _TILE).bit_length(),
                jnp.int32(0),
                lambda x, entry, c: (x == threshold) & (entry < c),
                lambda n: n <= k - above,
            ),
            lambda: seen,
        )

        def best(tile, layout):
            x, entry = score(tile, layout), entries(tile, layout)
            return ((x > threshold) | ((x == threshold) & (entry < limit))) & (entry < seen)

        write(best)


def _indices(words: jax.Array, k: int, nothing: int) -> jax.Array:
    """words [NB, W] int32 -> the bits that are set in ascending order [NB, k], `nothing` past the last.

    The j-th is in the word up to which more than j are set, and in it at the bit up to which j + 1 are.
    """
    end = jnp.cumsum(lax.population_count(words), axis=1)  # [NB, W]
    place = jnp.arange(k, dtype=jnp.int32)
    word = jnp.sum(end[:, None] <= place[:, None], axis=2, dtype=jnp.int32)  # [NB, k]
    here = jnp.take_along_axis(words, word, axis=1, mode="clip")
    before = jnp.take_along_axis(end, word, axis=1, mode="clip") - lax.population_count(here)
    up_to = lax.population_count(here[..., None] & (2 << jnp.arange(_WORD)) - 1)  # [NB, k, 32]
    bit = jnp.sum(up_to <= (place - before)[..., None], axis=2, dtype=jnp.int32)
    return jnp.where(place < end[:, -1:], word * _WORD + bit, nothing)
