"""Selection of the best entries: exact sets, ties to the lowest index, streamed over pages of NaN-filled pools."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.indexer_topk import index_scores, indexer_topk, top_k_mask
from pallas_kernels.pool import Pool
from pallas_kernels.target import CPU, HOST, Target

NATIVE = Target("cpu", HOST)


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


def test_top_k_mask_on_several_devices():
    """XLA's compiler for several devices aborts at some uses of top_k that one device's takes."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = PartitionSpec("data")
    choose = jax.shard_map(lambda x: top_k_mask(x, 3), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(6, 20)), jnp.float32)
    np.testing.assert_array_equal(jax.jit(choose)(scores), top_k_mask(scores, 3))


def test_negative_zero_ties_with_zero():
    """All heads' products negative gives sums of signed zeros; the lowest index must win."""
    scores = index_scores(jnp.ones((1, 2, 4)), jnp.array([[-1.0, -2.0]]), -jnp.ones((3, 4)))
    assert np.asarray(scores).tolist() == [[0, 0, 0]]
    assert not np.signbit(np.asarray(scores)).any()


@pytest.mark.parametrize("target", [CPU, NATIVE], ids=["jnp", "native"])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("k", [3, 5, 400])
def test_selection_over_pages_equals_dense(block, k, target):
    rng = np.random.default_rng(1)
    ratio, heads, width, epp = 4, 4, 16, 8
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
    got = np.asarray(indexer_topk(jnp.asarray(q), jnp.asarray(weights), blocks, pages, ratio=ratio, k=k, target=target))
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
