"""What CI compiles GPU kernels for: some of all cases, and one program that Blackwell must refuse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import all_cases
from pallas_kernels.case import Case, array
from pallas_kernels.target import Target

plgpu: Any = mosaic_gpu  # only JAX 0.12 has all of it
WGMMA = "wgmma, of Hopper alone"
# Each way through each kernel once.
REPRESENTATIVE = (
    "swa_attention pro prefill bfloat16",
    "hca_attention flash decode bfloat16",
    "hca_attention flash/8 prefill bfloat16",
    "csa_attention flash decode bfloat16",
    "csa_attention flash prefill bfloat16",
    "swa_attention pro decode int8",
    "hca_attention flash/8 prefill fp8",
    "csa_attention flash decode fp8",
    "csa_attention flash/8 prefill int8",
    "indexer_topk flash decode bfloat16",
    "indexer_topk flash prefill bfloat16",
    "indexer_topk flash prefill fp8",
    "indexer_topk flash decode fp4",
    "cache_write flash window decode fp8",
    "cache_write flash csa prefill int8",
    "cache_write flash index_key decode fp4",
    "mhc_mix pro prefill",
    "grouped_matmul flash w13 decode bf16",
    "grouped_matmul flash w13 decode fp4",
    "grouped_matmul pro w13 prefill fp8",
    "grouped_matmul pro w13 prefill fp4",
)


def cases() -> list[Case]:
    return [*(case for case in all_cases.cases() if case.name in REPRESENTATIVE), _wgmma()]


def _wgmma() -> Case:
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def kernel(a, b, out, a_here, b_here, arrived):
        plgpu.copy_gmem_to_smem(a, a_here, arrived)
        plgpu.copy_gmem_to_smem(b, b_here, arrived)
        plgpu.barrier_wait(arrived)

        def product(total):
            plgpu.wgmma(total, a_here, b_here)
            return total[...]

        out[...] = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((64, 64), jnp.float32))

    def call(target: Target, a: jax.Array, b: jax.Array) -> jax.Array:
        tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiles)
        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
            scratch_types=[tile, tile, plgpu.Barrier(num_arrivals=2)],
            cost_estimate=pl.CostEstimate(flops=2 * 64**3, bytes_accessed=2 * 3 * 64**2, transcendentals=0),
        )(a, b)

    tile = array(jnp.bfloat16, 64, 64)
    return Case(name=WGMMA, call=call, arrays={"a": tile, "b": tile})
