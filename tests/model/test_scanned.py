"""Layers in a loop over stacked parameters compute what they do one by one: full forward against the paged step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from dsjax import checkpoint
from dsjax.config import LayerKind, ModelConfig, ParallelConfig
from dsjax.model.build import abstract, assemble
from dsjax.model.repeat import Repeat
from dsjax.verify import verify
from tests.checkpoint_tools import random_params
from tests.golden_sets import golden

FLOAT32 = np.dtype("float32")
S, C, H = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A quantised checkpoint of layers S, then C and H twice, then C, with what its own full forward computes."""
    base = ModelConfig.from_dir(golden("q1_fp8fp4"))
    config = dataclasses.replace(
        base,
        layer_kinds=(S, C, H, C, H, C),
        num_hash_layers=1,
        num_nextn_predict_layers=0,
        hca_ratio=8,
        moe_intermediate_size=256,  # two tiles of FP8 scales, for two devices
    )
    params = random_params(config)
    for path, array in params.items():
        if array.ndim > 1 and array.dtype == np.float32:
            array *= 1 / np.sqrt(array.shape[-2]) if "embedding" not in path else 1
    folder = tmp_path_factory.mktemp("pairs") / "checkpoint"
    checkpoint.save_checkpoint(folder, config, params, quantization="fp8")
    config = ModelConfig.from_dir(folder)
    assert Repeat.of(config) == Repeat(1, 2, 2)
    graph, state = assemble(config, checkpoint.load_params(folder, config), FLOAT32, with_mtp=False)
    forward = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 64).astype(np.int32)
    for at in range(56, 64):  # causal: what comes after is not seen yet
        ids[at] = np.asarray(forward(state, ids))[at - 1].argmax()
    logits = np.asarray(forward(state, ids))
    np.savez(
        folder / "golden.npz",
        p0_ids=ids[:56],
        p0_logits=logits[:56],
        p0_greedy_ids=ids[56:],
        p0_greedy_logits=logits[55:63],
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["widened", "stored"])
def test_pairs_of_csa_and_hca(pairs, weight_format):
    results = list(verify(pairs, ("paged", "chunk=7"), weight_format=weight_format, scanned=True))
    assert [r for r in results if not r.passes(2e-4)] == [] and len(results) == 2


@pytest.mark.parametrize("name", ["g3_hca", "g4_mixed"])
def test_golden_sets(name):
    results = list(verify(golden(name), ("paged",), scanned=True))
    assert [r for r in results if not r.passes(2e-4)] == []


def test_stacked_parameters_have_the_layer_axis_in_front(pairs):
    config = ModelConfig.from_dir(pairs)
    alone, stacked = (
        {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
        for _, state in (
            abstract(config, FLOAT32, with_mtp=False, stored=True, scanned=scanned) for scanned in (False, True)
        )
    )
    parts = {name: Repeat.of(config).parts(name) for name in stacked}
    assert sorted(part for names in parts.values() for part in names) == sorted(alone)
    for name, leaf in stacked.items():
        part = alone[parts[name][0]]
        rounds, axes = ((2,), ("layer",)) if name.startswith("repeated.") else ((), ())
        assert leaf.shape == (*rounds, *part.shape) and leaf.dtype == part.dtype
        assert leaf.get_metadata("logical_axes") == (*axes, *part.get_metadata("logical_axes"))


def test_what_only_single_layers_can_do():
    config = dataclasses.replace(ModelConfig.from_dir(golden("q1_fp8fp4")), layer_kinds=(S, S), num_hash_layers=0)
    graph, state = abstract(config, FLOAT32, with_mtp=False, scanned=True)
    with pytest.raises(ValueError, match="the whole-sequence forward takes a model built with scanned=False"):
        jax.eval_shape(lambda state, ids: nnx.merge(graph, state)(ids), state, np.zeros(4, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:2,model:2", "stage:2"])
def test_pairs_on_a_mesh(pairs, mesh):
    parallel = ParallelConfig.of(mesh=mesh)
    results = list(verify(pairs, ("paged",), weight_format="stored", scanned=True, parallel=parallel))
    assert [r for r in results if not r.passes(2e-4)] == []
