"""A model whose weights stay in FP8 and FP4 computes what it does with them widened at load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from dsjax import checkpoint, quant
from dsjax.config import ModelConfig
from dsjax.load import keeps_stored
from dsjax.model.build import abstract, assemble
from dsjax.verify import verify
from tests.checkpoint_tools import E4M3, Tensors, tensors_of, write
from tests.golden_sets import golden

FLOAT32 = np.dtype("float32")


def logits(folder: Path, config: ModelConfig, stored: bool, ids: np.ndarray) -> np.ndarray:
    params = checkpoint.load_params(folder, config, stored=stored, include_mtp=False)
    graph, state = assemble(config, params, FLOAT32, with_mtp=False, stored=stored)
    return np.asarray(jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))(state, ids))


def test_golden_logits_of_a_stored_model():
    results = list(verify(golden("q1_fp8fp4"), ("full",), weight_format="stored"))
    assert [r for r in results if not r.passes(2e-4)] == [] and all(r.mtp_difference is not None for r in results)


def test_stored_equals_widened():
    folder = golden("q1_fp8fp4")
    config, ids = ModelConfig.from_dir(folder), np.load(folder / "golden.npz")["p0_ids"]
    # the same numbers go into the matmuls; XLA may fuse their sums in another order
    np.testing.assert_allclose(logits(folder, config, True, ids), logits(folder, config, False, ids), atol=1e-5)


def test_experts_in_fp8_with_float32_scales(tmp_path: Path):
    """As in the -Base checkpoints."""
    folder = golden("q1_fp8fp4")
    config, ids = ModelConfig.from_dir(folder), np.load(folder / "golden.npz")["p2_ids"]
    base: Tensors = {}
    for name, tensor in tensors_of(folder).items():
        scale = name.replace("weight", "scale")
        if tensor.dtype == np.int8:
            values = quant.dequantize_fp4(tensor, tensors_of(folder)[scale])
            largest = np.abs(values).max() / 448 * 1.1
            base[name] = (values / largest).astype(E4M3)
            base[scale] = np.full(quant.fp8_scale_shape(values.shape), largest, np.float32)
        elif ".ffn.experts." not in name:
            base[name] = tensor
    config = dataclasses.replace(config, expert_dtype=None)
    write(tmp_path / "base", base, config)
    np.testing.assert_allclose(
        logits(tmp_path / "base", config, True, ids), logits(tmp_path / "base", config, False, ids), atol=1e-5
    )


@pytest.mark.parametrize("stored", [False, True])
def test_the_abstract_model_has_the_loaders_shapes(stored):
    folder = golden("q1_fp8fp4")
    config = ModelConfig.from_dir(folder)
    _, state = abstract(config, FLOAT32, with_mtp=True, stored=stored)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    want = checkpoint.expected_params(config, True, stored=stored)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {path: shape for path, (shape, _) in want.items()}
    assert all(want[path][1] in (str(leaf.dtype), "model") for path, leaf in leaves.items())
    assert all(len(leaf.get_metadata()["logical_axes"]) == len(leaf.shape) for leaf in leaves.values())


def test_auto_widens_on_cpus_alone():
    assert [keeps_stored("auto", p) for p in ("cpu", "tpu", "cuda", "gpu")] == [False, True, True, True]
    assert keeps_stored("stored", "cpu") and not keeps_stored("widened", "tpu")
