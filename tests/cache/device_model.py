"""What the device would hold: for every entry, row and STATE slot the token prefix that it was computed from.

The runner's contract in short: downloads, then copies as one gather, then uploads, the step's writes, and its reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsjax.cache.manager import CacheManager
from dsjax.cache.moves import Arrays, BlobKey, Moves
from dsjax.cache.spec import Copy, EntryKind

NOTHING = np.iinfo(np.int64).min  # on the host, in place of an entry that was never written


def prefix_names(salt: str, tokens: Sequence[int]) -> list[int]:
    """[i] names the first i tokens and the salt."""
    names = [hash(salt)]
    for token in tokens:
        names.append(hash((names[-1], token)))
    return names


class DeviceModel:
    def __init__(self, manager: CacheManager):
        self.spec = manager.spec
        self.pages: dict[EntryKind, dict[int, dict[int, int]]] = {
            kind: {page: {} for page in range(self.spec.kinds[kind].num_pages)} for kind in self.spec.pool_kinds
        }
        self.state: dict[int, int] = {}  # slot -> name of the prefix behind it

    def move(self, moves: Moves) -> list[tuple[BlobKey, Arrays]]:
        """Does the moves; returns what was downloaded."""
        down = [(download.key, self._read(download.kind, download.src)) for download in moves.downloads]
        self.copy(moves.copies)
        into = [(move.kind, move.dst) for move in (*moves.copies, *moves.uploads)]
        assert len(set(into)) == len(into), "a destination occurs twice"
        for upload in moves.uploads:
            (values,) = upload.arrays
            if upload.kind is EntryKind.STATE:
                self.state[upload.dst] = int(values[0])
            else:
                found = {place: int(name) for place, name in enumerate(values) if name != NOTHING}
                self.pages[upload.kind][upload.dst] = found
        return down

    def _read(self, kind: EntryKind, src: int) -> Arrays:
        if kind is EntryKind.STATE:
            return (np.array([self.state[src]], np.int64),)
        page = np.full(self.spec.kinds[kind].entries_per_page, NOTHING, np.int64)
        for place, name in self.pages[kind][src].items():
            page[place] = name
        return (page,)

    def copy(self, copies: Sequence[Copy]) -> None:
        destinations = [(copy.kind, copy.dst) for copy in copies]
        assert len(set(destinations)) == len(destinations), "a destination occurs twice"
        values = [
            self.state.get(copy.src) if copy.kind is EntryKind.STATE else dict(self.pages[copy.kind][copy.src])
            for copy in copies
        ]
        for copy, value in zip(copies, values, strict=True):
            if isinstance(value, dict):
                self.pages[copy.kind][copy.dst] = value
            elif value is None:
                self.state.pop(copy.dst, None)
            else:
                self.state[copy.dst] = value

    def step(self, manager: CacheManager, rows: Sequence[tuple[str, Sequence[int], int, int]]) -> None:
        """Runs rows of (request id, prefix names, first new token, end): every row writes, then every row reads."""
        for request_id, names, start, end in rows:
            request = manager.request(request_id)
            if start:
                assert self.state[request.slot] == names[start], f"{request_id}: STATE is not that of {start} tokens"
            self.state[request.slot] = names[end]
            for kind, spec in self.spec.kinds.items():
                if kind is EntryKind.INDEX_KEY:
                    continue
                for entry in range(spec.num_entries(start), spec.num_entries(end)):
                    if spec.window is None and entry < spec.num_entries(request.num_shared):
                        continue  # in a shared page already
                    page, place = self._place(request, kind, entry)
                    self.pages[kind][page][place] = names[(entry + 1) * spec.ratio]
        for request_id, names, start, end in rows:
            request = manager.request(request_id)
            for kind, spec in self.spec.kinds.items():
                if kind is EntryKind.INDEX_KEY:
                    continue
                first = 0 if spec.window is None else max(0, start - spec.window + 1)
                for entry in range(first, spec.num_entries(end)):
                    page, place = self._place(request, kind, entry)
                    found = self.pages[kind][page].get(place)
                    assert found == names[(entry + 1) * spec.ratio], f"{request_id}: {kind} entry {entry} is wrong"

    def _place(self, request, kind: EntryKind, entry: int) -> tuple[int, int]:
        spec = self.spec.kinds[kind]
        index = entry // spec.entries_per_page
        page = int(request.tables[kind][index % spec.table_width])
        assert page < spec.num_pages, f"{request.request_id}: {kind} entry {entry} has no page"
        return page, entry % spec.entries_per_page
