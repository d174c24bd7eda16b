"""The TPU attention kernel: pages of every format equal the jnp path, no races, its cost estimate counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernel_cost import kernels
from pallas_kernels import attention_cases, chosen, tpu_attention, tpu_pages
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.hca_attention import reference as hca_reference
from pallas_kernels.online_softmax import Running
from pallas_kernels.pool import Pool, PoolShape
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import CPU, Target
from tests.kernels import tpu_races

INTERPRET = Target("tpu", "v6e", interpret=True)
HEADS, ROPE, WINDOW, RATIO, NUM_PAGES = 8, 64, 40, 2, 30
SUMS = {"atol": 1e-5}  # float32 sums in another order


class _World:
    """Rows with window pages in a ring and entry pages in layer 1 of 2, every byte that is not theirs 0xFF: NaN in any
    float, and a scale that makes infinity of anything. Row 0 has entries in two steps of 128; rows and blocks are more
    than the eight that are in scalar memory at a time; the last block is unused.
    """

    contexts = (300, 1, 37, 8, 64, 2, 33, 90, 41)

    def __init__(self, window: str, entries: str, block: int, width: int = 512):
        self.rng = np.random.default_rng(5)
        self.width, rows = width, len(self.contexts)
        self.length = [min(block, n) for n in self.contexts]
        position = [n - length for n, length in zip(self.contexts, self.length, strict=True)]
        self.blocks = QueryBlocks(*(jnp.array([*x, 0]) for x in (range(rows), position, self.length)))
        self.q = jnp.asarray(self.rng.normal(size=(rows + 1, block, HEADS, width)), jnp.float32)
        self.sink = jnp.asarray(self.rng.normal(size=HEADS), jnp.float32)
        self.window = self._pages(
            window, 32, 3, [range(max(0, p - WINDOW + 1), n) for p, n in zip(position, self.contexts, strict=True)]
        )
        self.entry = self._pages(entries, 32, 5, [range(n // RATIO) for n in self.contexts])
        limit = 5 * 32
        mask = np.zeros((rows + 1, block, limit), bool)
        for r in range(rows):
            for j in range(self.length[r]):
                visible = (position[r] + j + 1) // RATIO
                mask[r, j, self.rng.permutation(visible)[:140]] = True
        self.chosen = jnp.asarray(mask)
        if block == 1:
            place = np.where(mask[:, 0], np.arange(limit), limit)
            self.chosen = jnp.asarray(np.sort(place)[:, :140], jnp.int32)

    def _pages(self, name: str, epp: int, width: int, live: list[range]) -> tuple[Pages, Pages]:
        """The same entries in pages as a TPU has them and as other devices have."""
        form, free = EntryFormat(name, self.width, ROPE), list(self.rng.permutation(NUM_PAGES))
        table, slots = np.full((len(live), width), NUM_PAGES, np.int32), []
        for r, indices in enumerate(live):
            pages: dict[int, int] = {}
            for i in indices:
                if i // epp not in pages:
                    pages[i // epp] = table[r, i // epp % width] = free.pop()
                slots.append((NUM_PAGES + pages[i // epp]) * epp + i % epp)
        slots += [NOWHERE] * (1024 - len(slots))
        entries = jnp.asarray(self.rng.normal(size=(len(slots), self.width)), jnp.float32)

        def pages_of(tiled: bool) -> Pages:
            pool = jax.tree.map(_poisoned, PoolShape(form, 2 * NUM_PAGES, epp, gathered=True).abstract(tiled))
            return Pages(_write(pool, jnp.array(slots), entries), jnp.asarray(table), 1, NUM_PAGES)

        return pages_of(True), pages_of(False)

    def run(self, kind: str, target: Target, bits: bool = False) -> jax.Array:
        window, entry = (pages[target is CPU] for pages in (self.window, self.entry))
        common = {"window": WINDOW, "scale": self.width**-0.5, "target": target}
        if kind == "swa":
            return swa_attention(self.q, self.blocks, window, self.sink, **common)
        common["ratio"] = RATIO
        if kind == "hca":
            return hca_attention(self.q, self.blocks, window, entry, self.sink, **common)
        choice = chosen.pack(self.chosen) if bits else self.chosen
        return csa_attention(self.q, self.blocks, window, entry, choice, self.sink, **common)

    def check(self, got: jax.Array | np.ndarray, kind: str) -> None:
        got, want = np.asarray(got), np.asarray(jax.jit(lambda: self.run(kind, CPU))())
        assert np.isfinite(got).all()
        for r, length in enumerate(self.length):
            np.testing.assert_allclose(got[r, :length], want[r, :length], **SUMS)
        assert np.abs(got[-1]).max() == 0  # no key but the sink


@jax.jit
def _write(pool: Pool, slots: jax.Array, entries: jax.Array) -> Pool:
    return pool.write(slots, entries)


def _poisoned(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.asarray(np.full(leaf.size * leaf.dtype.itemsize, 0xFF, np.uint8).view(leaf.dtype).reshape(leaf.shape))


@pytest.mark.parametrize(
    ("kind", "block", "window", "entries"),
    [
        ("swa", 5, "int8", ""),
        ("hca", 1, "fp8", "int8"),
        ("csa", 1, "float32", "fp8"),
        ("csa", 1, "int8", "float32"),
        ("csa", 5, "fp8", "int8"),
    ],
)
def test_pages_of_every_format(kind, block, window, entries, monkeypatch):
    monkeypatch.setattr(tpu_pages, "_UNROLL", 1)  # half of the interpreter's compiling
    world = _World(window, entries or "float32", block)
    world.check(world.run(kind, INTERPRET, bits=block > 1), kind)


def test_masks_as_bits():
    mask = np.random.default_rng(0).random((2, 5, 300)) < 0.5
    bits = chosen.pack(jnp.asarray(mask))
    assert bits.shape == (2, 3, 128)
    assert (chosen.unpack(bits, 5, 300) == mask).all()
    with pytest.raises(ValueError, match="a block of 33 queries"):
        chosen.pack(jnp.zeros((1, 33, 4), bool))


class _Shared(Pages):
    """As on the second of two devices that share the pages."""

    count = 2  # type: ignore[assignment]
    index = 1  # type: ignore[assignment]


@pytest.mark.slow
def test_a_device_s_part_of_shared_pages(monkeypatch):
    """Positions and entries are twice as many, so that those here are where one device would have all."""
    monkeypatch.setattr(tpu_pages, "_UNROLL", 1)
    world = _World("int8", "fp8", 1)
    blocks = world.blocks._replace(position=2 * world.blocks.position)
    sizes = {"window": 2 * WINDOW - 1, "ratio": 2 * RATIO, "scale": 0.1}
    (window, plain_window), (entry, plain_entry) = (
        [_Shared(*x) for x in pages] for pages in (world.window, world.entry)
    )
    got = tpu_attention.attend(
        world.q, blocks, window, entry, None, world.sink, **sizes, target=INTERPRET, partial=True
    )
    want = hca_reference.hca_attention(world.q, blocks, plain_window, plain_entry, **sizes)
    assert isinstance(got, Running)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a[:-1], b[:-1], rtol=1e-5, **SUMS)
    assert np.abs(got.total[-1]).max() == 0 and np.abs(got.denominator[-1]).max() == 0


def _tiny(monkeypatch, block: int) -> _World:
    """Of one row whose window takes two steps, and its entries two or three."""
    monkeypatch.setattr(_World, "contexts", (150 if block == 1 else 300,))
    if block == 1:
        monkeypatch.setattr(tpu_pages, "STEP", 32)  # a mask's are of 128
    return _World("fp8", "int8", block)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "block"), [("swa", 1), ("hca", 1), ("csa", 1), ("csa", 5)])
def test_no_races(kind, block, monkeypatch):
    world = _tiny(monkeypatch, block)
    world.check(tpu_races.run(lambda target: world.run(kind, target)), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swa", "csa"])
def test_a_missing_wait_is_found(kind, monkeypatch):
    world = _tiny(monkeypatch, 1)
    monkeypatch.setattr(tpu_pages, "_wait", lambda dma: None)
    with pytest.raises(Exception, match="race"):
        tpu_races.run(lambda target: world.run(kind, target), copies="eager")


def test_the_estimated_bytes_by_hand():
    """At most 1.1 times what must be read and written. A latent has 1,024 bytes, or 592 in fp8 (600 with its page's
    padding); a gathered one in fp8 two copies of 512."""
    target = Target("tpu", "v6e")

    def check(name: str, must: int) -> None:
        (case,) = (case for case in attention_cases.cases(name[:3], name.split()[-1]) if case.name == name)
        program = jax.make_jaxpr(lambda arrays: case.call(target, **arrays))(case.inputs(target))
        (kernel,) = kernels(program)
        assert must <= kernel.bytes_moved <= 1.1 * must, name

    # 64 decode rows of 64 heads: queries in bfloat16, outputs in float32, the last 128 positions
    heads = 64 * 512 * (2 + 4)
    check("swa_attention flash decode bfloat16", 64 * (heads + 128 * 1024))
    check("swa_attention flash decode fp8", 64 * (heads + 128 * 592))
    check("swa_attention pro decode bfloat16", 64 * (2 * heads + 128 * 1024))
    # 32,768 tokens: 256 compressed entries, or 512 chosen ones and their places
    check("hca_attention flash decode bfloat16", 64 * (heads + (128 + 256) * 1024))
    check("hca_attention flash/8 decode fp8", 64 * (heads // 8 + (128 + 256) * 592))
    check("csa_attention flash decode bfloat16", 64 * (heads + (128 + 512) * 1024 + 512 * 4))
    check("csa_attention flash decode fp8", 64 * (heads + 128 * 592 + 512 * (1024 + 4)))
    # 192 blocks of 16 queries: 15 positions more, 8,192 entries and a bit each for 32 queries
    check("swa_attention flash prefill bfloat16", 192 * (16 * heads + 143 * 1024))
    check("csa_attention flash prefill bfloat16", 192 * (16 * heads + (143 + 8192) * 1024 + 8192 * 4))
    check("csa_attention flash prefill fp8", 192 * (16 * heads + (143 + 8192) * 592 + 8192 * 4))
