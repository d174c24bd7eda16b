"""Selection of the best entries: exact sets, ties to the lowest index, streamed over pages of NaN-filled pools."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernel_cost import kernels
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.indexer_topk import cases, index_scores, indexer_topk, top_k_mask
from pallas_kernels.pool import Pool
from pallas_kernels.target import CPU, Target
from tests.kernels import tpu_races

V6E = Target("tpu", "v6e")
TPU = Target("tpu", "v6e", interpret=True)


def test_top_k_mask_breaks_ties_by_index_and_never_takes_minus_infinity():
    inf = np.inf
    scores = np.array([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0], [-1, -inf, -5, -inf, -inf], [-inf] * 5], np.float32)
    assert np.asarray(top_k_mask(jnp.asarray(scores), 2)).tolist() == [
        [False, True, True, False, False],
        [True, True, False, False, False],
        [True, False, True, False, False],
        [False] * 5,
    ]


@pytest.mark.parametrize("k", [1, 7, 63, 64])
def test_top_k_mask_equals_a_stable_sort(k):
    rng = np.random.default_rng(k)
    scores = rng.integers(-4, 5, (50, 64)).astype(np.float32)  # many ties
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    want = np.zeros(scores.shape, bool)
    np.put_along_axis(want, order, True, axis=1)
    assert (np.asarray(top_k_mask(jnp.asarray(scores), k)) == want).all()


def test_negative_zero_ties_with_zero():
    """All heads' products negative gives sums of signed zeros; the lowest index must win."""
    scores = index_scores(jnp.ones((1, 2, 4)), jnp.array([[-1.0, -2.0]]), -jnp.ones((3, 4)))
    assert np.asarray(scores).tolist() == [[0, 0, 0]]
    assert not np.signbit(np.asarray(scores)).any()


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("k", [3, 5, 400])
def test_selection_over_pages_equals_dense(block, k):
    rng = np.random.default_rng(1)
    ratio, heads, width, epp = 4, 3, 8, 8
    context = [517, 9, 130]  # tokens of three rows; 129 entries make the stream take two parts
    pages_of = [-(-(n // ratio) // epp) or 1 for n in context]
    table = np.full((3, max(pages_of)), 99, np.int32)
    pool = np.full((2 * 99, epp, width), np.nan, np.float32)  # two layers; this is the second
    keys, free = [], list(rng.permutation(99))
    for r, n in enumerate(context):
        keys.append(rng.normal(size=(n // ratio, width)).astype(np.float32))
        for i in range(pages_of[r]):
            table[r, i] = free.pop()
            part = keys[r][i * epp : (i + 1) * epp]
            pool[99 + table[r, i], : len(part)] = part
    position = np.array([n - block for n in context], np.int32)
    blocks = QueryBlocks(
        jnp.array([0, 1, 2, 0]), jnp.array([*position, 0], jnp.int32), jnp.array([block, block, block, 0])
    )
    q = rng.normal(size=(4, block, heads, width)).astype(np.float32)
    weights = rng.normal(size=(4, block, heads)).astype(np.float32)
    pages = Pages(Pool.plain(jnp.asarray(pool)), jnp.asarray(table), 1, 99)
    got = np.asarray(indexer_topk(jnp.asarray(q), jnp.asarray(weights), blocks, pages, ratio=ratio, k=k))
    for r in range(3):
        for j in range(block):
            visible = (position[r] + j + 1) // ratio
            scores = np.einsum("hc,h->c", np.maximum(q[r, j] @ keys[r].T, 0), weights[r, j])[:visible]
            want = set(np.argsort(-scores, kind="stable")[:k].tolist())
            if block == 1:
                chosen = set(got[r].tolist()) - {pages.max_entries}
            else:
                chosen = set(np.flatnonzero(got[r, j]).tolist())
            assert chosen == want, (r, j)
    unused = set(got[3].ravel().tolist())
    assert unused == {pages.max_entries} if block == 1 else unused == {False}


class _World:
    """Rows whose last block asks; keys, queries and weights are small integers, so that many scores are equal.

    Table places of the same shapes whatever the rows hold, everything unwritten NaN, in layer 1 of 2; the last block
    is unused, row 0's is one query short.
    """

    places, epp, heads, width = 375, 8, 2, 8

    def __init__(self, block: int, contexts: list[int], seed: int, key_dtype=jnp.float32):
        rng = np.random.default_rng(seed)
        rows = len(contexts)
        num_pages = self.places * rows
        table = np.full((rows, self.places), num_pages, np.int32)
        pool = np.full((2 * num_pages, self.epp, self.width), np.nan, np.float32)
        free = list(rng.permutation(num_pages))
        for r, n in enumerate(contexts):
            for e in range(n):  # a token an entry
                if e % self.epp == 0:
                    table[r, e // self.epp] = free.pop()
                pool[num_pages + table[r, e // self.epp], e % self.epp] = rng.integers(-2, 3, self.width)
        length = np.array([block - (r == 0 and block > 1) for r in range(rows)] + [0])
        self.blocks = QueryBlocks(
            jnp.array([*range(rows), 0]), jnp.asarray(np.array([*contexts, 0]) - length), jnp.asarray(length)
        )
        self.q = jnp.asarray(rng.integers(-2, 3, (rows + 1, block, self.heads, self.width)), jnp.float32)
        self.weights = jnp.asarray(rng.integers(-2, 3, (rows + 1, block, self.heads)), jnp.float32)
        self.pages = Pages(Pool.plain(jnp.asarray(pool, key_dtype)), jnp.asarray(table), 1, num_pages)

    def choose(self, k: int, target: Target) -> np.ndarray:
        return np.asarray(_choose(self.q, self.weights, self.blocks, *self.pages[:2], self.pages.num_pages, k, target))


@functools.partial(jax.jit, static_argnames=("num_pages", "k", "target"))
def _choose(q, weights, blocks, pool, table, num_pages, k, target):
    pages = Pages(pool, table, 1, num_pages)
    return indexer_topk(q, weights, blocks, pages, ratio=1, k=k, target=target)


# More than a chunk of entries, as many as k, few, one; the first scored block after one that is not, the last of all.
CONTEXTS = [[2500, 130, 5, 1030], [7, 1024, 1025, 4], [3000, 3000, 129, 131]]


@pytest.mark.parametrize(("block", "k", "dtype"), [(1, 130, jnp.float32), (4, 129, jnp.bfloat16)])
def test_the_tpu_kernel_chooses_what_the_jnp_path_does(block, k, dtype):
    for seed, contexts in enumerate(CONTEXTS):
        world = _World(block, contexts, seed, dtype)
        want, got = world.choose(k, CPU), world.choose(k, TPU)
        if block == 1:
            want = np.sort(want, axis=1)  # the kernel's are ascending
        assert (got == want).all(), contexts


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4])
def test_the_tpu_kernel_has_no_races(block):
    world = _World(block, [1100, 9, 1300], 3)

    def choose(target: Target):
        return indexer_topk(world.q, world.weights, world.blocks, world.pages, ratio=1, k=20, target=target)

    want = np.asarray(choose(CPU))
    assert (tpu_races.run(choose) == (np.sort(want, axis=1) if block == 1 else want)).all()


def test_estimated_bytes_are_those_of_the_keys_and_little_more():
    """Flash, bfloat16, 8,192 entries a row: 64 decode rows, and 192 blocks of 16 queries."""
    flash = [case for case in cases.cases() if " flash " in case.name and "bfloat16" in case.name]
    programs = [jax.make_jaxpr(lambda arrays, case=case: case.call(V6E, **arrays))(case.inputs(V6E)) for case in flash]
    ((decode,), (prefill,)) = ([kernel.bytes_moved for kernel in kernels(program)] for program in programs)
    keys = 8192 * 128 * 2
    assert decode == 64 * (keys + 64 * 128 * 2 + 64 * 4 + 128 * 4 + 512 * 4)  # + q, weights, pages' ids, indices
    assert prefill == 192 * (keys + 16 * (64 * 128 * 2 + 64 * 4) + 128 * 4 + 8192 * 4)  # + a bit a query and entry
