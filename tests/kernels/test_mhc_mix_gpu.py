"""Hyper-connections' GPU kernels: what the reference gives, no races, the bytes moved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from benchmarks.kernel_cost import kernels
from pallas_kernels.mhc_mix import MixConfig, cases, gpu, mhc_read, mhc_write
from pallas_kernels.target import CPU, Target

plgpu: Any = mosaic_gpu  # whose interpreter only JAX 0.12 has
H100 = Target("gpu", "sm_90a")
GPU = Target("gpu", "sm_90a", interpret=True)
NEEDS_KERNELS = pytest.mark.skipif(not GPU.has_gpu_kernels, reason="GPU kernels need JAX 0.12")
CONFIG = MixConfig(sinkhorn_iters=20, eps=1e-6, norm_eps=1e-6)
WIDTH = 1024


def site(num_tokens: int) -> tuple[jax.Array, ...]:
    """Streams of sizes from 1e-4 to 1e4, the first token's all zero."""
    rng = np.random.default_rng(0)
    streams = rng.normal(size=(4, num_tokens, WIDTH)) * np.logspace(-4, 4, num_tokens)[:, None]
    streams[:, 0] = 0
    params = (rng.normal(0, 0.1, (24, 4 * WIDTH)), rng.normal(size=24), rng.normal(size=3))
    return jnp.asarray(streams, jnp.bfloat16), *(jnp.asarray(a, jnp.float32) for a in params)


@NEEDS_KERNELS
@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.slow), 12])  # a row a block, and four
def test_kernels_equal_the_reference_without_races(num_tokens, monkeypatch):
    monkeypatch.setattr(gpu, "_TOKENS", 8)  # so that the second block of 12 tokens is partly filled
    monkeypatch.setattr(gpu, "_COLUMNS", WIDTH // 2 if num_tokens == 1 else WIDTH)
    streams, *params = site(num_tokens)
    out = streams[1] * 0.5
    x, post, comb = mhc_read(streams, *params, CONFIG, CPU)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = mhc_read(streams, *params, CONFIG, GPU)
        written = mhc_write(streams, out, post, comb, GPU)
    np.testing.assert_allclose(got[1], post, atol=1e-5)  # sums of 4,096 products in another order
    np.testing.assert_allclose(got[2], comb, atol=1e-5)
    rounded = {"rtol": 2**-7, "atol": 1e-30}  # a bfloat16 may be rounded to its neighbour
    np.testing.assert_allclose(got[0].astype(jnp.float32), x.astype(jnp.float32), **rounded)
    want = mhc_write(streams, out, post, comb, CPU)
    np.testing.assert_allclose(written.astype(jnp.float32), want.astype(jnp.float32), **rounded)


def test_the_path_is_chosen_from_shapes_and_target():
    def supports(target: Target, streams: int = 4, width: int = 4096, dtype: Any = jnp.bfloat16) -> bool:
        return gpu.supports(jax.ShapeDtypeStruct((streams, 5, width), dtype), target)  # type: ignore[arg-type]

    assert supports(H100) is H100.has_gpu_kernels is (jax.__version_info__ >= (0, 12))
    assert not supports(Target("gpu")) and not supports(CPU) and not supports(Target("tpu", "v6e"))
    assert not supports(H100, streams=2) and not supports(H100, width=4096 + 512)
    assert not supports(H100, dtype=jnp.float32)


@NEEDS_KERNELS
def test_the_bytes_by_hand():
    """Flash: 64 tokens of four streams of 4,096, whose products 32 blocks add up apart."""
    case = next(case for case in cases.cases() if case.name == "mhc_mix flash decode")
    program = jax.make_jaxpr(lambda arrays: case.call(H100, **arrays))(case.inputs(H100))
    found = {kernel.name: kernel.bytes_moved for kernel in kernels(program)}
    row, fn = 64 * 4096 * 2, 24 * 4 * 4096 * 4
    assert found["mhc_project"] == 4 * row + fn + 32 * (32 + 1) * 64 * 4
    assert found["mhc_mix"] == 32 * (24 + 1) * 128 * 4 + 24 * 128 * 4  # for 128 tokens
    assert found["mhc_read"] == (4 + 1) * row + 4 * 64 * 4
    assert found["mhc_write"] == (4 + 1 + 4) * row + 20 * 64 * 4
