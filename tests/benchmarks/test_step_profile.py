"""What the profile of a step says adds up, and parts are found by the model's scopes."""

from __future__ import annotations

import pytest

from benchmarks.bench_model import random_weights
from benchmarks.roofline import Roof
from benchmarks.step_profile import PARTS, layer_scopes, measure, op_paths, parse_case, part_of
from configs.models import MODELS
from dsjax.config import CacheConfig, LayerKind, SchedulerConfig
from dsjax.load import make_runner


def test_cases_are_rows_and_tokens():
    assert parse_case("32x1") == [(32, 1)]
    assert parse_case("24x1+1x488") == [(24, 1), (1, 488)]


@pytest.mark.parametrize("case", ["", "32", "0x1", "1x0", "1x1+", "1x1x1"])
def test_other_cases_are_refused(case):
    with pytest.raises(ValueError, match="must be ROWSxTOKENS"):
        parse_case(case)


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("jit(step)/layer3/attention/dot_general", "csa"),
        ("jit(step)/layer1/attention/while/body/dot_general", "swa"),
        ("jit(step)/while/body/repeated0/attention/mul", "hca"),
        ("jit(step)/attention/mul", "other"),
        ("jit(step)/layer3/attention/indexer/mul", "indexer"),
        ("jit(step)/layer3/attention/projections/mul", "projections"),
        ("jit(step)/layer3/experts/router/while/body/add", "router"),
        ("jit(step)/sample/reduce_max", "sample"),
        ("jit(step)/layer3/mul", "other"),
        ("", "other"),
    ],
)
def test_the_innermost_scope_counts(op_name, part):
    kinds = {"layer1": LayerKind.SLIDING, "layer3": LayerKind.CSA, "repeated0": LayerKind.HCA}
    assert part_of(op_name, kinds) == part


def test_an_operation_without_a_path_has_that_of_its_user():
    text = """
      %p.1 = f32[1,4] parameter(0)
      %dot.1 = f32[1,4] dot(%p.1, %w)
      %bitcast.2 = f32[4] bitcast(%dot.1)
      %add.3 = f32[4] add(%bitcast.2, %bitcast.2), metadata={op_name="jit(step)/layer1/experts/add"}
      ROOT %neg.4 = f32[4] negate(%add.3), metadata={op_name="jit(step)/neg"}
    """
    own = "jit(step)/layer1/experts/add"
    assert op_paths(text) == {"p.1": own, "dot.1": own, "bitcast.2": own, "add.3": own, "neg.4": "jit(step)/neg"}


def test_layers_have_scopes_also_in_a_loop():
    scopes = layer_scopes(MODELS["bench-60m"]())
    assert (scopes["layer1"], scopes["layer2"], scopes["layer7"]) == (LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA)
    assert (scopes["repeated0"], scopes["repeated1"]) == (LayerKind.CSA, LayerKind.HCA)
    assert len(scopes) == 10


def test_a_profile_adds_up():
    config = MODELS["tiny-mixed"]()
    weights = random_weights(config)
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
    cache = CacheConfig(enable_prefix_caching=False, block_size=4)
    runner, _ = make_runner(config, lambda *_: weights, cache=cache, scheduler=scheduler)
    roof = Roof(bytes_per_s=1e9, flops_per_s=1e9)
    profile = measure(runner, "1x1+1x3", context=20, seconds=0.0, roof=roof, num_ops=3)
    assert profile.num_tokens == 4
    assert sum(profile.parts_ms.values()) == pytest.approx(profile.step_ms)
    assert all(profile.parts_ms[name] > 0 for name in PARTS)  # the model has every kind of layer
    low, high = profile.step_ms_range
    assert low <= profile.step_ms <= high
    assert profile.roof_ms == max(profile.bytes_moved, profile.flops) / 1e6
    assert profile.roof_share == profile.roof_ms / profile.step_ms
    assert len(profile.top_ops) == 3
    assert profile.top_ops == sorted(profile.top_ops, reverse=True)
