"""Writing quantised entries on a GPU: the kernel stores the jnp path's bytes and changes no others, without races."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.cache_write import gpu
from pallas_kernels.pool import PoolShape
from pallas_kernels.target import CPU, Target
from tests.kernels.test_cache_write import World, keys, latents

plgpu: Any = mosaic_gpu  # whose interpreter only JAX 0.12 has
H100 = Target("gpu", "sm_90a")
GPU = Target("gpu", "sm_90a", interpret=True)
NEEDS_KERNELS = pytest.mark.skipif(not GPU.has_gpu_kernels, reason="GPU kernels need JAX 0.12")


@NEEDS_KERNELS
@pytest.mark.parametrize(
    "form",
    [
        latents("fp8"),
        keys("fp4"),
        *(pytest.param(form, marks=pytest.mark.slow) for form in (latents("int8"), keys("int8"), keys("fp8"))),
    ],
    ids=lambda form: f"{form.name}-{form.width}",
)
def test_the_kernel_stores_the_same_bytes_and_no_others(form):
    world = World(form, 20, tiled=False)  # a block and a part of one
    assert gpu.supports(world.pool, GPU)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = world.run(GPU)
    for a, b in zip(got, world.run(CPU), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_it_takes():
    def supports(form, target: Target = H100, tiled: bool = False) -> bool:
        return gpu.supports(PoolShape(form, 4, 16).abstract(tiled), target)

    assert supports(latents("fp8")) is supports(keys("fp4")) is H100.has_gpu_kernels
    assert H100.has_gpu_kernels is (jax.__version_info__ >= (0, 12))
    assert not supports(latents("bfloat16")) and not supports(keys("float32"))
    assert not supports(latents("fp8"), CPU) and not supports(latents("fp8"), Target("gpu"))
    assert not supports(latents("fp8"), tiled=True)
