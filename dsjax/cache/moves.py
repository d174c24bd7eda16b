"""What a plan moves before its step: pages and STATE slots to the host, within the device, from the host.  [no jax]

The device does the moves of a plan in three parts: *downloads*, which read what was there before the plan; *copies*,
all of whose sources are read before any destination is written; *uploads* of host arrays. Then come the step's own
writes. So what a source is said to hold is what the device held before the plan, or a host array: where content has
itself been moved by the same plan, its first source is taken, and whoever frees a page may hand it out at once.
No destination occurs twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsjax.cache.spec import Copy, EntryKind

Arrays = tuple[np.ndarray, ...]  # a page or STATE slot on the host, as the runner reads and writes it
Source = int | Arrays  # on the device, or on the host


class BlobKey(NamedTuple):
    """Names the content of a page, or of a STATE slot, by the tokens that it was computed from."""

    kind: EntryKind
    index: int  # of the page in the sequence
    digest: bytes  # of all tokens up to where it was taken; of a full page, up to the unit that filled it

    @property
    def name(self) -> str:
        return f"{self.kind.value}-{self.index}-{self.digest.hex()}"


@dataclass(frozen=True)
class Download:
    """Page (all layers; CSA's with its index keys) or STATE slot `src` to the host, where it is `key`."""

    kind: EntryKind
    src: int
    key: BlobKey


@dataclass(frozen=True, eq=False)
class Upload:
    """Host arrays to page or STATE slot `dst`."""

    kind: EntryKind
    arrays: Arrays
    dst: int


class Moves(NamedTuple):
    """Of one data shard's plan."""

    downloads: list[Download]
    copies: list[Copy]
    uploads: list[Upload]


class Planned:
    """The moves of the plan being made."""

    def __init__(self):
        self._into: dict[tuple[EntryKind, int], Source] = {}  # by destination
        self.downloads: list[Download] = []

    def source(self, kind: EntryKind, src: int) -> Source:
        """Where the content of `src` is before this plan's moves."""
        return self._into.get((kind, src), src)

    def add(self, kind: EntryKind, source: Source, dst: int) -> Copy | None:
        """Fills `dst` from what `source` said; returns the copy that it takes, if it takes one."""
        self.forget(kind, dst)
        if isinstance(source, int):
            if source == dst:
                return None
            self._into[kind, dst] = source
            return Copy(kind, source, dst)
        self._into[kind, dst] = source
        return None

    def forget(self, kind: EntryKind, dst: int) -> None:
        """Drops a move planned for whoever held `dst` before."""
        self._into.pop((kind, dst), None)

    def take(self) -> Moves:
        """All moves, to be done before the step that is dispatched next."""
        moves = Moves(self.downloads, [], [])
        for (kind, dst), source in self._into.items():
            if isinstance(source, int):
                moves.copies.append(Copy(kind, source, dst))
            else:
                moves.uploads.append(Upload(kind, source, dst))
        self._into, self.downloads = {}, []
        return moves
