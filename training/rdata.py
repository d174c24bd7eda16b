"""Reads the strings, lists and factors of R's serialised data (XDR, versions 2 and 3).

Two of the corpus' packages ship their books as R data; this reads just what they use and refuses the rest.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

_NIL, _GLOBAL_ENV, _BASE_ENV, _MISSING, _REF = 254, 253, 242, 251, 255
_SYMBOL, _PAIRLIST, _CHAR, _LOGICAL, _INTEGER, _REAL, _STRING, _LIST = 1, 2, 9, 10, 13, 14, 16, 19


@dataclass(frozen=True, kw_only=True)
class Attributed:
    """An R vector with attributes, e.g. a data frame: its columns and their names."""

    value: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)


def read_lazy_load_database(data: bytes) -> list[Any]:
    """The objects of an `Rdata.rdb` file: records of a big-endian length and a zlib stream."""
    out = []
    while data:
        inflate = zlib.decompressobj()
        record = inflate.decompress(data[4:])
        out.append(_Reader(record).read())
        data = inflate.unused_data
    return out


def read_saved(data: bytes) -> dict[str, Any]:
    """The named objects of a gzipped `.rda` file."""
    raw = gzip.decompress(data)
    if raw[:5] not in (b"RDX2\n", b"RDX3\n"):
        raise ValueError(f"not an R data file: it starts with {raw[:5]!r}")
    return dict(_Reader(raw[5:]).read())


class _Reader:
    def __init__(self, data: bytes):
        self._data = data
        self._pos = 0
        self._references: list[Any] = []

    def read(self) -> Any:
        if self._take(2) != b"X\n":
            raise ValueError("R data is not in the XDR format")
        version = self._int()
        self._take(8)  # the versions of R that wrote it and that can read it
        if version == 3:
            self._take(self._int())  # the native encoding's name
        return self._item()

    def _take(self, count: int) -> bytes:
        self._pos += count
        return self._data[self._pos - count : self._pos]

    def _int(self) -> int:
        return struct.unpack(">i", self._take(4))[0]

    def _item(self) -> Any:
        flags = self._int()
        kind, has_attributes = flags & 255, flags & 512
        if kind in (_NIL, _GLOBAL_ENV, _BASE_ENV, _MISSING):
            return None
        if kind == _REF:
            return self._references[(flags >> 8 or self._int()) - 1]
        if kind == _SYMBOL:
            self._references.append(self._item())
            return self._references[-1]
        if kind == _CHAR:
            length = self._int()
            return None if length == -1 else self._take(length).decode("utf-8")
        if kind == _PAIRLIST:
            return self._pairs(flags)
        length = self._int()
        if kind in (_LOGICAL, _INTEGER):
            value: list[Any] = list(struct.unpack(f">{length}i", self._take(4 * length)))
        elif kind == _REAL:
            value = list(struct.unpack(f">{length}d", self._take(8 * length)))
        elif kind in (_STRING, _LIST):
            value = [self._item() for _ in range(length)]
        else:
            raise ValueError(f"R data holds an object of type {kind}, which this reader does not know")
        if has_attributes:
            return Attributed(value=value, attributes=dict(self._item()))
        return value

    def _pairs(self, flags: int) -> list[tuple[str | None, Any]]:
        out = []
        while flags & 255 == _PAIRLIST:
            if flags & 512:
                self._item()
            tag = self._item() if flags & 1024 else None
            out.append((tag, self._item()))
            flags = self._int()
        return out
