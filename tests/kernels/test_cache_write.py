"""Writing entries of every kind and format: a TPU's kernel stores the jnp path's bytes, and changes no others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import NOWHERE, cache_write, tpu
from pallas_kernels.entry_format import KEY_FORMATS, LATENT_FORMATS, EntryFormat
from pallas_kernels.pool import Pool, PoolShape
from pallas_kernels.target import CPU, Target
from tests.kernels import tpu_races

TPU = Target("tpu", "v6e", interpret=True)
LAYERS, NUM_PAGES, EPP = 2, 9, 24


def latents(name: str) -> EntryFormat:
    return EntryFormat(name, 512, 64)


def keys(name: str) -> EntryFormat:
    return EntryFormat(name, 128)


class World:
    """A poisoned pool, and entries of all sizes for it: a run of tokens of one page, others anywhere, some nowhere."""

    def __init__(self, form: EntryFormat, num: int, gathered: bool = False, tiled: bool = True):
        rng = np.random.default_rng(0)
        shape = PoolShape(form, LAYERS * NUM_PAGES, EPP, gathered).abstract(tiled)
        self.pool: Pool = jax.tree.map(functools.partial(self._poison, rng), shape)
        slots = rng.permutation(NUM_PAGES * EPP)[:num]
        run = np.arange(5, 5 + num // 2)
        slots = np.concatenate([run, slots[~np.isin(slots, run)]])[:num]
        slots = np.pad(slots, (0, num - len(slots)), constant_values=NOWHERE)
        slots[rng.permutation(num)[: num // 8]] = NOWHERE
        self.slots = slots.astype(np.int32)
        entries = rng.normal(size=(num, form.width)) * np.logspace(-4, 4, num)[rng.permutation(num)][:, None]
        entries[:2] = np.array([0.0, -0.0])[:num, None]
        self.entries = entries.astype(np.float32)

    @staticmethod
    def _poison(rng, s: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.full(s.shape, jnp.nan, s.dtype)
        return jnp.asarray(rng.integers(0, jnp.iinfo(s.dtype).max, s.shape, endpoint=True, dtype=s.dtype))

    def write(self, target: Target, pool, slots, entries) -> Pool:
        return cache_write(pool, slots, entries, layer=jnp.int32(1), num_pages=NUM_PAGES, target=target)

    def run(self, target: Target) -> list[np.ndarray]:
        """The bytes of the arrays."""
        write = jax.jit(functools.partial(self.write, target))
        return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(write(self.pool, self.slots, self.entries))]


EVERY_KIND = [
    *((latents(name), gathered) for name in LATENT_FORMATS for gathered in (False, True)),
    *((keys(name), False) for name in KEY_FORMATS),
]
EVERYDAY = [(latents("bfloat16"), False), (latents("fp8"), True), (keys("fp4"), False)]


@pytest.mark.parametrize(
    ("form", "gathered"),
    [
        pytest.param(
            *case, id=f"{case[0].name}-{case[0].width}-{case[1]}", marks=() if case in EVERYDAY else pytest.mark.slow
        )
        for case in EVERY_KIND
    ],
)
def test_the_kernel_stores_the_same_bytes_and_no_others(form, gathered):
    world = World(form, 40, gathered)
    assert tpu.supports(world.pool, TPU)
    for got, want in zip(world.run(TPU), world.run(CPU), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("num", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_one_entry_and_several_steps_of_the_grid(num):
    """Entries of one page come in several steps, some of a line's in one and some in another."""
    world = World(keys("int8"), num)
    world.slots[:] = np.random.default_rng(1).permutation(world.slots)
    for got, want in zip(world.run(TPU), world.run(CPU), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", [latents("bfloat16"), pytest.param(latents("int8"), marks=pytest.mark.slow)])
def test_no_races(form):
    world = World(form, 12)
    got = tpu_races.run(world.write, world.pool, world.slots, world.entries)
    for a, b in zip(jax.tree.leaves(got), world.run(CPU), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b)


def test_what_it_takes():
    pools = {
        form.name: PoolShape(form, 4, 16).abstract(True) for form in (latents("bfloat16"), latents("int8"), keys("fp4"))
    }
    v6e = Target("tpu", "v6e")
    assert all(tpu.supports(pool, v6e) for pool in pools.values())
    assert not tpu.supports(pools["int8"], CPU) and not tpu.supports(pools["int8"], Target("tpu"))
    assert not tpu.supports(PoolShape(latents("int8"), 4, 16).abstract(False), v6e)
    assert not tpu.supports(PoolShape(keys("int8"), 4, 2).abstract(True), v6e)  # two bytes, no whole word
    with pytest.raises(ValueError, match=r"cache_write: entries \(3, 64\) must be \[T, 128\]"):
        cache_write(Pool.plain(jnp.zeros((2, 4, 128))), jnp.zeros(3, int), jnp.zeros((3, 64)), layer=0, num_pages=2)
