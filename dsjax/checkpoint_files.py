"""Safetensors shards of one folder: lazily read, written with an index.  [no jax]

The library opens and checks each file; the bytes are mapped by numpy, because the library's numpy reader knows
neither bfloat16 nor the float8 types.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dsjax.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a shard: its file, byte offset there, dtype as the header spells it, and shape."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """A read-only array mapped from the file."""
        dtype = DTYPES[self.dtype]
        if self.nbytes == 0:
            return np.empty(self.shape, dtype)
        raw = np.memmap(self.file, np.uint8, "r", self.offset, self.nbytes)
        return np.asarray(raw).view(dtype).reshape(self.shape)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


def open_shards(path: str | Path) -> tuple[dict[str, Stored], list[str]]:
    """({tensor name as stored: Stored}, problems) of the checkpoint in folder `path`.

    The shards are those the index names, or every model*.safetensors without one. A shard that is missing or cut, and a
    tensor held twice, is a problem. Raises ConfigError if there is no shard at all or the index cannot be read.
    """
    folder = Path(path)
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            files = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
    else:
        files = sorted(f.name for f in folder.glob("model*.safetensors"))
    if not files:
        raise ConfigError(f"model={str(path)!r} holds no model*.safetensors")
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    for name in files:
        file = folder / name
        if not file.is_file():
            problems.append(f"shard {name} is missing ({INDEX_NAME} names it)")
            continue
        try:
            found = _open_shard(file)
        except ConfigError as error:
            problems.append(str(error))
            continue
        for tensor, stored in found.items():
            if tensor in tensors:
                problems.append(f"tensor {tensor} is in both {tensors[tensor].file.name} and {name}")
            tensors[tensor] = stored
    return tensors, problems


def _open_shard(file: Path) -> dict[str, Stored]:
    """The tensors of one shard. Raises ConfigError if it is cut short or is not a safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"shard {file.name} is truncated: {size} bytes do not hold its header")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            start = 8 + length
            found = {
                name: Stored(
                    file,
                    start + entry["data_offsets"][0],
                    entry["data_offsets"][1] - entry["data_offsets"][0],
                    entry["dtype"],
                    tuple(entry["shape"]),
                )
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"shard {file.name} is not a safetensors file: {error!r}") from error
    cut = [(s.offset, name) for name, s in found.items() if s.offset + s.nbytes > size]
    if cut:
        needed = max(s.offset + s.nbytes for s in found.values())
        raise ConfigError(
            f"shard {file.name} is truncated: {size} bytes, its header needs {needed}; "
            f"the first of {len(cut)} cut tensors is {min(cut)[1]}"
        )
    try:
        with safe_open(file, framework="numpy"):  # checks overlaps, gaps, and shapes against bytes
            pass
    except SafetensorError as error:
        raise ConfigError(f"shard {file.name} is not a valid safetensors file: {error}") from error
    return found


def write_shards(path: str | Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Writes (name, array) pairs as model.safetensors, or as shards of at most `max_shard_bytes` with an index.

    A tensor larger than that has a shard of its own. Holds one shard in memory.
    """
    folder = Path(path)
    shards: list[list[str]] = []
    sizes: list[int] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        save_file(pending, folder / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, array in tensors:
        if pending and sum(a.nbytes for a in pending.values()) + array.nbytes > max_shard_bytes:
            flush()
        pending[name] = np.ascontiguousarray(array)
        sizes.append(array.nbytes)
    flush()
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{i}.safetensors").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
