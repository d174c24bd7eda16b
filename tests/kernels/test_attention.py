"""Window, HCA and CSA attention over pages against plain attention over each row's own keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.pool import Pool
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import CPU, HOST, Target

TPU, NATIVE = Target("tpu", "v6e", interpret=True), Target("cpu", HOST)
TARGETS = pytest.mark.parametrize("target", [CPU, TPU, NATIVE], ids=["jnp", "tpu", "native"])
HEADS, WIDTH, WINDOW, RATIO, EPP = 4, 16, 8, 4, 4
CONTEXT = [600, 1, 9, 8, 17]  # tokens of each row, the last block of which asks


def _plain(q, keys, sink):
    logits = keys @ q.T * WIDTH**-0.5  # [K, N]
    top = np.maximum(logits.max(axis=0), sink)
    weights = np.exp(logits - top)
    return (weights.T @ keys) / (weights.sum(axis=0) + np.exp(sink - top))[:, None]


class _World:
    """Rows with window pages in a ring and entry pages, everything unwritten NaN, in layer 1 of 2."""

    def __init__(self, block: int):
        rng = np.random.default_rng(3)
        self.kv = [rng.normal(size=(n, WIDTH)).astype(np.float32) for n in CONTEXT]
        self.entries = [rng.normal(size=(n // RATIO, WIDTH)).astype(np.float32) for n in CONTEXT]
        ring = -(-(WINDOW - 1 + block) // EPP) + 1
        self.window = self._pages(rng, self.kv, ring, lambda n: range(max(0, n - block - WINDOW + 1), n))
        self.entry = self._pages(rng, self.entries, -(-max(CONTEXT) // (RATIO * EPP)), range)
        self.length = [min(block, n) for n in CONTEXT] + [0]
        self.position = [n - have for n, have in zip(CONTEXT, self.length, strict=False)] + [0]
        self.blocks = QueryBlocks(
            jnp.array([*range(len(CONTEXT)), 0]), jnp.array(self.position), jnp.array(self.length)
        )
        self.q = jnp.asarray(rng.normal(size=(len(CONTEXT) + 1, block, HEADS, WIDTH)), jnp.float32)
        self.sink = rng.normal(size=HEADS).astype(np.float32)

    def _pages(self, rng, rows, width, live) -> Pages:
        num_pages = 400
        free = list(rng.permutation(num_pages))
        table = np.full((len(rows), width), num_pages, np.int32)
        pool = np.full((2 * num_pages, EPP, WIDTH), np.nan, np.float32)
        for r, row in enumerate(rows):
            pages = {}
            for i in live(len(row)):
                page = pages.setdefault(i // EPP, None)
                if page is None:
                    page = pages[i // EPP] = free.pop()
                table[r, i // EPP % width] = page
                pool[num_pages + page, i % EPP] = row[i]
        return Pages(Pool.plain(jnp.asarray(pool)), jnp.asarray(table), 1, num_pages)

    def check(self, got, entries_of) -> None:
        got = np.asarray(got)
        for r in range(len(CONTEXT)):
            for j in range(self.length[r]):
                p = self.position[r] + j
                keys = self.kv[r][max(0, p - WINDOW + 1) : p + 1]
                keys = np.concatenate([keys, self.entries[r][entries_of(r, j, (p + 1) // RATIO)]])
                np.testing.assert_allclose(got[r, j], _plain(np.asarray(self.q[r, j]), keys, self.sink), atol=1e-5)
        assert np.isfinite(got[:-1]).all()


@TARGETS
@pytest.mark.parametrize("block", [1, 4, 12])
def test_window_is_exactly_the_last_positions(block, target):
    world = _World(block)
    got = swa_attention(
        world.q, world.blocks, world.window, world.sink, window=WINDOW, scale=WIDTH**-0.5, target=target
    )
    world.check(got, lambda r, j, visible: [])


@TARGETS
@pytest.mark.parametrize("block", [1, 4, 12])
def test_hca_sees_every_visible_entry(block, target):
    world = _World(block)
    got = hca_attention(
        world.q,
        world.blocks,
        world.window,
        world.entry,
        world.sink,
        window=WINDOW,
        ratio=RATIO,
        scale=WIDTH**-0.5,
        target=target,
    )
    world.check(got, lambda r, j, visible: list(range(visible)))


@TARGETS
@pytest.mark.parametrize("block", [1, 4])
def test_csa_sees_its_chosen_entries(block, target):
    world = _World(block)
    limit = world.entry.max_entries
    chosen = {}
    for r in range(len(CONTEXT)):
        for j in range(world.length[r]):
            visible = (world.position[r] + j + 1) // RATIO
            chosen[r, j] = sorted(np.random.default_rng(10 * r + j).permutation(visible)[:3].tolist())
    if block == 1:
        index = np.full((len(CONTEXT) + 1, 3), limit, np.int32)
        for (r, _), entries in chosen.items():
            index[r, : len(entries)] = entries
    else:
        index = np.zeros((len(CONTEXT) + 1, block, limit), bool)
        for (r, j), entries in chosen.items():
            index[r, j, entries] = True
    got = csa_attention(
        world.q,
        world.blocks,
        world.window,
        world.entry,
        jnp.asarray(index),
        world.sink,
        window=WINDOW,
        ratio=RATIO,
        scale=WIDTH**-0.5,
        target=target,
    )
    world.check(got, lambda r, j, visible: chosen[r, j])


@pytest.mark.parametrize("target", [CPU, NATIVE], ids=["jnp", "native"])
def test_a_large_sink_does_not_overflow(target):
    """The release takes the maximum over keys only, which overflows where a sink exceeds them by more than 88."""
    world = _World(1)
    world.sink = np.array([200.0, -200.0, 0.0, 90.0], np.float32)
    got = swa_attention(
        world.q, world.blocks, world.window, world.sink, window=WINDOW, scale=WIDTH**-0.5, target=target
    )
    assert np.isfinite(np.asarray(got)[:-1]).all()
    assert np.abs(np.asarray(got)[:-1, 0, 0]).max() < 1e-30
    world.check(got, lambda r, j, visible: [])


def test_shapes_are_checked():
    world = _World(1)
    with pytest.raises(ValueError, match="swa_attention: sink"):
        swa_attention(world.q, world.blocks, world.window, world.sink[:1], window=WINDOW, scale=1.0)
    with pytest.raises(ValueError, match="csa_attention: chosen"):
        csa_attention(
            world.q,
            world.blocks,
            world.window,
            world.entry,
            jnp.zeros((6, 1, 3)),
            world.sink,
            window=WINDOW,
            ratio=RATIO,
            scale=1.0,
        )
