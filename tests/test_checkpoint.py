"""What a model consists of, and that every layout of a checkpoint gives the same parameters."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.models import MODELS
from dsjax import quant
from dsjax.checkpoint import expected_params, has_mtp, load_params, save_checkpoint
from dsjax.checkpoint_names import released_params, transformers_params
from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from tests.checkpoint_tools import (
    BF16,
    CONFIG,
    DTYPES,
    E4M3,
    SMALL,
    WQ_A,
    Tensors,
    assert_same,
    random_params,
    small_tensors,
    write,
)
from tests.golden_sets import golden, sets


@pytest.fixture(scope="module")
def released() -> Tensors:
    return small_tensors()


@pytest.mark.parametrize(
    ("name", "main", "mtp"),
    [
        ("deepseek-v4-flash", 284_332_240_471, 6_610_048_891),
        ("deepseek-v4-pro", 1_572_997_201_763, 25_840_145_979),
    ],
)
def test_parameter_counts_of_the_released_models(name: str, main: int, mtp: int):
    params = expected_params(MODELS[name](), include_mtp=True)
    counts = {"main": 0, "mtp": 0, "ids": 0}
    for path, (shape, policy) in params.items():
        counts["ids" if policy == "int32" else "mtp" if path.startswith("mtp.") else "main"] += math.prod(shape)
    assert counts == {"main": main, "mtp": mtp, "ids": 2_327_040}


def test_sources_cover_each_parameter_exactly_once():
    for params in (released_params(CONFIG, True), transformers_params(CONFIG, True)):
        for p in params:
            written = np.zeros(p.shape, np.int32)
            for source in p.sources:
                piece = p.oriented(written)[source.index]
                assert piece.size == math.prod(source.shape)
                piece += 1
            assert (written == 1).all(), p.path


@pytest.mark.parametrize("folder", sets(), ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_sets_load_with_the_expected_shapes_and_dtypes(folder: Path, dtype: str):
    config = ModelConfig.from_dir(folder)
    params = load_params(folder, config, dtype)
    mtp = folder.name in ("g7_mtp", "q1_fp8fp4")
    assert has_mtp(folder) == mtp
    kinds = DTYPES | {"model": np.dtype(BF16) if dtype == "bfloat16" else np.float32}
    assert {k: (v.shape, v.dtype) for k, v in params.items()} == {
        k: (shape, np.dtype(kinds[policy])) for k, (shape, policy) in expected_params(config, mtp).items()
    }


def test_quantised_golden_decodes_bit_exactly_into_the_layout_in_memory():
    folder = golden("q1_fp8fp4")
    params = load_params(folder, ModelConfig.from_dir(folder))
    with np.load(folder / "dequant.npz") as expected:
        np.testing.assert_array_equal(
            params["layers.1.ffn.experts.w13"][2, :, :128], expected["layers.1.ffn.experts.2.w1.weight"].T
        )
        np.testing.assert_array_equal(params["layers.1.attn.wq_b.kernel"], expected["layers.1.attn.wq_b.weight"].T)
        wo_a = expected["layers.0.attn.wo_a.weight"]  # two groups of 128 rows
        np.testing.assert_array_equal(params["layers.0.attn.wo_a.kernel"], np.stack([wo_a[:128].T, wo_a[128:].T]))


def test_power_of_two_scales_lose_nothing_in_bfloat16():
    folder = golden("q1_fp8fp4")
    config = ModelConfig.from_dir(folder)
    exact, rounded = load_params(folder, config), load_params(folder, config, "bfloat16")
    for path in exact:
        np.testing.assert_array_equal(exact[path], rounded[path].astype(exact[path].dtype), path)


def test_layouts_of_released_tensors(tmp_path: Path, released: Tensors):
    params = load_params(write(tmp_path / "c", released), SMALL)
    np.testing.assert_array_equal(params["embed.embedding"], released["embed.weight"])
    np.testing.assert_array_equal(params["head.kernel"], released["head.weight"].T)
    np.testing.assert_array_equal(params["layers.0.hc_ffn.fn"], released["layers.0.hc_ffn_fn"])
    w13, shared = params["layers.0.ffn.experts.w13"], params["layers.0.ffn.shared_experts.w13.kernel"]
    np.testing.assert_array_equal(w13[5, :, :32], released["layers.0.ffn.experts.5.w1.weight"].T)
    np.testing.assert_array_equal(w13[5, :, 32:], released["layers.0.ffn.experts.5.w3.weight"].T)
    np.testing.assert_array_equal(params["layers.0.ffn.experts.w2"][5], released["layers.0.ffn.experts.5.w2.weight"].T)
    np.testing.assert_array_equal(shared[:, 32:], released["layers.0.ffn.shared_experts.w3.weight"].T)
    np.testing.assert_array_equal(params["layers.0.attn.wo_a.kernel"][1], released["layers.0.attn.wo_a.weight"][16:].T)
    assert params["layers.0.ffn.gate.tid2eid"].dtype == np.int32
    assert released["layers.0.ffn.gate.tid2eid"].dtype == np.int64


def test_transformers_names_make_the_same_parameters(tmp_path: Path):
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
    params = random_params(config)
    tensors = {}
    for p in transformers_params(config, False):
        for s in p.sources:
            name = s.name if s.name == "lm_head.weight" else f"model.{s.name}"
            tensors[name] = p.oriented(params[p.path])[s.index].reshape(s.shape)
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 64, 48)
    assert tensors["model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight"].shape == (4, 48)
    assert_same(load_params(write(tmp_path / "c", tensors, config), config), params)


def test_released_names_may_have_the_prefix_model(tmp_path: Path, released: Tensors):
    plain = load_params(write(tmp_path / "a", released), SMALL)
    prefixed = {f"model.{name}": t for name, t in released.items()}
    assert_same(load_params(write(tmp_path / "b", prefixed), SMALL), plain)
    both = released | {"model.norm.weight": released["norm.weight"]}
    with pytest.raises(ConfigError, match=r"tensor norm\.weight is there with and without the prefix 'model\.'"):
        load_params(write(tmp_path / "c", both), SMALL)


def test_base_layout_has_fp8_experts_and_float32_scales(tmp_path: Path, released: Tensors):
    rng = np.random.default_rng(1)
    expected: Tensors = {}
    tensors = dict(released)
    for name in [WQ_A, *(n for n in released if ".ffn.experts." in n)]:
        weight = rng.standard_normal(released[name].shape).astype(E4M3)
        scale = rng.uniform(0.01, 0.1, quant.fp8_scale_shape(weight.shape)).astype(np.float32)
        tensors |= {name: weight, name.replace(".weight", ".weight_scale_inv"): scale}
        expected[name] = weight.astype(np.float32) * scale[0, 0]
    params = load_params(write(tmp_path / "c", tensors), SMALL)
    np.testing.assert_array_equal(params["layers.0.attn.wq_a.kernel"], expected[WQ_A].T)
    for e in range(6):
        for column, w in ((0, "w1"), (32, "w3")):
            np.testing.assert_array_equal(
                params["layers.0.ffn.experts.w13"][e, :, column : column + 32],
                expected[f"layers.0.ffn.experts.{e}.{w}.weight"].T,
            )


def test_progress_counts_every_weight(tmp_path: Path, released: Tensors, capsys: pytest.CaptureFixture[str]):
    folder = write(tmp_path / "c", released)
    load_params(folder, SMALL)
    assert capsys.readouterr().err == ""
    load_params(folder, SMALL, progress=True)
    assert "loading weights: 100%" in capsys.readouterr().err


def test_mtp_is_loaded_only_when_wanted_announced_and_there(tmp_path: Path):
    with_mtp = random_params(CONFIG, include_mtp=True)
    save_checkpoint(tmp_path / "mtp", CONFIG, with_mtp, dtype="float32")
    main = {k: v for k, v in with_mtp.items() if not k.startswith("mtp.")}
    assert has_mtp(tmp_path / "mtp")
    assert_same(load_params(tmp_path / "mtp", CONFIG), with_mtp)
    assert_same(load_params(tmp_path / "mtp", CONFIG, include_mtp=False), main)
    silent = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
    assert_same(load_params(tmp_path / "mtp", silent), main)
    save_checkpoint(tmp_path / "main", CONFIG, main, dtype="float32")
    assert not has_mtp(tmp_path / "main")
    assert_same(load_params(tmp_path / "main", CONFIG), main)  # announced, not there
    assert ModelConfig.from_dir(tmp_path / "mtp") == CONFIG
    assert ModelConfig.from_dir(tmp_path / "main") == silent


def test_a_dspark_drafter_is_ignored_with_one_log_line(
    tmp_path: Path, released: Tensors, caplog: pytest.LogCaptureFixture
):
    drafter: dict[str, Any] = {f"mtp.{i}.norm.weight": np.ones(48, np.float32) for i in range(3)}
    drafter["mtp.0.main_proj.weight"] = np.ones((48, 144), np.float32)
    config = dataclasses.replace(SMALL, num_nextn_predict_layers=1)
    folder = write(tmp_path / "c", released | drafter, config)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"dspark_block_size": 5}))
    assert not has_mtp(folder)
    with caplog.at_level(logging.INFO, logger="dsjax"):
        params = load_params(folder, config)
    assert list(params) == list(expected_params(config, False))
    assert [r.getMessage() for r in caplog.records] == [
        f"{folder}: its mtp.* tensors are a DSpark drafter, which is not supported: ignored"
    ]
