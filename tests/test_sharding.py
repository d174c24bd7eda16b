"""Which meshes and sizes are refused, and which part of every parameter each device gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from configs.models import MODELS
from dsjax.axes import ALL, KV, MESH_AXES, MODEL, SHARD
from dsjax.config import LayerKind, ModelConfig, ParallelConfig
from dsjax.errors import ConfigError
from dsjax.model.build import abstract
from dsjax.sharding import WHOLE, Placement, Rules, make_mesh
from pallas_kernels.dequantize import dequantize
from tests.golden_sets import golden

TINY = MODELS["tiny-mixed"]()  # 4 heads in 2 groups, 6 experts of 32, 4 indexer heads, 256 tokens


def rules(mesh: str, model: ModelConfig = TINY, **parallel) -> Rules:
    return Rules.of(model, ParallelConfig.of(mesh=mesh, **parallel))


def tiny(**sizes) -> ModelConfig:
    return dataclasses.replace(TINY, **sizes)


# --- the mesh --------------------------------------------------------------------------------------


def test_the_mesh_has_the_devices_in_order():
    mesh = make_mesh(ParallelConfig.of(mesh="stage:2,data:2,model:2", kv_parallel=2))
    assert mesh.axis_names == MESH_AXES and mesh.devices.shape == (2, 2, 1, 2)
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert make_mesh(ParallelConfig.of(mesh="data:4")).devices.ravel().tolist() == jax.devices()[:4]
    assert make_mesh(ParallelConfig()).devices.shape == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            "data:4,model:4",
            "mesh stage:1,data:4,model:4 takes 16 devices and there are 8: choose sizes whose product is 1 or 2 or 4 "
            "or 8, or have 16 with XLA_FLAGS=--xla_force_host_platform_device_count=16",
        ),
        (
            "data:3",
            "mesh stage:1,data:3,model:1 takes 3 devices and there are 8: choose sizes whose product is 1 or 2 or 4 "
            "or 8",
        ),
        (
            "stage:3,model:2",
            "mesh stage:3,data:1,model:2 takes 6 devices and there are 8: choose sizes whose product is 1 or 2 or 4 "
            "or 8",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_devices_is_refused(mesh, message):
    with pytest.raises(ConfigError) as caught:
        make_mesh(ParallelConfig.of(mesh=mesh))
    assert str(caught.value) == message


# --- what the model's sizes allow ------------------------------------------------------------------


def test_rules_of_meshes():
    everywhere = {"index_heads": SHARD, "vocab": SHARD, "gate_up": SHARD, "ffn": SHARD}
    sliced = {"expert": (), "expert_gate_up": SHARD, "expert_ffn": SHARD}
    assert rules("data:2,model:2") == Rules(heads=SHARD, group=SHARD, **everywhere, **sliced)
    # 2 groups are not split over 4 devices, but over the 2 that have other parts of the cache's heads
    assert rules("model:4", kv_parallel=2) == Rules(heads=(MODEL,), group=(MODEL,), **everywhere, **sliced)
    whole = {"expert": ALL, "expert_gate_up": (), "expert_ffn": ()}
    assert rules("data:3,model:2", expert_parallel=True) == Rules(heads=SHARD, group=SHARD, **everywhere, **whole)


@pytest.mark.parametrize(
    ("sizes", "parallel", "message"),
    [
        (
            {"num_attention_heads": 6},
            {"mesh": "model:4"},
            "tensor_parallel_size=4 with kv_parallel=1 splits num_attention_heads=6 into 4 parts, which does not "
            "divide it: it can be 1 or 2 or 3",
        ),
        (
            {"num_attention_heads": 6},
            {"mesh": "model:8", "kv_parallel": 2},
            "tensor_parallel_size=8 with kv_parallel=2 splits num_attention_heads=6 into 4 parts, which does not "
            "divide it: it can be 1 or 2 or 3",
        ),
        (
            {},
            {"mesh": "model:4"},
            "tensor_parallel_size=4 with kv_parallel=1 splits o_groups=2 into 4 parts, which does not divide it: it "
            "can be 1 or 2",
        ),
        (
            {"vocab_size": 250},
            {"mesh": "model:4", "kv_parallel": 2},
            "tensor_parallel_size=4 with kv_parallel=2 splits vocab_size=250 into 4 parts, which does not divide it: "
            "it can be 1 or 2",
        ),
        (
            {"moe_intermediate_size": 36},
            {"mesh": "model:8", "kv_parallel": 4},
            "tensor_parallel_size=8 with kv_parallel=4 splits moe_intermediate_size=36 into 8 parts, which does not "
            "divide it: it can be 1 or 2 or 3 or 4 or 6",
        ),
        (
            {},
            {"mesh": "model:8", "kv_parallel": 4},
            "tensor_parallel_size=8 with kv_parallel=4 splits index_n_heads=4 into 8 parts, which does not divide it: "
            "it can be 1 or 2 or 4",
        ),
        (
            {},
            {"mesh": "data:2,model:2", "expert_parallel": True},
            "expert_parallel splits n_routed_experts=6 over data_parallel_size x tensor_parallel_size = 4 devices, "
            "which does not divide it: choose a product of 1 or 2 or 3, or expert_parallel=false",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(sizes, parallel, message):
    with pytest.raises(ConfigError) as caught:
        Rules.of(tiny(**sizes), ParallelConfig.of(**parallel))
    assert str(caught.value) == message


def test_indexer_heads_matter_only_to_models_with_an_indexer():
    model = tiny(layer_kinds=(LayerKind.SLIDING, LayerKind.HCA), num_hash_layers=0)
    assert rules("model:8", model, kv_parallel=4).heads == (MODEL,)


def test_two_axes_of_an_array_on_one_mesh_axis_are_refused():
    with pytest.raises(ConfigError, match=r"\('expert', 'embed', 'expert_gate_up'\) of one array would be split over"):
        Rules(expert=ALL, expert_gate_up=SHARD).spec(("expert", "embed", "expert_gate_up"))
    with pytest.raises(ConfigError, match="would be split over one mesh axis"):
        Rules(heads=(MODEL,), ffn=(KV, MODEL)).spec(("heads", "ffn"))
    spec = Rules(heads=(MODEL,), expert=(KV,)).spec(("heads", None, "expert", "embed"))
    assert tuple(spec) == ("model", None, "kv", None)


def test_a_misspelt_axis_is_an_error_and_not_whole():
    with pytest.raises(ValueError, match="logical axis 'head' is neither in WHOLE nor in Rules"):
        rules("model:2").spec(("embed", "head"))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("scanned", [False, True])
def test_every_axis_of_the_model_is_known(stored, scanned):
    names = set()
    for model in (ModelConfig.from_dir(golden("q1_fp8fp4")), MODELS["deepseek-v4-flash"]()):
        _, state = abstract(model, jnp.dtype("bfloat16"), with_mtp=True, stored=stored, scanned=scanned)
        for path, leaf in nnx.to_flat_state(state):
            axes = leaf.get_metadata("logical_axes")
            assert len(axes) == len(leaf.shape), path
            names.update(axes)
    assert names - {None} == {f.name for f in dataclasses.fields(Rules)} | set(WHOLE) - (
        set() if scanned else {"layer"}
    )


# --- what each device gets -------------------------------------------------------------------------


def parts(
    parallel: str, of_rules: Rules, axes: Sequence[str | None], *stages: np.ndarray, kv: int = 1
) -> dict[tuple[int, ...], np.ndarray]:
    """{(stage, data, model, kv): that device's array}."""
    mesh = make_mesh(ParallelConfig.of(mesh=parallel, kv_parallel=kv))
    array = Placement(mesh, of_rules).put(axes, stages)
    on = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    assert len(on) == mesh.size
    return {place: on[device] for place, device in np.ndenumerate(mesh.devices)}


def test_an_axis_in_equal_runs_and_whole_on_other_data_shards():
    array = np.arange(16).reshape(8, 2)
    for (_, _, model, _), part in parts("data:2,model:4", Rules(vocab=SHARD), ("vocab", "embed"), array).items():
        np.testing.assert_array_equal(part, array[2 * model : 2 * model + 2])
    for (_, _, model, kv), part in parts("model:4", Rules(vocab=SHARD), ("embed", "vocab"), array.T, kv=2).items():
        first = 2 * (2 * model + kv)
        np.testing.assert_array_equal(part, array.T[:, first : first + 2])


def test_heads_alike_on_the_devices_that_share_a_cache():
    array = np.arange(8)
    for (_, _, model, _), part in parts("model:8", Rules(heads=(MODEL,)), ("heads",), array, kv=4).items():
        assert part.tolist() == [0, 1, 2, 3] if model == 0 else [4, 5, 6, 7]


def test_an_axis_no_rule_splits_is_everywhere():
    array = np.arange(6).reshape(2, 3)
    found = parts("data:2,model:4", Rules(), ("embed", None), array)
    assert len(found) == 8 and all((part == array).all() for part in found.values())


@pytest.mark.parametrize("name", ["gate_up", "expert_gate_up"])
def test_of_gate_and_up_each_device_gets_a_part(name):
    array = np.arange(32).reshape(2, 16)  # 8 of gate, 8 of up
    found = parts("data:2,model:4", Rules(**{name: SHARD}), ("embed", name), array)
    for (_, _, model, _), part in found.items():
        columns = [2 * model, 2 * model + 1, 8 + 2 * model, 9 + 2 * model]
        np.testing.assert_array_equal(part, array[:, columns])


def test_a_stage_gets_its_own_array():
    first, second = np.arange(8).reshape(4, 2), 100 + np.arange(8).reshape(4, 2)
    split = parts("stage:2,data:2,model:2", Rules(group=SHARD), ("group", "embed"), first, second)
    for (stage, _, model, _), part in split.items():
        np.testing.assert_array_equal(part, (first, second)[stage][2 * model : 2 * model + 2])
    whole = parts("stage:2,data:2,model:2", Rules(), ("embed", None), first, second)
    for (stage, *_), part in whole.items():
        np.testing.assert_array_equal(part, (first, second)[stage])


def test_whole_experts_over_all_devices_of_a_stage():
    stages = [np.arange(8 * 2 * 4).reshape(8, 2, 4) + 1000 * stage for stage in range(2)]
    axes = ("expert", "embed", "expert_gate_up")
    for (stage, data, model, kv), part in parts(
        "stage:2,data:2,model:2", Rules(expert=ALL), axes, *stages, kv=2
    ).items():
        first = 2 * (2 * data + model + kv)  # one of model and kv is 0
        np.testing.assert_array_equal(part, stages[stage][first : first + 2])


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("ffn", 6, "an array's axis 'ffn' of 6 cannot be split over 4 devices"),
        ("gate_up", 12, "an array's axis 'gate_up' of 2 x 6 cannot be split over 4 devices"),
        ("ffn", 1, "an array's axis 'ffn' of 1 cannot be split over 4 devices"),  # one tile of scales
    ],
)
def test_an_axis_that_does_not_divide_is_refused(name, size, message):
    with pytest.raises(ConfigError) as caught:
        parts("model:4", Rules(ffn=SHARD, gate_up=SHARD), ("embed", name), np.zeros((2, size)))
    assert str(caught.value) == message


