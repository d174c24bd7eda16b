"""Saved checkpoints: dtypes, quantisation, and that loading gives back what was saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dsjax.checkpoint import load_params, save_checkpoint
from dsjax.checkpoint_files import open_shards
from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from tests.checkpoint_tools import (
    BF16,
    CONFIG,
    SMALL,
    assert_same,
    random_params,
)
from tests.golden_sets import golden


def test_saving_in_bfloat16_keeps_the_sensitive_ones_in_float32(tmp_path: Path):
    params = random_params(CONFIG, include_mtp=True)
    save_checkpoint(tmp_path, CONFIG, params)
    stored, _ = open_shards(tmp_path)
    dtypes = {name: t.dtype for name, t in stored.items()}
    kept = {n for n, dtype in dtypes.items() if dtype == "F32"}
    assert kept == {n for n in dtypes if "hc_" in n or n.endswith(("attn_sink", ".ape", "gate.bias"))}
    assert {n for n, dtype in dtypes.items() if dtype == "I64"} == {"layers.0.ffn.gate.tid2eid"}
    loaded = load_params(tmp_path, CONFIG)
    np.testing.assert_array_equal(loaded["mtp.block.ffn.gate.bias"], params["mtp.block.ffn.gate.bias"])
    np.testing.assert_array_equal(loaded["head.kernel"], params["head.kernel"].astype(BF16).astype(np.float32))
    assert ModelConfig.from_dir(tmp_path) == dataclasses.replace(CONFIG, dtype="bfloat16")


def test_saving_quantised_keeps_values_that_were_quantised(tmp_path: Path):
    folder = golden("q1_fp8fp4")
    config = ModelConfig.from_dir(folder)
    params = load_params(folder, config)
    save_checkpoint(tmp_path, config, params, quantization="fp8")
    assert ModelConfig.from_dir(tmp_path) == config
    stored, original = open_shards(tmp_path)[0], open_shards(folder)[0]
    assert {n: (t.dtype, t.shape) for n, t in stored.items()} == {n: (t.dtype, t.shape) for n, t in original.items()}
    assert_same(load_params(tmp_path, config), params)


def test_saving_ragged_shapes_quantised(tmp_path: Path):
    save_checkpoint(tmp_path / "a", CONFIG, random_params(CONFIG), quantization="fp8", dtype="float32")
    once = load_params(tmp_path / "a", CONFIG)  # 48 columns: one and a half FP4 groups
    save_checkpoint(tmp_path / "b", CONFIG, once, quantization="fp8", dtype="float32")
    assert_same(load_params(tmp_path / "b", CONFIG), once)


def test_saving_refuses_wrong_parameters_and_a_used_folder(tmp_path: Path):
    params = random_params(SMALL)
    wrong = params | {"head.kernel": params["head.kernel"].T, "extra": np.zeros(1)}
    del wrong["norm.scale"]
    with pytest.raises(ConfigError) as error:
        save_checkpoint(tmp_path / "a", SMALL, wrong)
    assert "3 problems: parameter head.kernel has shape [256, 48], expected [48, 256]; " in str(error.value)
    assert "parameter norm.scale is missing, expected [48]; parameter extra is not part of the model" in str(
        error.value
    )
    assert not (tmp_path / "a").exists()
    save_checkpoint(tmp_path / "a", SMALL, params)
    with pytest.raises(ConfigError, match="already holds a checkpoint: save to an empty one"):
        save_checkpoint(tmp_path / "a", SMALL, params)
    with pytest.raises(ConfigError, match="dtype='float16' must be one of float32, bfloat16"):
        save_checkpoint(tmp_path / "b", SMALL, params, dtype="float16")
    with pytest.raises(ConfigError, match="quantization='int8' must be 'fp8' or None"):
        save_checkpoint(tmp_path / "b", SMALL, params, quantization="int8")
    with pytest.raises(ConfigError, match="max_shard_bytes=0 must be at least 1"):
        save_checkpoint(tmp_path / "b", SMALL, params, max_shard_bytes=0)
