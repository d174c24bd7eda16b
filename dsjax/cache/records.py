"""Prefixes below the device: what a record refers to, and which records and blobs there are.  [no jax]

A *record* is a snapshot that left the device: all that is needed to go on at position `num_tokens` of some tokens. A
*blob* is the content of one page or STATE slot. A page that is full by then is named by the unit that filled it, so
that the records along one chain of tokens share it; the others are the record's own.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.moves import BlobKey
from dsjax.cache.prefix import window_pages
from dsjax.cache.spec import CacheSpec, EntryKind


@dataclass(frozen=True)
class Record:
    """Equal if of the same tokens."""

    digest: bytes  # of all its tokens
    node: bytes  # of its complete units
    num_tokens: int
    num_tail: int  # tokens after the last complete unit
    keys: tuple[BlobKey, ...]  # STATE's is the last


def record_digest(node: bytes, tail: Sequence[int]) -> bytes:
    """Names the tokens of a unit's digest and those after it."""
    ids = np.asarray(tail, dtype="<i4").tobytes()
    return hashlib.blake2b(node + ids, digest_size=32, person=b"record").digest()


def make_record(spec: CacheSpec, digests: Sequence[bytes], tail: Sequence[int]) -> Record:
    """Of the tokens of the last of `digests` ([i] names i units) and a tail shorter than a unit."""
    unit, num_units = spec.unit_tokens, len(digests) - 1
    num_tokens = num_units * unit + len(tail)
    digest = record_digest(digests[-1], tail)
    keys = []
    for kind in spec.pool_kinds:
        kind_spec = spec.kinds[kind]
        page_tokens = kind_spec.entries_per_page * kind_spec.ratio
        is_window = kind is EntryKind.WINDOW
        for index in window_pages(spec, num_tokens) if is_window else range(kind_spec.num_table_pages(num_tokens)):
            filled = -(-(index + 1) * page_tokens // unit)  # by this many units
            keys.append(BlobKey(kind, index, digests[filled] if filled <= num_units else digest))
    keys.append(BlobKey(EntryKind.STATE, 0, digest))
    return Record(digest, digests[-1], num_tokens, len(tail), tuple(keys))


class Catalog:
    """Records, least recently used first, and how many of them refer to each blob."""

    def __init__(self):
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._tails: dict[bytes, Counter[int]] = {}  # by node: lengths of the tails of its records
        self._num_refs: Counter[BlobKey] = Counter()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: BlobKey) -> bool:
        return key in self._num_refs

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, digest: bytes) -> Record | None:
        return self._records.get(digest)

    def coldest(self) -> Record | None:
        return next(iter(self._records.values()), None)

    def touch(self, digest: bytes) -> None:
        """Marks it as most recently used."""
        self._records.move_to_end(digest)

    def add(self, record: Record) -> list[BlobKey]:
        """Returns the blobs that no other record has. Nothing if it is there already."""
        if record.digest in self._records:
            return []
        self._records[record.digest] = record
        self._tails.setdefault(record.node, Counter())[record.num_tail] += 1
        new = [key for key in record.keys if key not in self._num_refs]
        self._num_refs.update(record.keys)
        return new

    def remove(self, record: Record) -> list[BlobKey]:
        """Returns the blobs that no record has any longer."""
        del self._records[record.digest]
        tails = self._tails[record.node]
        tails[record.num_tail] -= 1
        if not tails[record.num_tail]:
            del tails[record.num_tail]
        if not tails:
            del self._tails[record.node]
        self._num_refs.subtract(record.keys)
        gone = [key for key in record.keys if not self._num_refs[key]]
        for key in gone:
            del self._num_refs[key]
        return gone

    def holders(self, key: BlobKey) -> list[Record]:
        """The records that refer to a blob."""
        return [record for record in self if key in record.keys]

    def find(self, tokens: Sequence[int], hashes: UnitHashes) -> Iterator[Record]:
        """Records of prefixes of `tokens`, at most all but the last of them; the longest first."""
        unit, limit = hashes.unit_tokens, len(tokens) - 1
        hashes.extend(tokens, len(tokens) // unit)
        for num_units in range(len(tokens) // unit, -1, -1):
            node, start = hashes.digests[num_units], num_units * unit
            for num_tail in sorted(self._tails.get(node, ()), reverse=True):
                if 0 < start + num_tail <= limit:
                    record = self._records.get(record_digest(node, tokens[start : start + num_tail]))
                    if record is not None:
                        yield record

    def check(self) -> None:
        """AssertionError unless the counts are those of the records. For tests."""
        refs = Counter(key for record in self for key in record.keys)
        assert refs == self._num_refs and all(self._num_refs.values())
        tails = Counter((record.node, record.num_tail) for record in self)
        assert tails == Counter({(n, t): c for n, counts in self._tails.items() for t, c in counts.items()})
