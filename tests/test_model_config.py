"""A model's config.json: what is wrong with it is one sentence of file, field, value and limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from tests.tiny_model import tiny_config

WHOLE = "must be a whole number in"


def _write(folder: Path, data: bytes | str) -> Path:
    file = folder / "config.json"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": ', "is not JSON: Expecting value: line 1 column 7 (char 6)"),
        (b"[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
        (b"\xff\xfe", "is not UTF-8: byte 0 is 0xff"),
        (b"[]", "must hold a JSON object, not []"),
        (b"null", "must hold a JSON object, not null"),
        (b'"' + b"x" * 100 + b'"', f'must hold a JSON object, not "{"x" * 39}...'),
    ],
)
def test_a_file_that_is_no_json_object(data, sentence, tmp_path):
    file = _write(tmp_path, data)
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_dir(tmp_path)
    assert str(raised.value).startswith(f"{file} {sentence}")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("hidden_size", "x", f'hidden_size="x" {WHOLE} [1, 2147483647]'),
        ("hidden_size", 0, f"hidden_size=0 {WHOLE} [1, 2147483647]"),
        ("hidden_size", True, f"hidden_size=true {WHOLE} [1, 2147483647]"),
        ("hidden_size", {"a": "b" * 99}, f'hidden_size={{"a": "{"b" * 33}... {WHOLE} [1, 2147483647]'),
        ("max_position_embeddings", 1e12, f"max_position_embeddings=1000000000000.0 {WHOLE} [1, 2147483647]"),
        ("max_position_embeddings", 10**12, f"max_position_embeddings=1000000000000 {WHOLE} [1, 2147483647]"),
        ("vocab_size", 1e9, f"vocab_size=1000000000.0 {WHOLE} [1, 2147483647]"),
        ("num_hidden_layers", 1e8, f"num_hidden_layers=100000000.0 {WHOLE} [1, 2147483647]"),
        ("num_hidden_layers", -1, f"num_hidden_layers=-1 {WHOLE} [1, 2147483647]"),
        ("index_topk", [64], f"index_topk=[64] {WHOLE} [0, 2147483647]"),
        ("num_hash_layers", -1, f"num_hash_layers=-1 {WHOLE} [0, 2147483647]"),
        ("eos_token_id", "a", f'eos_token_id="a" {WHOLE} [0, 255]'),
        ("eos_token_id", 999999, f"eos_token_id=999999 {WHOLE} [0, 255]"),
        ("eos_token_id", 256, f"eos_token_id=256 {WHOLE} [0, 255]"),
        ("eos_token_id", -1, f"eos_token_id=-1 {WHOLE} [0, 255]"),
        ("eos_token_id", [1, 1.5], f"eos_token_id=1.5 {WHOLE} [0, 255]"),
        ("bos_token_id", "a", f'bos_token_id="a" {WHOLE} [0, 2147483647]'),
        ("bos_token_id", 256, f"bos_token_id=256 {WHOLE} [0, 255]"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps=NaN must be a number in (0, 1]"),
        ("rms_norm_eps", "1e-6", 'rms_norm_eps="1e-6" must be a number in (0, 1]'),
        ("hc_eps", float("inf"), "hc_eps=Infinity must be a number in (0, 1]"),
        ("rope_theta", 0, "rope_theta=0 must be a number in (1, 1e+30]"),
        ("rope_theta", -1, "rope_theta=-1 must be a number in (1, 1e+30]"),
        ("compress_rope_theta", 1, "compress_rope_theta=1 must be a number in (1, 1e+30]"),
        ("routed_scaling_factor", 10**400, f"routed_scaling_factor=1{'0' * 39}... must be a number in (0, 1e+30]"),
        ("swiglu_limit", -1, "swiglu_limit=-1 must be a number in (0, 1e+30]"),
        ("rope_scaling", "yarn", 'rope_scaling="yarn" must be an object'),
        ("rope_scaling", {"type": "yarn", "factor": "x"}, 'rope_scaling.factor="x" must be a number in (0, 1e+30]'),
        ("rope_scaling", {"type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
         f"rope_scaling.original_max_position_embeddings=0 {WHOLE} [1, 2147483647]"),
        ("rope_scaling", {"type": "yarn", "factor": None, "original_max_position_embeddings": 8},
         "rope_scaling lacks 'factor'"),
        ("rope_parameters", {"main": 5}, "rope_parameters.main=5 must be an object"),
        ("rope_parameters", {"main": {"rope_theta": 0}},
         "rope_parameters.main.rope_theta=0 must be a number in (1, 1e+30]"),
        ("compress_ratios", 4, "compress_ratios=4 must be a list"),
        ("compress_ratios", [0, [4]], f"compress_ratios[1]=[4] {WHOLE} [0, 2147483647]"),
        ("compress_rates", {"compressed_sparse_attention": 0},
         f"compress_rates.compressed_sparse_attention=0 {WHOLE} [1, 2147483647]"),
        ("layer_types", 3, "layer_types=3 must be a list"),
        ("mlp_layer_types", "moe", 'mlp_layer_types="moe" must be a list'),
        ("torch_dtype", "foo", 'torch_dtype="foo" must be one of float32, bfloat16, float16'),
        ("quantization_config", "fp8", 'quantization_config="fp8" must be an object'),
        ("expert_dtype", 4, "expert_dtype=4 must be a string"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_it_must_be(name: str, value: Any, sentence: str, tmp_path: Path):
    raw = tiny_config().to_dict() | {"vocab_size": 256, name: value}
    file = _write(tmp_path, json.dumps(raw))
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_dir(tmp_path)
    assert str(raised.value) == f"{file}: {sentence}"


def test_null_is_absent_and_whole_numbers_are_numbers(tmp_path):
    config = tiny_config()
    nulls = {
        "swiglu_limit": None,
        "rope_scaling": None,
        "eos_token_id": None,
        "hc_eps": None,
        "quantization_config": None,
    }
    _write(tmp_path, json.dumps(config.to_dict() | {"routed_scaling_factor": 2, "rope_theta": 10000} | nulls))
    read = ModelConfig.from_dir(tmp_path)
    assert (read.routed_scaling_factor, read.rope_theta, read.hc_eps) == (2, 10000, 1e-6)
    assert (read.swiglu_limit, read.yarn, read.eos_token_ids) == (0, None, ())
