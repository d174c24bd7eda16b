"""The experts that tokens chose, by each target's kernel, are those of the form that computes every expert."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.models import MODELS
from dsjax.model.moe import Experts
from pallas_kernels.target import CPU, Target

GPU = Target("gpu", "sm_90a", interpret=True)
TARGETS = [
    CPU,
    Target("tpu", "v6e", interpret=True),
    pytest.param(
        GPU, marks=[pytest.mark.slow, pytest.mark.skipif(not GPU.has_gpu_kernels, reason="GPU kernels need JAX 0.12")]
    ),
]
NUM_EXPERTS, K = 4, 2


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    """FP4 experts of two rounds of a scanned model, each value at most 6 / 64."""
    rng = np.random.default_rng(0)

    def random(low: int, high: int, dtype: str, *shape: int) -> np.ndarray:
        return rng.integers(low, high, (2, NUM_EXPERTS, *shape)).astype(dtype)

    return {
        "w13": random(-128, 128, "int8", 128, 256),
        "w13_scale": random(119, 122, "uint8", 8, 256),
        "w2": random(-128, 128, "int8", 64, 256),
        "w2_scale": random(119, 122, "uint8", 4, 256),
    }


def experts_of(arrays: dict[str, jax.Array]) -> Experts:
    config = dataclasses.replace(
        MODELS["tiny-mixed"](),
        hidden_size=256,
        moe_intermediate_size=128,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=K,
        expert_dtype="fp4",
    )
    experts = Experts(config, nnx.Rngs(0), jnp.dtype("float32"))
    for name, array in arrays.items():
        getattr(experts, name).set_value(array)
    return experts


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.platform)
def test_grouped_is_dense(target, stored):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 256)).astype(np.float32)
    chosen = np.array([[3, 0], [0, 3], [3, 0], [0, 1], [0, 3]], np.int32)  # 2 has none
    weights = rng.uniform(0.1, 1, (5, K)).astype(np.float32)

    @jax.jit
    def run(stored, x, chosen, weights):
        experts = experts_of(stored)
        experts.round = 1
        of_round = experts_of({name: array[1] for name, array in stored.items()})
        return experts.grouped(x, chosen, weights, target), of_round.dense(x, chosen, weights)

    got, want = run(stored, x, chosen, weights)
    np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()))  # sums in another order
