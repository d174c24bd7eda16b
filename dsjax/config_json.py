"""Reads config.json and checks what each of its fields is, before anything is done with it.  [no jax]

A field that is null counts as absent. What the fields must be to each other is ModelConfig's to check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsjax.errors import ConfigError

MAX_WHOLE = (1 << 31) - 1  # sizes and positions are int32 on the device
MAX_NUMBER = 1e30  # of what is a float32 there

_WHOLE = {
    1: "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups "
    "o_lora_rank moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok sliding_window hc_mult "
    "hc_sinkhorn_iters max_position_embeddings",
    0: "num_hash_layers num_nextn_predict_layers index_n_heads index_head_dim index_topk bos_token_id",
}
_NUMBERS = {
    (0, MAX_NUMBER): "routed_scaling_factor",
    (0, 1): "rms_norm_eps hc_eps partial_rotary_factor",
    (1, MAX_NUMBER): "rope_theta compress_rope_theta",
}
_YARN = ("original_max_position_embeddings", "factor", "beta_fast", "beta_slow")
_DTYPES = ("float32", "bfloat16", "float16")


def read_object(file: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ConfigError that names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {_short(value)}")
    return value


def check_fields(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the first field of config.json that is not what it must be."""
    for low, names in _WHOLE.items():
        for name in names.split():
            check_whole(name, raw.get(name), low)
    for (low, high), names in _NUMBERS.items():
        for name in names.split():
            check_number(name, raw.get(name), low, high)
    if raw.get("swiglu_limit") != 0:  # which is none
        check_number("swiglu_limit", raw.get("swiglu_limit"), 0, MAX_NUMBER)
    for name in ("layer_types", "compress_ratios", "mlp_layer_types"):
        _check_kind(name, raw.get(name), list, "a list")
    for i, ratio in enumerate(raw.get("compress_ratios") or ()):
        check_whole(f"compress_ratios[{i}]", ratio, 0)
    for name in ("torch_dtype", "dtype"):
        if raw.get(name) is not None and raw[name] not in _DTYPES:
            raise ConfigError(f"{name}={_short(raw[name])} must be one of {', '.join(_DTYPES)}")
    _check_kind("expert_dtype", raw.get("expert_dtype"), str, "a string")
    _check_kind("quantization_config", raw.get("quantization_config"), dict, "an object")
    for name, rate in _object(raw, "compress_rates").items():
        check_whole(f"compress_rates.{name}", rate, 1)
    _check_rope("rope_scaling", _object(raw, "rope_scaling"))
    parameters = _object(raw, "rope_parameters")
    for name in ("main", "compress"):
        _check_rope(f"rope_parameters.{name}", _object(parameters, name, "rope_parameters."))
    _check_token_ids(raw)


def _check_rope(at: str, rope: Mapping[str, Any]) -> None:
    check_number(f"{at}.rope_theta", rope.get("rope_theta"), 1, MAX_NUMBER)
    check_whole(f"{at}.{_YARN[0]}", rope.get(_YARN[0]), 1)
    for name in _YARN[1:]:
        check_number(f"{at}.{name}", rope.get(name), 0, MAX_NUMBER)


def _check_token_ids(raw: Mapping[str, Any]) -> None:
    eos, vocab_size = raw.get("eos_token_id"), raw.get("vocab_size")
    for name, ids in (("bos_token_id", [raw.get("bos_token_id")]), ("eos_token_id", eos)):
        for token_id in ids if isinstance(ids, list) else [ids]:
            check_whole(name, token_id, 0, MAX_WHOLE if vocab_size is None else vocab_size - 1)


def check_whole(name: str, value: Any, low: int, high: int = MAX_WHOLE) -> None:
    """`value` is a whole number, written as one (1e9 is not), or None."""
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        raise ConfigError(f"{name}={_short(value)} must be a whole number in [{low}, {high}]")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """`value` is a number in (low, high], or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and low < value <= high):
        raise ConfigError(f"{name}={_short(value)} must be a number in ({low}, {high:g}]")


def _object(raw: Mapping[str, Any], name: str, at: str = "") -> Mapping[str, Any]:
    value = raw.get(name)
    _check_kind(at + name, value, dict, "an object")
    return value or {}


def _check_kind(name: str, value: Any, kind: type, words: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={_short(value)} must be {words}")


def _short(value: Any) -> str:
    """A value as JSON has it, at most 40 characters of it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."
