"""DeepSeek-V4 checkpoints: read into the model's parameters, and written.  [no jax]

`open_params` checks every tensor's presence, dtype and shape from the headers and reads none; a parameter is made when
it is asked for, so the peak is one parameter and one dequantised tensor.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from dsjax import quant
from dsjax.checkpoint_files import INDEX_NAME, Stored, open_shards, write_shards
from dsjax.checkpoint_names import (
    Param,
    Source,
    SourceKind,
    expected_params,
    is_transformers_naming,
    released_params,
    stored_params,
    transformers_params,
)
from dsjax.config import ModelConfig
from dsjax.errors import ConfigError

__all__ = ["expected_params", "has_mtp", "load_params", "open_params", "save_checkpoint"]

logger = logging.getLogger(__name__)

_PARAM_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_FLOATS = ("F32", "BF16")
_ALLOWED = {
    SourceKind.F32: _FLOATS,
    SourceKind.FLOAT: _FLOATS,
    SourceKind.LINEAR: (*_FLOATS, "F8_E4M3"),
    SourceKind.EXPERT: (*_FLOATS, "F8_E4M3", "I8"),
    SourceKind.IDS: ("I64", "I32"),
}
_CODES = {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}  # policy of a parameter kept as stored -> dtype of its tensors
_MAX_LISTED = 5


def has_mtp(path: str | Path) -> bool:
    """Whether the checkpoint in folder `path` holds the multi-token-prediction block that dsjax can run.

    Checkpoints of test models announce it in config.json and leave it out; a DSpark drafter uses the same prefix.
    """
    tensors, problems = open_shards(path)
    _raise_if(path, problems)
    return _has_mtp(path, _without_prefix(tensors))


def load_params(path: str | Path, config: ModelConfig, dtype: str = "float32", **options: Any) -> dict[str, np.ndarray]:
    """{dotted path: array} of every parameter of the checkpoint in folder `path`: `open_params`, all read."""
    return dict(open_params(path, config, dtype, **options))


class CheckpointParams(Mapping[str, np.ndarray]):
    """{dotted path: array}, each made from the files whenever it is asked for."""

    def __init__(self, params: list[Param], make: Callable[[Param], np.ndarray]):
        self._params, self._make = {p.path: p for p in params}, make

    def __getitem__(self, path: str) -> np.ndarray:
        return self._make(self._params[path])

    def __contains__(self, path: object) -> bool:
        return path in self._params  # Mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def open_params(
    path: str | Path,
    config: ModelConfig,
    dtype: str = "float32",
    *,
    include_mtp: bool = True,
    stored: bool = False,
    progress: bool = False,
) -> CheckpointParams:
    """Every parameter of the checkpoint in folder `path`, checked now and read when asked for.

    Quantised weights are decoded or, with `stored`, are two parameters, codes and scale, whose bytes are untouched.
    `dtype` ("float32" or "bfloat16") is that of the "model" parameters of `expected_params`. The MTP block is among
    them if it is wanted, announced by `config` and there (`has_mtp`). Raises ConfigError listing what is missing,
    superfluous, of another shape or dtype, or cut short.
    """
    if dtype not in _PARAM_DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(_PARAM_DTYPES)}")
    found, problems = open_shards(path)
    _raise_if(path, problems)  # a lost shard makes hundreds of missing tensors: report the cause alone
    tensors = _without_prefix(found)
    if len(tensors) != len(found):
        twice = sorted(name for name in tensors if name in found and f"model.{name}" in found)
        _raise_if(path, [f"tensor {name} is there with and without the prefix 'model.'" for name in twice])
    mtp = _has_mtp(path, tensors)
    if not mtp or not include_mtp or not config.num_nextn_predict_layers:
        if not mtp and any(name.startswith("mtp.") for name in tensors):
            logger.info("%s: its mtp.* tensors are a DSpark drafter, which is not supported: ignored", path)
        tensors = {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
        mtp = False
    make = transformers_params if is_transformers_naming(set(tensors)) else released_params
    params = make(config, mtp)
    if stored:
        params = stored_params(config, params)
    _raise_if(path, _check(params, tensors))
    total = sum(tensors[s.name].nbytes for p in params for s in p.sources if s.kind is not SourceKind.SCALE)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress)
    return CheckpointParams(params, lambda param: _assemble(param, tensors, dtype, config.n_routed_experts, bar))


def _without_prefix(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    return {name.removeprefix("model."): t for name, t in stored.items()}


def _has_mtp(path: str | Path, tensors: Mapping[str, Stored]) -> bool:
    file = Path(path) / "config.json"
    if file.is_file() and "dspark_block_size" in json.loads(file.read_text()):
        return False
    return "mtp.0.main_proj.weight" not in tensors and any(name.startswith("mtp.0.") for name in tensors)


def _raise_if(path: str | Path, problems: list[str]) -> None:
    if not problems:
        return
    more = len(problems) - _MAX_LISTED
    listed = "; ".join(problems[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError(f"checkpoint {str(path)!r} has {count}: {listed}")


def _scale_name(weight: str, tensors: Mapping[str, Stored]) -> str | None:
    """The tensor with the scales of `weight`, under either of its names."""
    stem = weight.removesuffix("weight")
    return next((name for name in (f"{stem}scale", f"{stem}weight_scale_inv") if name in tensors), None)


def _check(params: list[Param], tensors: Mapping[str, Stored]) -> list[str]:
    """Every difference between what `params` need and `tensors`, one sentence each."""
    problems: list[str] = []
    used: set[str] = set()
    for policy, source in ((p.policy, s) for p in params for s in p.sources if s.kind is not SourceKind.SCALE):
        found = tensors.get(source.name)
        if found is None:
            problems.append(f"tensor {source.name} is missing, expected {list(source.shape)}")
            continue
        used.add(source.name)
        if source.kind is SourceKind.CODES:
            if found.dtype != _CODES[policy]:
                problems.append(
                    f"tensor {source.name} has dtype {found.dtype}, expected {_CODES[policy]} as config.json says "
                    "(weight_format='widened' takes any)"
                )
                continue
        elif found.dtype not in _ALLOWED[source.kind]:
            allowed = ", ".join(_ALLOWED[source.kind])
            problems.append(f"tensor {source.name} has dtype {found.dtype}, expected one of {allowed}")
            continue
        shape = source.shape
        if found.dtype == "I8":
            shape = (shape[0], quant.ceil_div(shape[1], 2))  # two columns a byte
        if found.shape != shape:
            problems.append(f"tensor {source.name} has shape {list(found.shape)}, expected {list(shape)}")
        if found.dtype not in ("F8_E4M3", "I8"):
            continue
        name = _scale_name(source.name, tensors)
        fp4 = found.dtype == "I8"
        scale_shape = (quant.fp4_scale_shape if fp4 else quant.fp8_scale_shape)(source.shape)
        if name is None:
            name = source.name.removesuffix("weight") + "scale"
            problems.append(
                f"tensor {name} is missing, expected {list(scale_shape)}: {source.name} is {found.dtype} and needs it"
            )
            continue
        used.add(name)
        allowed = ("F8_E8M0",) if fp4 else ("F8_E8M0", "F32")
        if tensors[name].dtype not in allowed:
            problems.append(f"tensor {name} has dtype {tensors[name].dtype}, expected one of {', '.join(allowed)}")
        elif tensors[name].shape != scale_shape:
            problems.append(f"tensor {name} has shape {list(tensors[name].shape)}, expected {list(scale_shape)}")
    problems += [f"tensor {name} {t} is not part of the model" for name, t in tensors.items() if name not in used]
    return problems


def _assemble(param: Param, tensors: Mapping[str, Stored], dtype: str, num_experts: int, bar: Any) -> np.ndarray:
    out = np.empty(param.shape, _PARAM_DTYPES[dtype] if param.policy == "model" else np.dtype(param.policy))
    oriented = param.oriented(out)
    for source in param.sources:
        values = _read(source, tensors)
        if source.kind is SourceKind.IDS and not 0 <= values.min() <= values.max() < num_experts:
            raise ConfigError(
                f"tensor {source.name} holds expert ids {values.min()}..{values.max()}, "
                f"expected 0..{num_experts - 1} (n_routed_experts={num_experts})"
            )
        piece = oriented[source.index]
        piece[...] = values.reshape(piece.shape)
        bar.update(tensors[source.name].nbytes if source.kind is not SourceKind.SCALE else 0)
    if bar.n >= bar.total:
        bar.close()
    return out


def _read(source: Source, tensors: Mapping[str, Stored]) -> np.ndarray:
    """The values of one tensor, dequantised, in its own layout; or its codes, or its scale."""
    stored = tensors[source.name]
    values = stored.read()
    if stored.dtype not in ("F8_E4M3", "I8") or source.kind is SourceKind.CODES:
        return values
    name = _scale_name(source.name, tensors)
    assert name is not None  # _check has seen it
    scale = tensors[name].read()
    if source.kind is SourceKind.SCALE:
        return scale.view(np.uint8) if stored.dtype == "I8" else quant.scale_values(scale)
    return quant.dequantize_fp4(values, scale) if stored.dtype == "I8" else quant.dequantize_fp8(values, scale)


def save_checkpoint(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes `params` ({dotted path: array}, as `load_params` returns) in the released layout to folder `path`.

    `dtype` is that of unquantised weights; mHC parameters, sinks, ape and router biases stay float32. With
    `quantization` "fp8" linears become FP8 and experts FP4, both with power-of-two scales. config.json announces MTP
    only if `params` hold it. Raises ConfigError if the parameters are not those of `config`, or the folder already
    holds weights.
    """
    if dtype not in _PARAM_DTYPES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(_PARAM_DTYPES)}")
    if quantization not in (None, "fp8"):
        raise ConfigError(f"quantization={quantization!r} must be 'fp8' or None")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    folder = Path(path)
    if (folder / INDEX_NAME).exists() or any(folder.glob("model*.safetensors")):
        raise ConfigError(f"folder {str(path)!r} already holds a checkpoint: save to an empty one")
    mtp = any(name.startswith("mtp.") for name in params)
    table = released_params(config, mtp)
    problems = [
        f"parameter {p.path} is missing, expected {list(p.shape)}"
        if p.path not in params
        else f"parameter {p.path} has shape {list(params[p.path].shape)}, expected {list(p.shape)}"
        for p in table
        if p.path not in params or tuple(params[p.path].shape) != p.shape
    ]
    problems += [f"parameter {name} is not part of the model" for name in params.keys() - {p.path for p in table}]
    _raise_if(path, problems)
    written = dataclasses.replace(
        config,
        dtype=dtype,
        quant_method=quantization,
        expert_dtype="fp4" if quantization else None,
        num_nextn_predict_layers=int(mtp),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written.to_dict(), indent=1) + "\n")
    write_shards(folder, _released_tensors(table, params, dtype, quantization), max_shard_bytes)


def _released_tensors(
    table: list[Param], params: Mapping[str, Any], dtype: str, quantization: str | None
) -> Iterator[tuple[str, np.ndarray]]:
    for param in table:
        oriented = param.oriented(np.asarray(params[param.path]))
        for source in param.sources:
            values = np.ascontiguousarray(oriented[source.index].reshape(source.shape))
            scale = source.name.removesuffix("weight") + "scale"
            if source.kind is SourceKind.IDS:
                yield source.name, values.astype(np.int64)
            elif source.kind is SourceKind.F32:
                yield source.name, values.astype(np.float32)
            elif quantization and source.kind in (SourceKind.LINEAR, SourceKind.EXPERT):
                encode = quant.quantize_fp4 if source.kind is SourceKind.EXPERT else quant.quantize_fp8
                weight, scales = encode(values.astype(np.float32))
                yield source.name, weight
                yield scale, scales
            else:
                yield source.name, values.astype(_PARAM_DTYPES[dtype])
