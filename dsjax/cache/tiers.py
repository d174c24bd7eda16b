"""Prefixes that left the device: in host memory, and below it on disk.  [no jax]

Records (`records.py`) come down as *downloads* of a step's plan: `begin` says which blobs are not here yet, and `put`
takes each when it has arrived, steps later. A record with all its blobs is *ready*; it is written to the disk at once,
in the background, so that leaving host memory costs nothing and a restart finds it. A record that is only on disk is
loaded when a request that could use it arrives (`want`), and is ready some steps later.

One for the whole engine, whose thread alone calls it; the disk has threads of its own. The least recently used records
leave first, on either tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsjax.cache.disk import Disk
from dsjax.cache.hashes import UnitHashes
from dsjax.cache.moves import Arrays, BlobKey
from dsjax.cache.records import Catalog, Record


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """Totals since the start, and bytes now."""

    num_tier_hits: int = 0  # records that went up to the device for a request or a hint
    num_tier_cached_tokens: int = 0  # that these have beyond what the device had
    num_tier_records: int = 0  # that came down to the host
    num_tier_loads: int = 0  # records read from the disk
    num_tier_dropped: int = 0  # that left the device in a step which had too much to bring down
    num_tier_evicted: int = 0  # records that left host memory for others
    num_tier_damaged: int = 0  # files that could not be read or were not what was written
    num_tier_foreign: int = 0  # files of another model, layout or format
    num_tier_unsaved: int = 0  # records that the disk was too slow or too small for
    host_cache_bytes_used: int = 0
    disk_cache_bytes_used: int = 0


@dataclass(eq=False)
class _Blob:
    arrays: Arrays | None = None  # None while on its way
    waiting: set[bytes] = field(default_factory=set)  # records that are not ready without it


class Tiers:
    """Host memory of at most `host_bytes`, and the disk if there is one."""

    def __init__(self, host_bytes: int, disk: Disk | None = None):
        self.host_bytes, self.disk = host_bytes, disk
        self.num_bytes = 0  # of the blobs here
        self.num_hits = self.num_cached_tokens = 0  # counted by those who move records up
        self.num_records = self.num_loads = self.num_evicted = self.num_dropped = 0
        self._catalog = Catalog()
        self._blobs: dict[BlobKey, _Blob] = {}
        self._missing: dict[bytes, int] = {}  # records that are not ready: how many blobs they lack

    # --- coming down ---------------------------------------------------------------------------

    def has(self, digest: bytes) -> bool:
        """Whether the record is here or on its way, or on disk."""
        return self._catalog.get(digest) is not None or (self.disk is not None and self.disk.has(digest))

    def touch(self, digest: bytes) -> bool:
        """What `has` says; marks the record as most recently used."""
        on_disk = self.disk is not None and self.disk.touch(digest)
        if self._catalog.get(digest) is None:
            return on_disk
        self._catalog.touch(digest)
        return True

    def lacks(self, record: Record) -> list[BlobKey]:
        """What `begin` would return."""
        return [key for key in record.keys if key not in self._blobs]

    def begin(self, record: Record) -> list[BlobKey]:
        """Adds a record; returns which of its blobs are neither here nor on their way: they have to be `put`."""
        self.num_records += 1
        return self._add(record)

    def _add(self, record: Record) -> list[BlobKey]:
        new = self._catalog.add(record)
        self._blobs.update((key, _Blob()) for key in new)
        missing = [key for key in record.keys if self._blobs[key].arrays is None]
        for key in missing:
            self._blobs[key].waiting.add(record.digest)
        if missing:
            self._missing[record.digest] = len(missing)
        else:
            self._complete(record)
        return new

    def put(self, key: BlobKey, arrays: Arrays) -> None:
        """Takes the content of a blob. Does nothing where nobody wants it any longer."""
        blob = self._blobs.get(key)
        if blob is None or blob.arrays is not None:
            return
        blob.arrays = arrays
        self.num_bytes += _num_bytes(arrays)
        done = []
        for digest in blob.waiting:
            self._missing[digest] -= 1
            if not self._missing[digest]:
                del self._missing[digest]
                done.append(self._catalog.get(digest))
        blob.waiting = set()
        for record in done:
            assert record is not None
            self._complete(record)
        while self.num_bytes > self.host_bytes:
            coldest = self._catalog.coldest()
            assert coldest is not None
            self._remove(coldest)
            self.num_evicted += 1

    def _complete(self, record: Record) -> None:
        if self.disk is not None:
            self.disk.save(record, self.arrays(record))

    def _remove(self, record: Record) -> None:
        self._missing.pop(record.digest, None)
        for key in record.keys:
            self._blobs[key].waiting.discard(record.digest)
        for key in self._catalog.remove(record):
            arrays = self._blobs.pop(key).arrays
            if arrays is not None:
                self.num_bytes -= _num_bytes(arrays)

    # --- going up ------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int], hashes: UnitHashes) -> Record | None:
        """The longest ready record of a prefix of `tokens`, at most all but the last of them."""
        return next((r for r in self._catalog.find(tokens, hashes) if r.digest not in self._missing), None)

    def arrays(self, record: Record) -> dict[BlobKey, Arrays]:
        """The content of a ready record; marks it as most recently used."""
        self.touch(record.digest)
        found = {key: self._blobs[key].arrays for key in record.keys}
        assert all(arrays is not None for arrays in found.values())
        return found  # type: ignore[return-value]

    def want(self, tokens: Sequence[int], hashes: UnitHashes, least_tokens: int) -> Record | None:
        """The longest record of a prefix of `tokens` if it is not ready: on its way, or read from the disk from now on.

        None if a ready one is as long, if it has fewer than `least_tokens`, or too many are being read.
        """
        best = next(self._catalog.find(tokens, hashes), None)
        below = next(self.disk.find(tokens, hashes), None) if self.disk is not None else None
        if below is not None and (best is None or below.num_tokens > best.num_tokens):
            best = below
        if best is None or best.num_tokens < least_tokens:
            return None
        if best is below and self._catalog.get(best.digest) is None:
            assert self.disk is not None
            return best if self.disk.load(best, {key for key in best.keys if self._has(key)}) else None
        return best if best.digest in self._missing else None

    def _has(self, key: BlobKey) -> bool:
        blob = self._blobs.get(key)
        return blob is not None and blob.arrays is not None

    def is_coming(self, digest: bytes) -> bool:
        """Whether a record that `want` returned is still on its way."""
        return digest in self._missing or (self.disk is not None and self.disk.is_loading(digest))

    def poll(self) -> None:
        """Takes in what the disk has read and written."""
        if self.disk is None:
            return
        for record, blobs in self.disk.take_loaded():
            self.num_loads += 1
            for key in self._add(record):
                if key not in blobs:  # it was here when the load began, and is not now
                    self._remove(record)
                    break
            for key, arrays in blobs.items():
                self.put(key, arrays)

    # --- all -----------------------------------------------------------------------------------

    def stats(self) -> TierStats:
        """The numbers now, with the disk's."""
        disk = self.disk
        return TierStats(
            num_tier_hits=self.num_hits,
            num_tier_cached_tokens=self.num_cached_tokens,
            num_tier_records=self.num_records,
            num_tier_loads=self.num_loads,
            num_tier_dropped=self.num_dropped,
            num_tier_evicted=self.num_evicted,
            num_tier_damaged=disk.num_damaged if disk else 0,
            num_tier_foreign=disk.num_foreign if disk else 0,
            num_tier_unsaved=disk.num_skipped if disk else 0,
            host_cache_bytes_used=self.num_bytes,
            disk_cache_bytes_used=disk.num_bytes if disk else 0,
        )

    def clear(self) -> None:
        """Forgets everything, on disk too."""
        for record in list(self._catalog):
            self._remove(record)
        if self.disk is not None:
            self.disk.clear()

    def flush(self) -> None:
        """Returns when what is ready is written."""
        if self.disk is not None:
            self.disk.flush()

    def close(self) -> None:
        """Returns when what is on its way to the disk is written."""
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        """AssertionError unless bytes, references and what is missing agree. For tests: looks at everything."""
        self._catalog.check()
        assert all(key in self._catalog for key in self._blobs)
        here = [blob.arrays for blob in self._blobs.values() if blob.arrays is not None]
        assert self.num_bytes == _total(here) <= self.host_bytes
        for record in self._catalog:
            missing = [key for key in record.keys if self._blobs[key].arrays is None]
            assert self._missing.get(record.digest, 0) == len(missing)
            assert all(record.digest in self._blobs[key].waiting for key in missing)
        assert all(self._catalog.get(digest) for digest in self._missing)
        if self.disk is not None:
            self.disk.check()


def _num_bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays)


def _total(blobs: Iterable[Arrays]) -> int:
    return sum(map(_num_bytes, blobs))
