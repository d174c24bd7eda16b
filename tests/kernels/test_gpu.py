"""The GPU kernels of decode attention: equal to the jnp path in interpret mode, no races, compiled for real GPUs."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from benchmarks.kernel_compile import compile_apart
from dsjax import aot
from pallas_kernels import gpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.online_softmax import Running
from pallas_kernels.swa_attention import reference, swa_attention
from pallas_kernels.target import CPU, Target
from tests.kernels import gpu_cases

plgpu: Any = mosaic_gpu  # whose interpreter only JAX 0.12 has
GPU = Target("gpu", "sm_90a", interpret=True)
NEEDS_KERNELS = pytest.mark.skipif(not GPU.has_gpu_kernels, reason="GPU kernels need JAX 0.12")
WIDTH, WINDOW, RATIO, NUM_PAGES = 256, 40, 8, 20
EXACT = {"atol": 1e-5}  # float32 sums in another order
ROUNDED = {"atol": 2e-2}  # weights and keys in bfloat16; values are of order 1


class _World:
    """Rows with window pages in a ring and entry pages, everything unwritten NaN, in layer 1 of 2; the last is unused.

    Row 0's window begins inside a page, wraps around the ring and ends inside a page; row 1 has one key.
    """

    contexts = (150, 1)

    def __init__(self, heads: int, dtype: Any = jnp.float32, window_epp: int = 64, entry_epp: int = 16):
        self.rng = np.random.default_rng(3)
        self.dtype = dtype
        rows = len(self.contexts)
        self.blocks = QueryBlocks(
            jnp.array([*range(rows), 0]), jnp.array([*(n - 1 for n in self.contexts), 0]), jnp.array([1] * rows + [0])
        )
        self.q = jnp.asarray(self.rng.normal(size=(rows + 1, 1, heads, WIDTH)), dtype)
        self.sink = jnp.asarray(self.rng.normal(size=heads), jnp.float32)
        self.window = self._pages(window_epp, 2, lambda n: range(max(0, n - WINDOW), n))
        self.entry = self._pages(entry_epp, -(-32 // entry_epp), lambda n: range(n // RATIO))
        index = np.full((rows + 1, 20), self.entry.max_entries, np.int32)  # row 0 has 11, the others none
        index[0, :11] = self.rng.permutation(self.contexts[0] // RATIO)[:11]
        self.chosen = jnp.asarray(index)

    def _pages(self, epp: int, width: int, live) -> Pages:
        free = list(self.rng.permutation(NUM_PAGES))
        table = np.full((len(self.contexts), width), NUM_PAGES, np.int32)
        pool = np.full((2 * NUM_PAGES, epp, WIDTH), np.nan, np.float32)
        for r, n in enumerate(self.contexts):
            pages: dict[int, int] = {}
            for i in live(n):
                if i // epp not in pages:
                    pages[i // epp] = table[r, i // epp % width] = free.pop()
                pool[NUM_PAGES + pages[i // epp], i % epp] = self.rng.normal(size=WIDTH)
        return Pages(jnp.asarray(pool, self.dtype), jnp.asarray(table), 1, NUM_PAGES)

    def run(self, kind: str, target: Target) -> np.ndarray:
        common = {"window": WINDOW, "scale": WIDTH**-0.5, "target": target}
        if kind == "swa":
            out = swa_attention(self.q, self.blocks, self.window, self.sink, **common)
        elif kind == "hca":
            out = hca_attention(self.q, self.blocks, self.window, self.entry, self.sink, ratio=RATIO, **common)
        else:
            pages = (self.window, self.entry)
            out = csa_attention(self.q, self.blocks, *pages, self.chosen, self.sink, ratio=RATIO, **common)
        return np.asarray(out)


@NEEDS_KERNELS
@pytest.mark.parametrize("kind", ["swa", "hca", "csa"])
@pytest.mark.parametrize(("heads", "dtype"), [(8, jnp.float32), (64, jnp.float32), (8, jnp.bfloat16)])
def test_decode_equals_the_jnp_path(kind, heads, dtype):
    world = _World(heads, dtype)
    want, got = world.run(kind, CPU), world.run(kind, GPU)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:-1], want[:-1], **(EXACT if dtype == jnp.float32 else ROUNDED))
    assert np.abs(got[-1]).max() == 0  # no key but the sink


@NEEDS_KERNELS
@pytest.mark.parametrize(("window_epp", "entry_epp"), [(32, 8), (96, 32)])
def test_pages_smaller_and_larger_than_a_chunk(window_epp, entry_epp):
    world = _World(8, window_epp=window_epp, entry_epp=entry_epp)
    np.testing.assert_allclose(world.run("hca", GPU)[:-1], world.run("hca", CPU)[:-1], **EXACT)


@NEEDS_KERNELS
def test_more_heads_than_a_group_has():
    world = _World(72)
    np.testing.assert_allclose(world.run("swa", GPU)[:-1], world.run("swa", CPU)[:-1], **EXACT)


@NEEDS_KERNELS
def test_a_part_of_the_softmax_is_what_the_jnp_path_has():
    world = _World(8)
    keys = [gpu_attention.window_keys(world.blocks, world.window, WINDOW)]
    got = gpu_attention.attend(world.q, keys, world.sink, scale=0.1, target=GPU, partial=True)
    assert isinstance(got, Running)
    want = reference.attend_window(world.q, world.blocks, world.window, window=WINDOW, scale=0.1)
    np.testing.assert_allclose(got.maximum[:-1, 0], want.maximum[:-1], **EXACT)
    np.testing.assert_allclose(got.denominator[:-1, 0], want.denominator[:-1], **EXACT)
    np.testing.assert_allclose(got.total[:-1, 0], want.total[:-1], **EXACT)
    assert np.abs(got.total[-1]).max() == 0 and np.abs(got.denominator[-1]).max() == 0


def _detect_races():
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


@NEEDS_KERNELS
@pytest.mark.parametrize("kind", ["hca", "csa"])
def test_no_races_between_two_warpgroups(kind):
    world = _World(32)
    with _detect_races():
        got = world.run(kind, GPU)
    np.testing.assert_allclose(got[:-1], world.run(kind, CPU)[:-1], **EXACT)


@NEEDS_KERNELS
def test_a_missing_barrier_is_found(monkeypatch):
    monkeypatch.setattr(gpu_attention._Softmax, "meet", lambda self: None)
    try:
        with _detect_races(), pytest.raises(Exception, match="race"):
            _World(32).run("hca", GPU)
    finally:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        gpu_callbacks.reset_gpu_interpret_mode_state()


def test_the_path_is_chosen_from_shapes_and_target():
    def supports(target: Target, q_shape=(4, 1, 64, 512), dtype: Any = jnp.bfloat16, epp: int = 64) -> bool:
        pages = Pages(jnp.zeros((2, epp, 512), dtype), jnp.zeros((4, 1), jnp.int32), 0, 2)
        return gpu_attention.supports(jnp.zeros(q_shape, dtype), [pages], target)

    h100 = Target("gpu", "sm_90a")
    assert supports(h100) is h100.has_gpu_kernels is (jax.__version_info__ >= (0, 12))
    assert not supports(Target("gpu")) and not supports(CPU) and not supports(Target("tpu", "v6e"))
    assert not supports(h100, q_shape=(4, 2, 64, 512))
    assert not supports(h100, q_shape=(4, 1, 64, 576))
    assert not supports(h100, dtype=jnp.float32)
    assert not supports(h100, epp=4) and not supports(h100, epp=48)


def test_generations_by_compute_capability():
    def target(capability: str) -> Target:
        device: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA", compute_capability=capability)
        return Target.of(device)

    assert target("9.0") == Target("gpu", "sm_90a")
    assert target("10.0") == Target("gpu", "sm_100a")
    assert target("8.0") == Target("gpu") and not target("8.0").has_gpu_kernels


@NEEDS_KERNELS
@pytest.mark.slow
@pytest.mark.parametrize(("name", "architecture"), [("h100", "sm_90a"), ("b200", "sm_100a")])
def test_compiles_without_spills(name, architecture):
    missing = aot.missing_packages(aot.CHIPS[name])
    if missing and os.environ.get("CI") != "true":
        pytest.skip(f"needs the packages {', '.join(missing)}")
    results = {case.name: case for case in compile_apart(name, cases="tests.kernels.gpu_cases")}
    wgmma = results.pop(gpu_cases.WGMMA)
    assert not [case for case in results.values() if case.error]
    compiled = [case for case in results.values() if case.kernels]
    assert len(compiled) >= 9
    pool_bytes = 2 * 20 * 1000 * 16 * 512  # of the smallest pool, which is never copied
    for case in compiled:
        assert case.architectures == [architecture] and 100 < case.registers <= 255, case
        assert case.spill_bytes == 0 and case.temp_bytes < pool_bytes // 50, case
    # Blackwell has no wgmma: what accepts it for a B200 compiled for something else, or not at all.
    if architecture == "sm_90a":
        assert wgmma.error == "" and wgmma.architectures == [architecture]
    else:
        assert "wgmma" in wgmma.error and "sm_100a" in wgmma.error
