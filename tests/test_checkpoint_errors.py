"""Checkpoints that do not fit: each is refused with the tensor or shard, what was expected and what was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dsjax.checkpoint import expected_params, has_mtp, load_params, save_checkpoint
from dsjax.checkpoint_files import INDEX_NAME
from dsjax.errors import ConfigError
from tests.checkpoint_tools import (
    BF16,
    E4M3,
    E8M0,
    SMALL,
    WQ_A,
    Tensors,
    assert_same,
    random_params,
    small_tensors,
    write,
)


@pytest.fixture(scope="module")
def released() -> Tensors:
    return small_tensors()


def changed(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: make(tensors[name])}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def with_scale(weight: np.ndarray, scale: np.ndarray | None, name: str = WQ_A) -> Callable[[Tensors], Tensors]:
    scales = {} if scale is None else {name.replace(".weight", ".scale"): scale}
    return lambda tensors: tensors | {name: weight} | scales


W1 = "layers.0.ffn.experts.0.w1.weight"  # [32, 48]
FP8 = np.ones((32, 48), E4M3)
FP4 = np.ones((32, 24), np.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("head.weight"), "tensor head.weight is missing, expected [256, 48]"),
        (
            lambda t: t | {"layers.1.attn.wq_a.weight": t[WQ_A]},
            "tensor layers.1.attn.wq_a.weight [32, 48] F32 is not part of the model",
        ),
        (changed(WQ_A, np.transpose), f"tensor {WQ_A} has shape [48, 32], expected [32, 48]"),
        (
            changed("norm.weight", lambda t: t.astype(np.float16)),
            "tensor norm.weight has dtype F16, expected one of F32, BF16",
        ),
        (
            changed("norm.weight", lambda t: t.astype(E4M3)),
            "tensor norm.weight has dtype F8_E4M3, expected one of F32, BF16",
        ),
        (changed(WQ_A, lambda t: FP4), f"tensor {WQ_A} has dtype I8, expected one of F32, BF16, F8_E4M3"),
        (
            changed("layers.0.ffn.gate.tid2eid", lambda t: t.astype(np.float32)),
            "tensor layers.0.ffn.gate.tid2eid has dtype F32, expected one of I64, I32",
        ),
        (
            changed("layers.0.ffn.gate.tid2eid", lambda t: np.where(np.arange(2) == 1, 6, t)),
            "tensor layers.0.ffn.gate.tid2eid holds expert ids 0..6, expected 0..5 (n_routed_experts=6)",
        ),
        (
            with_scale(FP8, None),
            f"tensor layers.0.attn.wq_a.scale is missing, expected [1, 1]: {WQ_A} is F8_E4M3 and needs it",
        ),
        (
            with_scale(FP4, None, W1),
            f"tensor layers.0.ffn.experts.0.w1.scale is missing, expected [32, 2]: {W1} is I8 and needs it",
        ),
        (
            with_scale(FP8, np.ones((1, 2), E8M0)),
            "tensor layers.0.attn.wq_a.scale has shape [1, 2], expected [1, 1]",
        ),
        (
            with_scale(FP8, np.ones((1, 1), BF16)),
            "tensor layers.0.attn.wq_a.scale has dtype BF16, expected one of F8_E8M0, F32",
        ),
        (
            with_scale(FP4, np.ones((32, 2), np.float32), W1),
            "tensor layers.0.ffn.experts.0.w1.scale has dtype F32, expected one of F8_E8M0",
        ),
        (
            with_scale(np.ones((32, 48), np.int8), np.ones((32, 2), E8M0), W1),
            f"tensor {W1} has shape [32, 48], expected [32, 24]",
        ),
        (
            lambda t: t | {"layers.0.attn.wq_a.scale": np.ones((1, 1), np.float32)},
            "tensor layers.0.attn.wq_a.scale [1, 1] F32 is not part of the model",
        ),
    ],
)
def test_a_tensor_that_does_not_fit(
    tmp_path: Path, released: Tensors, change: Callable[[Tensors], Tensors], message: str
):
    folder = write(tmp_path / "c", change(released))
    with pytest.raises(ConfigError) as error:
        load_params(folder, SMALL)
    assert message in str(error.value)
    assert "problem" not in str(error.value) or f"checkpoint {str(folder)!r} has 1 problem: " in str(error.value)


def test_every_problem_counts_and_five_are_listed(tmp_path: Path, released: Tensors):
    names = [n for n in released if ".ffn.experts." in n]
    folder = write(tmp_path / "c", without(*names)(released))
    with pytest.raises(ConfigError) as error:
        load_params(folder, SMALL)
    message = str(error.value)
    assert message.startswith(
        f"checkpoint {str(folder)!r} has 18 problems: tensor {W1} is missing, expected [32, 48]; "
    )
    assert message.endswith("; and 13 more") and message.count("is missing") == 5


def test_a_missing_shard_and_a_truncated_one(tmp_path: Path):
    params = random_params(SMALL)
    save_checkpoint(tmp_path, SMALL, params, dtype="float32", max_shard_bytes=100_000)
    shards = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    assert len(shards) == 4 and shards[1] == "model-00002-of-00004.safetensors"
    assert set(json.loads((tmp_path / INDEX_NAME).read_text())["weight_map"].values()) == set(shards)
    assert_same(load_params(tmp_path, SMALL), params)

    second = tmp_path / shards[1]
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    with pytest.raises(ConfigError) as error:
        load_params(tmp_path, SMALL)
    size = len(whole)
    assert (
        f"shard {second.name} is truncated: {size - 1} bytes, its header needs {size}; the first of 1 cut tensors is "
        in str(error.value)
    )
    for cut in (0, 7, 100):
        second.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=f"shard {second.name} is truncated: {cut} bytes do not hold its header"):
            has_mtp(tmp_path)
    second.write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    with pytest.raises(ConfigError, match=f"shard {second.name} is not a safetensors file"):
        load_params(tmp_path, SMALL)
    second.write_bytes(whole + b"x")
    with pytest.raises(ConfigError, match=f"shard {second.name} is not a valid safetensors file"):
        load_params(tmp_path, SMALL)

    second.unlink()
    with pytest.raises(ConfigError, match=f"has 1 problem: shard {second.name} is missing .{INDEX_NAME} names it."):
        load_params(tmp_path, SMALL)


def test_shards_without_an_index_and_a_tensor_held_twice(tmp_path: Path, released: Tensors):
    folder = write(tmp_path / "c", without("head.weight")(released))
    save_file({"head.weight": released["head.weight"]}, folder / "model-extra.safetensors")
    assert list(load_params(folder, SMALL)) == list(expected_params(SMALL, False))
    save_file({n: released[n] for n in ("head.weight", WQ_A)}, folder / "model-extra.safetensors")
    with pytest.raises(ConfigError, match=f"tensor {WQ_A} is in both model-extra.safetensors and model.safetensors"):
        load_params(folder, SMALL)


def test_a_folder_without_weights_and_an_unreadable_index(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"holds no model\*\.safetensors"):
        load_params(tmp_path, SMALL)
    (tmp_path / INDEX_NAME).write_text("{}")
    with pytest.raises(ConfigError, match="is not a safetensors index: KeyError"):
        load_params(tmp_path, SMALL)
    with pytest.raises(ConfigError, match="dtype='float16' must be one of float32, bfloat16"):
        load_params(tmp_path, SMALL, "float16")
