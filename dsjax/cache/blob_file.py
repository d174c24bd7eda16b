"""The file of one blob: safetensors, with a checksum of all its bytes and the fingerprint of what can use it.  [no jax]

    8 bytes   length of the header, little-endian
    header    JSON, padded with spaces: the arrays "0", "1", ... as safetensors has them, and under "__metadata__"
              format, fingerprint, kind, index, digest, for a STATE slot its record, and checksum
    payload   the arrays' bytes, one after the other

The checksum is BLAKE2b of the header, in which it is empty, and of the payload: no bit of the file goes unchecked.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dsjax.cache.moves import Arrays, BlobKey
from dsjax.cache.records import Record
from dsjax.cache.spec import EntryKind

SUFFIX = ".safetensors"
FORMAT = "dsjax prefix cache 1"
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_NAMES = {"float32": "F32", "bfloat16": "BF16", "uint8": "U8", "uint16": "U16", "uint32": "U32", "int64": "I64"}
_DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "I64": np.int64,
}


class Damaged(Exception):
    """A file that is not what was written."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path.name} is damaged: {reason}")
        self.path = path


class Foreign(Exception):
    """A file of another model, layout or format."""


@dataclass(frozen=True)
class Head:
    """What a file says of itself besides its arrays."""

    key: BlobKey
    fingerprint: str
    record: Record | None = None  # of a STATE slot
    num_bytes: int = 0  # of the file, where it has been read

    def metadata(self) -> dict[str, str]:
        out = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "kind": self.key.kind.value,
            "index": str(self.key.index),
            "digest": self.key.digest.hex(),
        }
        if self.record is not None:
            out["record"] = _record_to_text(self.record)
        return out

    def header(self, arrays: Arrays) -> dict[str, Any]:
        """Of the file, without its checksum."""
        header: dict[str, Any] = {"__metadata__": {**self.metadata(), "checksum": ""}}
        start = 0
        for number, array in enumerate(arrays):
            end = start + array.nbytes
            offsets = [start, end]
            header[str(number)] = {
                "dtype": _NAMES[array.dtype.name],
                "shape": list(array.shape),
                "data_offsets": offsets,
            }
            start = end
        return header

    def size(self, arrays: Arrays) -> int:
        """Bytes of the file."""
        header = self.header(arrays)
        header["__metadata__"]["checksum"] = "0" * 64
        return 8 + len(_dump(header)) + sum(array.nbytes for array in arrays)


def write(path: Path, head: Head, arrays: Arrays) -> None:
    """Raises OSError."""
    header = head.header(arrays)
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    header["__metadata__"]["checksum"] = _checksum(header, parts)
    text = _dump(header)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for part in parts:
            file.write(part.data)


def read_head(path: Path, fingerprint: str) -> Head:
    """Raises Damaged, Foreign, OSError. Does not look at the payload."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header, length = _parse_header(path, file.read(8), file.read, size)
    return _head(path, header, fingerprint, length, size)


def read(path: Path, fingerprint: str) -> Arrays:
    """The arrays, read-only. Raises Damaged (also for a file of another fingerprint), OSError."""
    data = path.read_bytes()
    header, start = _parse_header(path, data[:8], lambda length: data[8 : 8 + length], len(data))
    try:
        _head(path, header, fingerprint, start, len(data))
    except Foreign as error:
        raise Damaged(path, str(error)) from error
    checksum, as_written = header["__metadata__"].get("checksum"), _dump(header) == data[8:start]
    header["__metadata__"]["checksum"] = ""
    if not as_written or _checksum(header, [np.frombuffer(data, np.uint8, offset=start)]) != checksum:
        raise Damaged(path, "its checksum is not that of its bytes")
    arrays = []
    for number in range(len(header) - 1):
        entry = header[str(number)]
        dtype, offset = np.dtype(_DTYPES[entry["dtype"]]), start + entry["data_offsets"][0]
        count = math.prod(entry["shape"])
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(entry["shape"]))
    return tuple(arrays)


def _parse_header(path: Path, first: bytes, read_next, size: int) -> tuple[dict[str, Any], int]:
    """The header and where the payload starts."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise Damaged(path, f"{size} bytes do not hold its header")
    try:
        header = json.loads(read_next(length))
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise Damaged(path, f"its header is not JSON: {error}") from error
    return header, 8 + length


def _head(path: Path, header: dict[str, Any], fingerprint: str, start: int, size: int) -> Head:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise Foreign(f"{path.name} is not a file of this version's prefix cache")
    if metadata.get("fingerprint") != fingerprint:
        raise Foreign(f"{path.name} is of another model or cache layout")
    try:
        key = BlobKey(EntryKind(metadata["kind"]), int(metadata["index"]), bytes.fromhex(metadata["digest"]))
        record = _record_from_text(metadata["record"]) if "record" in metadata else None
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        needed = start + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Damaged(path, f"its header is incomplete: {error!r}") from error
    if needed != size:
        raise Damaged(path, f"it has {size} bytes, and its header says {needed}")
    if key.name != path.stem or (key.kind is EntryKind.STATE) != (record is not None):
        raise Damaged(path, "its header is another file's")
    return Head(key, fingerprint, record, size)


def _dump(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _checksum(header: dict[str, Any], parts: list[np.ndarray]) -> str:
    digest = hashlib.blake2b(_dump(header), digest_size=32)
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()


def _record_to_text(record: Record) -> str:
    keys = [[key.kind.value, key.index, key.digest.hex()] for key in record.keys]
    return json.dumps([record.digest.hex(), record.node.hex(), record.num_tokens, record.num_tail, keys])


def _record_from_text(text: str) -> Record:
    digest, node, num_tokens, num_tail, keys = json.loads(text)
    blobs = tuple(BlobKey(EntryKind(kind), index, bytes.fromhex(hex_digest)) for kind, index, hex_digest in keys)
    return Record(bytes.fromhex(digest), bytes.fromhex(node), num_tokens, num_tail, blobs)
