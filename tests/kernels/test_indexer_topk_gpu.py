"""The indexer's GPU kernels: the jnp path's choice exactly, no races, what each moves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from benchmarks.kernel_cost import kernels
from pallas_kernels.blocks import Pages
from pallas_kernels.indexer_topk import cases, gpu, gpu_scores
from pallas_kernels.pool import Pool
from pallas_kernels.target import CPU, Target
from tests.kernels.index_keys import World

plgpu: Any = mosaic_gpu  # whose interpreter only JAX 0.12 has
H100 = Target("gpu", "sm_90a")
GPU = Target("gpu", "sm_90a", interpret=True)
NEEDS_KERNELS = pytest.mark.skipif(not GPU.has_gpu_kernels, reason="GPU kernels need JAX 0.12")
SMALL: Any = {"places": 10, "heads": 16, "width": 64, "epp": 16}
CONTEXTS = [130, 150, 5]


@NEEDS_KERNELS
@pytest.mark.parametrize(("block", "k", "form"), [(1, 20, "float32"), (2, 19, "bfloat16")])
def test_chooses_what_the_jnp_path_does(block, k, form):
    World(block, CONTEXTS, form=form, **SMALL).check(k, GPU)


@NEEDS_KERNELS
@pytest.mark.slow
@pytest.mark.parametrize(("form", "block"), [("int8", 1), ("fp8", 2), ("fp4", 1), ("fp4", 2)])
def test_quantised_keys(form, block):
    World(block, CONTEXTS, form=form, **SMALL | {"epp": 32}).check(19, GPU)


@NEEDS_KERNELS
@pytest.mark.slow
def test_fp4_keys_of_full_width():
    """Whose queries, turned into the keys' basis, are no integers: no scores are equal."""
    World(1, CONTEXTS, form="fp4", ties=False, **SMALL | {"epp": 64, "width": 128}).check(19, GPU)


@NEEDS_KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("epp", [8, 128])
def test_pages_smaller_and_larger_than_what_is_scored_together(epp):
    World(2, CONTEXTS, **SMALL | {"places": 20, "epp": epp}).check(19, GPU)


@NEEDS_KERNELS
@pytest.mark.slow
def test_more_entries_than_the_selection_takes_together():
    World(1, [2200, 2048], **SMALL | {"places": 140}).check(700, GPU)


@NEEDS_KERNELS
@pytest.mark.slow
def test_scores_that_fit_neither_shared_memory_nor_what_may_be_kept(monkeypatch):
    """Each is read where it is, and each block's when its turn comes."""
    monkeypatch.setattr(gpu, "_IN_SHARED", 0)
    monkeypatch.setattr(gpu, "_SCORE_BYTES", 0)
    World(3, CONTEXTS, seed=1, **SMALL).check(18, GPU)


@NEEDS_KERNELS
@pytest.mark.slow
def test_no_races():
    world = World(2, CONTEXTS, seed=2, **SMALL)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = world.choose(17, GPU)
    world.check_is(got, 17)


def test_bits_become_indices():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2, (5, 96)).astype(bool)
    bits[1], bits[2, :40], bits[2, 40:], bits[3, :64] = False, True, False, False
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    got = gpu._indices(jnp.asarray(words), 50, 96)
    for row, chosen in zip(np.asarray(got), bits, strict=True):
        want = np.flatnonzero(chosen)[:50]
        assert row.tolist() == want.tolist() + [96] * (50 - len(want))


def test_the_path_is_chosen_from_shapes_and_target():
    def supports(target: Target, q_shape=(4, 1, 64, 128), dtype: Any = jnp.bfloat16, epp: int = 64) -> bool:
        pool = Pool.plain(jnp.zeros((2, epp, q_shape[3]), dtype))
        return gpu_scores.supports(jnp.zeros(q_shape, dtype), Pages(pool, jnp.zeros((4, 1), jnp.int32), 0, 2), target)

    assert supports(H100) is supports(H100, epp=16) is supports(H100, epp=128) is H100.has_gpu_kernels
    assert not supports(CPU) and not supports(Target("tpu", "v6e")) and not supports(Target("gpu"))
    assert not supports(H100, dtype=jnp.float32) and not supports(H100, q_shape=(4, 1, 48, 128))
    assert not supports(H100, q_shape=(4, 1, 64, 96)) and not supports(H100, epp=48)
    fp8 = World(1, [5], places=1, form="fp8", width=128, heads=16, epp=16)
    assert not gpu_scores.supports(fp8.q.astype(jnp.bfloat16), fp8.pages, H100)  # side words of a page are half a line


@NEEDS_KERNELS
def test_estimated_bytes_are_those_of_the_keys_and_the_scores():
    """Flash, 8,192 entries a row: 64 decode rows."""
    case = next(case for case in cases.cases() if case.name == "indexer_topk flash decode bfloat16")
    program = jax.make_jaxpr(lambda arrays: case.call(H100, **arrays))(case.inputs(H100))
    scores, select = (kernel.bytes_moved for kernel in kernels(program))
    assert scores == 64 * (8192 * 128 * 2 + 64 * (128 * 2 + 4) + 128 * 4 + 8192 * 4)
    assert select == 64 * (8192 * 4 + 8192 // 8 + 4)
