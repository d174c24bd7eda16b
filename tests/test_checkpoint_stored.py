"""Checkpoints loaded with their FP8 and FP4 weights as they are stored."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.checkpoint import expected_params, load_params, open_params, save_checkpoint
from dsjax.checkpoint_files import open_shards
from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from pallas_kernels.dequantize import dequantize
from tests.checkpoint_tools import BF16, CONFIG, SMALL, WQ_A, assert_same, random_params, tensors_of, write
from tests.golden_sets import golden


def test_codes_and_scales_are_the_files_bytes():
    folder = golden("q1_fp8fp4")
    config = ModelConfig.from_dir(folder)
    params = load_params(folder, config, stored=True)
    assert {k: (v.shape, v.dtype) for k, v in params.items()} == {
        k: (shape, np.dtype("float32" if dtype == "model" else dtype))
        for k, (shape, dtype) in expected_params(config, True, stored=True).items()
    }
    files = tensors_of(folder)
    w13, scale = params["layers.1.ffn.experts.w13"], params["layers.1.ffn.experts.w13_scale"]
    np.testing.assert_array_equal(w13[2, :, 128:], files["layers.1.ffn.experts.2.w3.weight"].T)
    np.testing.assert_array_equal(scale[2, :, 128:], files["layers.1.ffn.experts.2.w3.scale"].view(np.uint8).T)
    wo_a, scale = params["layers.0.attn.wo_a.kernel"], params["layers.0.attn.wo_a.scale"]
    np.testing.assert_array_equal(wo_a[1].T.view(np.uint8), files["layers.0.attn.wo_a.weight"][128:].view(np.uint8))
    np.testing.assert_array_equal(scale[1].T, files["layers.0.attn.wo_a.scale"][1:].astype(np.float32))
    # Quantised weights take what they take in the files; FP8's few scales are float32 instead of a byte.
    stored, _ = open_shards(folder)
    codes = sum(t.nbytes for t in stored.values() if t.dtype in ("F8_E4M3", "I8"))
    scales = {name: t.nbytes for name, t in stored.items() if t.dtype == "F8_E8M0"}
    fp4_scales = sum(n for name, n in scales.items() if ".ffn.experts." in name)
    by_type = {dtype: sum(a.nbytes for a in params.values() if a.dtype == dtype) for dtype in ("int8", "uint8")}
    fp8 = {k: a.nbytes for k, a in params.items() if a.dtype == "float8_e4m3fn"}
    assert by_type["int8"] + sum(fp8.values()) == codes
    assert by_type["uint8"] == fp4_scales
    assert sum(params[k.replace("kernel", "scale")].nbytes for k in fp8) == 4 * (sum(scales.values()) - fp4_scales)


def test_widened_on_the_device_is_widened_on_the_host():
    folder = golden("q1_fp8fp4")
    config = ModelConfig.from_dir(folder)
    stored, widened = load_params(folder, config, stored=True), load_params(folder, config)
    count = 0
    for path, array in widened.items():
        scale = path.replace("kernel", "scale") if path.endswith("kernel") else f"{path}_scale"
        if scale in stored:
            count += 1
            got = dequantize(jnp.asarray(stored[path]), jnp.asarray(stored[scale]), jnp.float32)
            np.testing.assert_array_equal(got, array, path)
        else:
            np.testing.assert_array_equal(stored[path], array, path)
    assert count == 39 and len(stored) == len(widened) + count


def test_one_parameter_at_a_time():
    folder = golden("q1_fp8fp4")
    config = ModelConfig.from_dir(folder)
    params = open_params(folder, config, stored=True, progress=True)
    assert list(params) == list(expected_params(config, True, stored=True)) and len(params) == 155
    np.testing.assert_array_equal(params["norm.scale"], params["norm.scale"])  # read twice, from the file each time
    assert "norm.scale" in params and "norm.bias" not in params


def test_an_unquantised_checkpoint_has_nothing_to_keep(tmp_path: Path):
    save_checkpoint(tmp_path, CONFIG, random_params(CONFIG, include_mtp=True))
    config = ModelConfig.from_dir(tmp_path)
    assert_same(load_params(tmp_path, config, stored=True), load_params(tmp_path, config))


def test_what_cannot_be_kept_is_refused(tmp_path: Path):
    folder = golden("q1_fp8fp4")
    config = ModelConfig.from_dir(folder)
    files = tensors_of(folder)
    widened = {n: t for n, t in files.items() if n != WQ_A.replace("weight", "scale")}
    widened[WQ_A] = files[WQ_A].astype(np.float32).astype(BF16)
    write(tmp_path / "mixed", widened, config)
    assert len(load_params(tmp_path / "mixed", config)) == 116
    with pytest.raises(ConfigError, match=r"wq_a.weight has dtype BF16, expected F8_E4M3 as config.json says"):
        load_params(tmp_path / "mixed", config, stored=True)

    save_checkpoint(tmp_path / "small", SMALL, random_params(SMALL), quantization="fp8")
    small = ModelConfig.from_dir(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"layers.0.attn.wq_a.kernel to be of whole tiles of 128 x 128, which"):
        load_params(tmp_path / "small", small, stored=True)

    fused = {"layers.0.mlp.experts.gate_up_proj": np.zeros(1, np.float32), "embed_tokens.weight": np.zeros(1)}
    write(tmp_path / "fused", {n: t.astype(np.float32) for n, t in fused.items()}, small)
    with pytest.raises(ConfigError, match="cannot keep transformers' fused experts"):
        load_params(tmp_path / "fused", small, stored=True)
