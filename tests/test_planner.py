"""Memory and costs against the arrays themselves, the specification's totals, and sums worked by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.models import MODELS
from dsjax.cache.spec import CacheSpec
from dsjax.cache.state import CacheState
from dsjax.config import CacheConfig, ParallelConfig, SchedulerConfig
from dsjax.errors import ConfigError
from dsjax.load import make_runner
from dsjax.model.build import abstract
from dsjax.planner import Planner, num_distinct, weights
from dsjax.runner.buckets import Bucket
from tests.cache.specs import cache_spec, model_config

FLASH = MODELS["deepseek-v4-flash"]()


def flash(kv_cache_dtype: str = "auto", rows: int = 8) -> Planner:
    spec = CacheSpec.of(
        FLASH,
        CacheConfig(kv_cache_dtype=kv_cache_dtype),
        SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=2048),
        1 << 20,
        "bfloat16",
    )
    return Planner(FLASH, spec)


# --- memory ----------------------------------------------------------------------------------------


def test_flash_has_the_parameters_of_the_specification():
    main = sum(w.num_params for w in weights(FLASH, stored=True))
    both = sum(w.num_params for w in weights(FLASH, stored=True, with_mtp=True))
    assert (main, both - main) == (284_332_240_471, 6_610_048_891)
    pro = MODELS["deepseek-v4-pro"]()
    assert sum(w.num_params for w in weights(pro, stored=True)) == 1_572_997_201_763


@pytest.mark.parametrize("name", ["tiny-mixed", "dsjax-nano", "deepseek-v4-flash"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_weights_are_those_of_the_models_arrays(name, stored, dtype):
    model = MODELS[name]()
    _, state = abstract(model, jnp.dtype(dtype), with_mtp=True, stored=stored, scanned=True)
    arrays = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in nnx.to_flat_state(state))
    assert sum(w.num_bytes for w in weights(model, dtype, stored=stored, with_mtp=True)) == arrays


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("data:1", {}), ("model:2", {}), ("data:2", {"expert_parallel": True}), ("model:4", {"kv_parallel": 2})],
)
def test_a_device_holds_what_the_planner_says(mesh, options):
    model, parallel = MODELS["tiny-mixed"](), ParallelConfig.of(mesh, **options)
    runner, _ = make_runner(
        model, None, cache=CacheConfig(block_size=8), scheduler=SchedulerConfig(max_model_len=64), parallel=parallel
    )

    def on_device(tree) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    planner = Planner(model, runner.spec, dtype="float32", stored=False, parallel=parallel)
    assert (planner.weight_bytes, planner.cache_bytes) == (on_device(runner.params), on_device(runner.cache))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8", "fp8_fp4"])
@pytest.mark.parametrize("pages", [{"num_blocks": 5}, {"memory_bytes": 100_000, "num_snapshots": 0}, {}])
def test_bytes_of_the_cache_are_those_of_its_arrays(dtype, pages):
    spec = cache_spec(index=32, kv_cache_dtype=dtype, **pages)
    state = CacheState.create(spec, model_config(index=32))
    planner = Planner(model_config(index=32), spec, stored=False)
    assert planner.cache_bytes == sum(x.nbytes for x in jax.tree.leaves(state))


def test_what_does_not_fit_is_refused_with_the_knob():
    planner = Planner(model_config(), cache_spec(), dtype="float32", stored=False)
    weight, cache = planner.weight_bytes, planner.cache_bytes
    planner.check_fits(weight + cache + 10, reserve_bytes=10)
    with pytest.raises(ConfigError) as caught:
        planner.check_fits(weight + cache + 9, reserve_bytes=10)
    assert str(caught.value) == (
        f"weights take {weight} bytes of a device and the cache {cache}, with 10 in reserve more than its "
        f"{weight + cache + 9}: set cache_memory_bytes to at most {cache - 1}"
    )
    with pytest.raises(ConfigError, match="raise tensor_parallel_size"):
        planner.check_fits(weight)


# --- costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "gflops"), [(4096, 29.1), (32768, 32.2), (131072, 42.6), (1 << 20, 140.3)])
def test_operations_of_a_decoded_token_are_those_of_the_specification(context, gflops):
    cost = flash().step([[(context - 1, 1)]])
    assert round(cost.flops / 1e9, 1) == gflops
    assert round(cost.matmul_flops / 2e9, 2) == 13.27  # active parameters


def test_bytes_of_a_token_in_the_cache():
    assert flash("bfloat16").spec.bytes_per_token() == 6880
    cost = flash("bfloat16").step([[(0, 1024)]])
    state = 4 * 111_360
    assert cost.cache_write_bytes == 1024 * (6880 + 43 * 1024) + state


def test_a_hand_worked_step():
    """Layers sliding, CSA, HCA, CSA; window 8, ratios 4 and 8, top 2, 2 heads of 16, 1 indexer head of 8, float32."""
    model, spec = model_config(), cache_spec()
    planner = Planner(model, spec, dtype="float32", stored=False)
    # A decodes at position 20, B has 18 new tokens after 5: blocks of queries 5..20 and 21..22.
    cost = planner.step([[(20, 1), (5, 18)]])
    latent, key = 16 * 4, 8 * 4
    window = 4 * latent * (8 + (min(21, 16 + 7) + min(23, 2 + 7)))  # 4 layers
    csa = 2 * latent * (min(5, 2) + min(5, 32) + min(5, 4))
    keys = 2 * key * (5 + 5 + 5)
    hca = latent * (2 + 2 + 2)
    state = 2 * spec.state_values * 4
    assert cost.cache_read_bytes == window + csa + keys + hca + state
    # B completes entries 1 .. 4 of ratio 4 (4 .. 19, 20 .. 23 is incomplete) and 0, 1 of ratio 8; A its entry 20 // 4
    # only at 23.
    assert cost.cache_write_bytes == 4 * latent * 19 + 2 * (latent + key) * 4 + latent * 2 + state
    b = range(5, 23)
    pairs_window = 8 + sum(min(p + 1, 8) for p in b)
    pairs_csa = 2 + sum(min((p + 1) // 4, 2) for p in b)
    pairs_index = 5 + sum((p + 1) // 4 for p in b)
    pairs_hca = 2 + sum((p + 1) // 8 for p in b)
    attention = 4 * 2 * 16 * (4 * pairs_window + 2 * pairs_csa + pairs_hca) + 2 * 1 * 8 * 2 * pairs_index
    assert cost.attention_flops == attention
    # 1 of 2 experts for each of 19 tokens; an expert has 3 x 32 x 8 parameters in each of 4 layers
    head, experts = 32 * 64, 4 * 3 * 32 * 8
    everything = sum(w.num_params for w in weights(model, "float32", stored=False))
    dense = everything - 2 * experts - head - 64 * 32  # head, embedding
    assert cost.matmul_flops == 2 * (19 * dense + 2 * head + 19 * experts)
    assert cost.weight_bytes == pytest.approx(4 * (dense + head + num_distinct(2, 1, 19) * experts))


def test_padding_costs_matmuls_and_no_attention_nor_experts():
    planner = flash()
    plain, padded = planner.step([[(100, 1)] * 3]), planner.step([[(100, 1)] * 3], Bucket(4, 4, 1))
    assert padded.attention_flops == plain.attention_flops and padded.bytes_moved == plain.bytes_moved
    one = planner.step([[(100, 1)]]).matmul_flops - 2 * 6 * 43 * 25_165_824
    assert padded.matmul_flops - plain.matmul_flops == pytest.approx(one)


def test_experts_touched():
    assert num_distinct(256, 6, 1) == pytest.approx(6)
    assert num_distinct(256, 6, 2) == pytest.approx(12 - 36 / 256)
    assert num_distinct(256, 6, 10_000) == pytest.approx(256)
    assert num_distinct(2, 2, 1) == 2


def test_a_mesh_divides_the_work():
    """Two data shards of two devices that split heads and cache, experts dealt out over all four."""
    parallel = ParallelConfig.of("data:2,model:2", kv_parallel=2, expert_parallel=True)
    options = {"index": 32, "num_seqs": 2}
    model = model_config(index=32)
    whole = Planner(model, cache_spec(**options), dtype="float32", stored=False)
    split = Planner(model, cache_spec(**options, num_parts=2, page=8), dtype="float32", stored=False, parallel=parallel)
    alone = whole.step([[(30, 1), (40, 1)]])
    both = split.step([[(30, 1), (40, 1)], [(7, 1)]])  # the first shard has most to do
    assert both.attention_flops == alone.attention_flops / 2
    state = 2 * whole.spec.state_values * 4
    assert both.cache_read_bytes - state == (alone.cache_read_bytes - state) / 2
    one = split.step([[(30, 1)], [(7, 1)]])
    experts = 4 * 3 * 32 * 8 * 4 / 4  # bytes of an expert in all layers, a quarter of all experts on each device
    assert both.weight_bytes - one.weight_bytes == pytest.approx(
        (num_distinct(2, 1, 3) - num_distinct(2, 1, 2)) * experts
    )
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 is not planned"):
        Planner(model, whole.spec, parallel=ParallelConfig.of("stage:2"))


def test_long_steps_are_summed_exactly():
    planner = Planner(model_config(), cache_spec(), dtype="float32", stored=False)
    rng = np.random.default_rng(0)
    rows = [(int(a), int(b)) for a, b in zip(rng.integers(0, 300, 20), rng.integers(1, 60, 20), strict=True)]
    pairs = 0
    for start, num in rows:
        for p in range(start, start + num):
            pairs += 4 * 2 * 16 * (4 * min(p + 1, 8) + 2 * min((p + 1) // 4, 2) + (p + 1) // 8) + 32 * ((p + 1) // 4)
    assert planner.step([rows]).attention_flops == pairs
