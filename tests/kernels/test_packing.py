"""Packed queries give what they give in blocks, on a CPU with native code and without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import Packing, Pages, QueryBlocks
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.pool import Pool
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import CPU, HOST, Target

TOKENS, HEADS, WIDTH, EPP, NUM_PAGES = 20, 4, 32, 16, 3
TARGETS = pytest.mark.parametrize("target", [CPU, Target("cpu", HOST)], ids=["jnp", "native"])


class Step:
    """14 tokens of four rows in blocks of `block`, of which one is not in use, and 6 tokens of padding."""

    def __init__(self, block: int):
        rng = np.random.default_rng(block)
        new = [5, 1, 4, 4] if block > 1 else [1] * TOKENS
        found = []
        for r, n in enumerate(new):
            start = int(rng.integers(0, 30))
            for begin in range(0, n, block):
                found.append((r, start + begin, min(block, n - begin), sum(new[:r]) + begin))
        if block > 1:
            found.append((0, 0, 0, TOKENS))
        row, position, length, first = np.array(found, np.int32).T
        within = np.arange(block)
        token = np.where(within < length[:, None], first[:, None] + within, TOKENS)
        order = rng.permutation(len(found)) if block > 1 else np.arange(len(found))
        token = token[order]
        place = np.zeros(TOKENS, np.int32)
        place[token[token < TOKENS]] = np.flatnonzero(token.reshape(-1) < TOKENS)
        row, position, length = (jnp.asarray(x[order]) for x in (row, position, length))
        self.used = min(sum(new), TOKENS)
        self.blocks = QueryBlocks(row, position, length, Packing(jnp.asarray(token, jnp.int32), jnp.asarray(place)))
        num = len(new) * NUM_PAGES
        table = jnp.asarray(rng.permutation(num).reshape(len(new), NUM_PAGES), jnp.int32)
        pool = Pool.plain(jnp.asarray(rng.normal(size=(num, EPP, WIDTH)), jnp.float32))
        self.pages = Pages(pool, table, 0, num)
        self.q = jnp.asarray(rng.normal(size=(TOKENS, HEADS, WIDTH)), jnp.float32)
        self.weights = jnp.asarray(rng.normal(size=(TOKENS, HEADS)), jnp.float32)


@TARGETS
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("kind", ["swa", "hca", "csa"])
def test_attention(kind, block, target):
    step = Step(block)
    rest = jnp.zeros(HEADS), {"window": 6, "scale": 0.2, "target": target}

    def attend(q: jax.Array, blocks: QueryBlocks) -> jax.Array:
        if kind == "swa":
            return swa_attention(q, blocks, step.pages, rest[0], **rest[1])
        if kind == "hca":
            return hca_attention(q, blocks, step.pages, step.pages, rest[0], ratio=3, **rest[1])
        unpacked = blocks.unpacked()
        index_q, weights = (step.blocks.packing.blocked(x) for x in (step.q, step.weights))
        chosen = indexer_topk(index_q, weights, unpacked, step.pages, ratio=1, k=5)
        return csa_attention(q, blocks, step.pages, step.pages, chosen, rest[0], ratio=1, **rest[1])

    got = np.asarray(attend(step.q, step.blocks))
    packing = step.blocks.packing
    want = packing.packed(attend(packing.blocked(step.q), step.blocks.unpacked()))
    np.testing.assert_allclose(got[: step.used], want[: step.used], rtol=1e-6, atol=1e-6)
    assert got.shape == step.q.shape and np.isfinite(got).all()


@TARGETS
@pytest.mark.parametrize("block", [1, 4])
def test_indexer(block, target):
    step = Step(block)
    packing = step.blocks.packing
    got = indexer_topk(step.q, step.weights, step.blocks, step.pages, ratio=1, k=5, target=target)
    blocked = packing.blocked(step.q), packing.blocked(step.weights), step.blocks.unpacked()
    want = indexer_topk(*blocked, step.pages, ratio=1, k=5, target=target)
    used = np.arange(block) < np.asarray(step.blocks.length)[:, None]
    got, want = (np.asarray(x).reshape(*used.shape, -1)[used] for x in (got, want))
    np.testing.assert_array_equal(got, want)


def test_queries_must_come_as_the_blocks_say():
    step = Step(4)
    with pytest.raises(ValueError, match="packing"):
        swa_attention(step.blocks.packing.blocked(step.q), step.blocks, step.pages, jnp.zeros(4), window=6, scale=1.0)
    with pytest.raises(ValueError, match="NB"):
        swa_attention(step.q, step.blocks.unpacked(), step.pages, jnp.zeros(4), window=6, scale=1.0)
