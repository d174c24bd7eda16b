"""Small checkpoints with random values for the tests of loading and saving."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from configs.models import MODELS
from dsjax.checkpoint import expected_params, save_checkpoint
from dsjax.checkpoint_files import open_shards
from dsjax.config import LayerKind, ModelConfig

BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
CONFIG = MODELS["tiny-mixed"]()
# One CSA layer with hash routing: the least that has every kind of tensor but router bias and HCA.
SMALL = dataclasses.replace(CONFIG, layer_kinds=(LayerKind.CSA,), num_nextn_predict_layers=0)
DTYPES = {"float32": np.float32, "int32": np.int32, "model": np.float32}
WQ_A = "layers.0.attn.wq_a.weight"

Tensors = dict[str, np.ndarray]


def random_params(config: ModelConfig, include_mtp: bool = False) -> Tensors:
    rng = np.random.default_rng(0)
    out = {}
    for path, (shape, policy) in expected_params(config, include_mtp).items():
        ids = rng.integers(0, config.n_routed_experts, shape)
        out[path] = ids.astype(np.int32) if policy == "int32" else rng.standard_normal(shape).astype(np.float32)
    return out


def tensors_of(folder: Path) -> Tensors:
    tensors, problems = open_shards(folder)
    assert problems == []
    return {name: stored.read() for name, stored in tensors.items()}


def write(folder: Path, tensors: Tensors, config: ModelConfig = SMALL) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def assert_same(a: Tensors, b: Tensors) -> None:
    assert list(a) == list(b)
    for path in a:
        assert a[path].dtype == b[path].dtype and a[path].shape == b[path].shape, path
        assert a[path].tobytes() == b[path].tobytes(), path


def small_tensors() -> Tensors:
    """SMALL's tensors in the released layout, float32."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, SMALL, random_params(SMALL), dtype="float32")
        return {name: t.copy() for name, t in tensors_of(Path(folder)).items()}
