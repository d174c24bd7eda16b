"""The indexer's TPU kernel: the jnp path's choice exactly, no races, no more bytes than it says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from benchmarks.kernel_cost import kernels
from pallas_kernels.indexer_topk import cases, indexer_topk
from pallas_kernels.indexer_topk.tpu_scores import decode_fp4
from pallas_kernels.pool import Pool
from pallas_kernels.target import CPU, Target
from tests.kernels import tpu_races
from tests.kernels.index_keys import World

V6E = Target("tpu", "v6e")
TPU = Target("tpu", "v6e", interpret=True)
# More than a chunk of entries, as many as k, few, one; the first scored block after one that is not, the last of all.
CONTEXTS = [[2500, 130, 5, 1030], [7, 1024, 1025, 4], [3000, 3000, 129, 131]]


@pytest.mark.parametrize(("block", "k", "form"), [(1, 130, "float32"), (4, 129, "bfloat16")])
def test_chooses_what_the_jnp_path_does(block, k, form):
    for seed, contexts in enumerate(CONTEXTS):
        World(block, contexts, places=375, form=form, seed=seed).check(k, TPU)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "block"), [("int8", 1), ("int8", 4), ("fp8", 1), ("fp8", 4)])
def test_quantised_keys(form, block):
    World(block, [1200, 130, 5, 300], places=150, form=form, width=128, tiled=True).check(129, TPU)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4])
def test_fp4_keys(block):
    """Where widths are a tile, queries turned into the keys' basis are no integers any more, and there are no ties."""
    World(block, [1200, 130, 5, 300], places=150, form="fp4", width=64).check(129, TPU)
    World(block, [1200, 130, 5, 300], places=150, form="fp4", width=128, tiled=True, ties=False).check(129, TPU)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4])
def test_two_devices_share_the_pages(block):
    """Every other entry of a page is on each; all of 130 tokens are chosen, and of 5."""
    world = World(block, [1200, 130, 5, 300], places=75, epp=16)
    halves = jnp.stack([world.pages.pool.values[:, i::2] for i in range(2)])
    mesh = jax.make_mesh((2,), ("kv",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def choose(target: Target) -> np.ndarray:
        def here(halves: jax.Array) -> jax.Array:
            pages = world.pages._replace(pool=Pool.plain(halves[0]), axis="kv")
            return indexer_topk(world.q, world.weights, world.blocks, pages, ratio=1, k=130, target=target)[None]

        spec = PartitionSpec("kv")
        return np.asarray(
            jax.jit(jax.shard_map(here, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(halves)
        )

    want, got = choose(CPU), choose(TPU)
    if block == 1:  # in any order
        want, got = np.sort(want, axis=2), np.sort(got, axis=2)
    np.testing.assert_array_equal(got, want)
    if block > 1:
        np.testing.assert_array_equal(np.stack(got, axis=-1).reshape(5, block, -1), world.choose(130, CPU))


def test_tiled_fp4_keys_are_decoded_exactly():
    pool = World(1, [40], places=3, form="fp4", width=128, epp=16, tiled=True, ties=False).pages.pool
    want = pool.take_pages(jnp.arange(pool.num_pages), jnp.dtype("float32")).reshape(-1, 128)
    words = pool.side[:, 0, :16].reshape(1, -1)
    got = jax.jit(lambda values, words: decode_fp4(values, words, jnp.float32))(pool.values, words)
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4])
def test_no_races(block):
    world = World(block, [1100, 9, 1300], places=163)

    def choose(target: Target) -> jax.Array:
        return indexer_topk(world.q, world.weights, world.blocks, world.pages, ratio=1, k=20, target=target)

    world.check_is(np.asarray(tpu_races.run(choose)), 20)


def test_estimated_bytes_are_those_of_the_keys_and_little_more():
    """Flash, bfloat16, 8,192 entries a row: 64 decode rows, and 192 blocks of 16 queries."""
    flash = [case for case in cases.cases() if " flash " in case.name and "bfloat16" in case.name]
    programs = [jax.make_jaxpr(lambda arrays, case=case: case.call(V6E, **arrays))(case.inputs(V6E)) for case in flash]
    ((decode,), (prefill,)) = ([kernel.bytes_moved for kernel in kernels(program)] for program in programs)
    keys = 8192 * 128 * 2
    assert decode == 64 * (keys + 64 * 128 * 2 + 64 * 4 + 128 * 4 + 512 * 4)  # + q, weights, pages' ids, indices
    assert prefill == 192 * (keys + 16 * (64 * 128 * 2 + 64 * 4) + 128 * 4 + 8192 * 4)  # + a bit a query and entry