def _stored(form: str, stack: tuple[int, ...], k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes and scales of a [..., k, n] matrix."""
    rng = np.random.default_rng(0)
    if form == "fp8":
        codes = rng.normal(size=(*stack, k, n)).astype(ml_dtypes.float8_e4m3fn)
        return codes, rng.uniform(1, 2, (*stack, k // 128, n // 128)).astype(np.float32)
    codes = rng.integers(-128, 128, (*stack, k // 2, n)).astype(np.int8)
    return codes, rng.integers(120, 130, (*stack, k // 32, n)).astype(np.uint8)


@pytest.mark.parametrize(
    ("form", "stack", "size", "axes"),
    [
        ("fp8", (), (512, 256), ("ffn", "embed")),
        ("fp8", (), (128, 1024), ("embed", "gate_up")),
        ("fp8", (4,), (256, 128), ("group", None, None)),
        ("fp4", (2,), (128, 16), ("expert", "expert_ffn", "embed")),
        ("fp4", (2,), (64, 16), ("expert", "embed", "expert_gate_up")),
        ("fp4", (4,), (64, 16), ("expert", "embed", "expert_gate_up")),
    ],
)
def test_stored_codes_and_scales_are_cut_alike(form, stack, size, axes):
    """What a device's codes and scales stand for is its part of what the whole ones stand for."""
    of_rules = Rules(ffn=SHARD, gate_up=SHARD, group=SHARD, expert_ffn=SHARD, expert_gate_up=SHARD)
    if stack == (4,) and form == "fp4":
        of_rules = Rules(expert=ALL)
    codes, scales = _stored(form, stack, *size)
    float32 = jnp.dtype("float32")
    weight = np.asarray(dequantize(jnp.asarray(codes), jnp.asarray(scales), float32))
    assert weight.shape == (*stack, *size) and len(np.unique(weight)) > 10
    want, codes, scales = (parts("model:4", of_rules, axes, array, kv=2) for array in (weight, codes, scales))
    assert all(part.size == weight.size // 4 for part in want.values())
    for place, part in want.items():
        got = dequantize(jnp.asarray(codes[place]), jnp.asarray(scales[place]), float32)
        np.testing.assert_array_equal(np.asarray(got), part)


def test_scales_with_too_few_tiles_are_refused():
    """Each device would need half a tile's scale: the codes divide, the scales do not."""
    codes, scales = _stored("fp8", (), 256, 128)
    of_rules = Rules(ffn=SHARD)
    assert len(parts("model:4", of_rules, ("ffn", "embed"), codes)) == 4
    with pytest.raises(ConfigError, match="an array's axis 'ffn' of 2 cannot be split over 4 devices"):
        parts("model:4", of_rules, ("ffn", "embed"), scales)
