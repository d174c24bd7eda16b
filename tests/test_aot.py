"""The engine's step compiled for a TPU slice that is not there: its memory and what it sends.

Needs libtpu (the extra `tpu`); without it the tests are left out, and fail where CI=true.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections import Counter

import pytest
from flax import nnx

from configs.models import MODELS
from dsjax import aot
from dsjax.config import CacheConfig, LayerKind, ParallelConfig, SchedulerConfig
from dsjax.errors import ConfigError
from dsjax.load import make_runner

slow = pytest.mark.slow  # a minute of compiling
ROUNDS = 8  # more do not take longer; temporaries are much the same for any number


def _need_libtpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("libtpu is not installed")


def _marked(generation: str, *in_ci: str):
    return pytest.param(generation, marks=slow if generation in in_ci else pytest.mark.matrix)


@pytest.fixture(scope="module")
def compiled(compiled_anew):
    """Eight rounds of a CSA and an HCA layer, as wide as Flash but for the vocabulary, on 4 x 4 devices of v6e."""
    _need_libtpu()
    flash = MODELS["deepseek-v4-flash"]()
    model = dataclasses.replace(
        flash, layer_kinds=(LayerKind.CSA, LayerKind.HCA) * ROUNDS, num_hash_layers=0, vocab_size=2048
    )
    runner, _ = make_runner(
        model,
        None,
        devices=aot.devices(aot.TARGETS["v6e:4x4"]),
        cache=CacheConfig(cache_memory_bytes=16 << 30),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=32768),
        parallel=ParallelConfig.of("data:4,model:4", kv_parallel=4, expert_parallel=True),
    )
    report, program = aot.compile_step(runner, runner.buckets.decode[-1])
    assert program is not None, report.error
    return runner, report, program


@slow
def test_weights_are_on_the_device_as_stored(compiled):
    runner, report, _ = compiled
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(runner.params)}
    sizes = {
        name: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for name, leaf in leaves.items()
    }
    assert sum(sizes.values()) == report.weight_bytes
    model = runner.config
    d, f, e = model.hidden_size, model.moe_intermediate_size, model.n_routed_experts
    expert = 3 * d * f // 2 + 3 * d * f // 32  # a byte holds two codes, and 32 codes share a scale
    assert sum(size for name, size in sizes.items() if ".ffn.experts." in name) == 2 * ROUNDS * e // 16 * expert
    # queries of 16 of 64 heads, a byte a weight and a float32 a tile of 128 x 128
    rank, heads = model.q_lora_rank, model.num_attention_heads * model.head_dim // 4
    assert sizes["repeated.0.attn.wq_b.kernel"] == ROUNDS * rank * heads
    assert sizes["repeated.0.attn.wq_b.scale"] == ROUNDS * (rank // 128) * (heads // 128) * 4


@slow
def test_temporaries_take_at_most_a_twentieth_of_the_arguments(compiled):
    _, report, program = compiled
    assert report.temp_bytes <= 0.05 * report.argument_bytes
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes >= report.argument_bytes
    assert memory.alias_size_in_bytes >= report.cache_bytes  # donated


@slow
def test_what_a_layer_sends(compiled):
    """As dsjax/sharding.py says, in each of the two layers of the loop."""
    _, report, _ = compiled
    sent: dict[str, Counter] = {}
    for c in report.collectives:
        layer = re.search(r"/(repeated\d)/", c.scope)
        if layer:
            assert c.times == ROUNDS
            sent.setdefault(layer[1], Counter())[c.kind] += 1
    experts = {"all-to-all": 3, "all-reduce": 1}  # tokens, choices, results; how many passes
    attention = {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 1}  # queries, the maximum, the sums
    outputs = {"all-reduce": 2}
    hca = Counter(experts) + Counter(attention) + Counter(outputs)
    csa = hca + Counter({"all-gather": 2})  # indexer queries, candidates
    assert sent == {"repeated0": csa, "repeated1": hca}


@pytest.mark.parametrize("generation", [_marked(name, "v5e") for name in ("v5e", "v5p", "v6e", "tpu7x")])
def test_a_slice_of_flash_runs_the_kernels_of_each_generation(generation, compiled_anew):
    """Four layers of every kind with Flash's widths on the chips of a host; FP8 entries and FP4 index keys."""
    _need_libtpu()
    flash = MODELS["deepseek-v4-flash"]()
    kinds = (LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA, LayerKind.CSA)
    model = dataclasses.replace(flash, layer_kinds=kinds, num_hash_layers=1, vocab_size=2048)
    devices = aot.devices(aot.CHIPS[generation])
    runner, _ = make_runner(
        model,
        None,
        devices=devices,
        cache=CacheConfig(kv_cache_dtype="fp8_fp4", cache_memory_bytes=2 << 30),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=32768),
        parallel=ParallelConfig.of(f"model:{len(devices)}"),
    )
    report, program = aot.compile_step(runner, runner.buckets.decode[-1])
    assert program is not None, report.error
    calls = re.findall(
        r'custom_call_target="tpu_custom_call".*?op_name="[^"]*/(layer\d)/(?:\w+/)*?(\w+)/pallas_call"',
        program.as_text(),
    )
    every = Counter(cache_write=1, paged_attention=1, mhc_read=2, mhc_write=2, grouped_matmul=2)
    hca = every + Counter(cache_write=1, compress=1)
    csa = every + Counter(cache_write=2, compress=2, indexer_topk=1)
    found = {layer: Counter(name for at, name in calls if at == layer) for layer, _ in calls}
    assert found == {"layer0": every, "layer1": csa, "layer2": hca, "layer3": csa}


def test_an_unknown_topology_names_what_is_missing():
    target = aot.Target(platform="tpu", topology="no_such:1x1", num_devices=1, memory_bytes=1)
    with pytest.raises(ConfigError, match="target no_such:1x1 needs the packages libtpu"):
        aot.devices(target)
