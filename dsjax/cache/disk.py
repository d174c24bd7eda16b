"""Records and blobs as files: what `tiers.py` keeps below host memory, and what a restart finds.  [no jax]

A blob is one safetensors file (`blob_file.py`), `<kind>-<index>-<digest>.safetensors`; the file of a STATE slot also
lists the blobs of its record, and is written last. A file has another name until it is whole. Reading and writing are
done by a thread each; everything else is the engine thread's.

A folder belongs to one engine at a time. Files of another model, layout or format stay and are not counted as bytes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path

from dsjax.cache import blob_file
from dsjax.cache.blob_file import SUFFIX, Damaged, Foreign
from dsjax.cache.hashes import UnitHashes
from dsjax.cache.moves import Arrays, BlobKey
from dsjax.cache.records import Catalog, Record
from dsjax.cache.spec import EntryKind
from dsjax.errors import ConfigError

log = logging.getLogger("dsjax")

MAX_PENDING_BYTES = 1 << 28  # that wait to be written; beyond it records are not kept: the disk is slower than traffic
MAX_LOADS = 16  # records being read at a time
_TEMPORARY = ".part"

Blobs = dict[BlobKey, Arrays]


class Disk:
    """At most `max_bytes` of files of one model and layout, which `fingerprint` names.

    Raises ConfigError if the folder cannot be made or written to. `reader` and `writer` run the work; one thread each
    by default.
    """

    def __init__(
        self,
        folder: str | Path,
        max_bytes: int,
        fingerprint: str,
        reader: Executor | None = None,
        writer: Executor | None = None,
    ):
        self.folder, self.max_bytes, self.fingerprint = Path(folder).expanduser(), max_bytes, fingerprint
        self.num_damaged = self.num_foreign = self.num_bytes = self.num_skipped = 0
        self._reader = reader or ThreadPoolExecutor(1, "dsjax-disk-read")
        self._writer = writer or ThreadPoolExecutor(1, "dsjax-disk-write")
        self._catalog = Catalog()
        self._sizes: dict[BlobKey, int] = {}
        self._loads: dict[bytes, tuple[Record, Future[Blobs]]] = {}
        self._writes: dict[bytes, tuple[Record, Future[None], int]] = {}
        self._warned: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise ConfigError(f"disk_cache_dir={str(folder)!r} cannot be used: {error.strerror}") from error

    @property
    def num_records(self) -> int:
        return len(self._catalog)

    # --- finding -------------------------------------------------------------------------------

    def _scan(self) -> None:
        """Builds the index from the folder, from the files' heads alone; contents are checked when they are read."""
        records: list[tuple[int, Record]] = []
        found: dict[BlobKey, int] = {}
        for path in sorted(self.folder.iterdir()):
            if path.suffix == _TEMPORARY:
                path.unlink()
            if path.suffix != SUFFIX:
                continue
            try:
                head = blob_file.read_head(path, self.fingerprint)
            except Foreign as error:
                self.num_foreign += 1
                self._warn("foreign", f"{error}: such files are left alone")
            except Damaged as error:
                self._damaged(error, path)
            else:
                found[head.key] = head.num_bytes
                if head.record is not None:
                    records.append((path.stat().st_mtime_ns, head.record))
        for _, record in sorted(records, key=lambda pair: pair[0]):
            if all(key in found for key in record.keys):
                self._sizes.update((key, found[key]) for key in self._catalog.add(record))
        for key in found.keys() - self._sizes.keys():
            self._path(key).unlink()  # its record was never written, or lost a blob
        self.num_bytes = sum(self._sizes.values())
        self._make_room(0)

    def find(self, tokens: Sequence[int], hashes: UnitHashes) -> Iterator[Record]:
        """Whole records of prefixes of `tokens`, at most all but the last of them; the longest first."""
        return (record for record in self._catalog.find(tokens, hashes) if record.digest not in self._writes)

    def has(self, digest: bytes) -> bool:
        """Whether the record is here or being written."""
        return self._catalog.get(digest) is not None

    def touch(self, digest: bytes) -> bool:
        """What `has` says; marks the record as most recently used."""
        if not self.has(digest):
            return False
        self._catalog.touch(digest)
        return True

    # --- writing -------------------------------------------------------------------------------

    def save(self, record: Record, blobs: Blobs) -> None:
        """Writes a record in the background unless it is here; others that were used less recently make room for it."""
        self._take_written()
        if self.touch(record.digest):
            return
        new = [key for key in record.keys if key not in self._catalog]
        files = [blob_file.Head(key, self.fingerprint, record if key is record.keys[-1] else None) for key in new]
        sizes = {head.key: head.size(blobs[head.key]) for head in files}
        size = sum(sizes.values())
        waiting = sum(num_bytes for _, _, num_bytes in self._writes.values())
        whole = size + sum(self._sizes.get(key, 0) for key in record.keys)
        if (waiting and waiting + size > MAX_PENDING_BYTES) or whole > self.max_bytes:
            self.num_skipped += 1
            return
        # First the record, so that its blobs are not among those that make room.
        self._catalog.add(record)
        self._sizes |= sizes
        self._make_room(size, keep=record)
        self.num_bytes += size
        todo = [(self._path(head.key), head, blobs[head.key]) for head in files]
        self._writes[record.digest] = record, self._writer.submit(_write_all, todo), size

    def _make_room(self, size: int, keep: Record | None = None) -> None:
        while self.num_bytes + size > self.max_bytes and (coldest := self._catalog.coldest()) not in (None, keep):
            assert coldest is not None
            self._remove(coldest)

    def _remove(self, record: Record) -> None:
        self._writes.pop(record.digest, None)
        gone = self._catalog.remove(record)
        self.num_bytes -= sum(self._sizes.pop(key) for key in gone)
        self._writer.submit(_unlink_all, [self._path(key) for key in gone])  # after it was written

    def _take_written(self) -> None:
        for digest, (record, future, _) in list(self._writes.items()):
            if future.done():
                del self._writes[digest]
                error = future.exception()
                if error is not None:
                    self._warn("write", f"disk_cache_dir={str(self.folder)!r} cannot be written to: {error}")
                    self._remove(record)

    # --- reading -------------------------------------------------------------------------------

    def load(self, record: Record, known: set[BlobKey]) -> bool:
        """Reads a record's blobs but the `known` ones in the background; False if too many are being read."""
        if record.digest in self._loads:
            return True
        if len(self._loads) >= MAX_LOADS:
            return False
        self._catalog.touch(record.digest)
        paths = {key: self._path(key) for key in record.keys if key not in known}
        self._loads[record.digest] = record, self._reader.submit(_read_all, paths, self.fingerprint)
        return True

    def is_loading(self, digest: bytes) -> bool:
        return digest in self._loads

    def take_loaded(self) -> list[tuple[Record, Blobs]]:
        """Records that have been read since the last call. Drops those that a damaged or lost file belongs to."""
        self._take_written()
        loaded = []
        for digest, (record, future) in list(self._loads.items()):
            if not future.done():
                continue
            del self._loads[digest]
            error = future.exception()
            if error is None:
                loaded.append((record, future.result()))
            elif isinstance(error, Damaged):
                self._damaged(error, error.path)
                self._forget(error.path)
            elif isinstance(error, OSError):
                self._warn("read", f"a file of disk_cache_dir={str(self.folder)!r} cannot be read: {error}")
                if self._catalog.get(digest) is not None:
                    self._remove(record)
            else:
                raise error
        return loaded

    def _forget(self, path: Path) -> None:
        """Drops the records that refer to a file."""
        key = next((key for key in self._sizes if self._path(key) == path), None)
        for record in self._catalog.holders(key) if key is not None else ():
            self._remove(record)

    # --- all -----------------------------------------------------------------------------------

    def _path(self, key: BlobKey) -> Path:
        return self.folder / f"{key.name}{SUFFIX}"

    def _damaged(self, error: Exception, path: Path) -> None:
        self.num_damaged += 1
        self._warn("damaged", f"{error}: such files are removed, and not used")
        path.unlink(missing_ok=True)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s (said once)", message)

    def clear(self) -> None:
        """Removes all files of this model."""
        self._loads.clear()
        for record in list(self._catalog):
            self._remove(record)

    def flush(self) -> None:
        """Returns when everything so far is written."""
        wait([future for _, future, _ in self._writes.values()])
        self._take_written()

    def close(self) -> None:
        """Returns when everything is written."""
        self._reader.shutdown()
        self._writer.shutdown()

    def check(self) -> None:
        """AssertionError unless files and references agree. For tests."""
        self._catalog.check()
        assert set(self._sizes) == {key for record in self._catalog for key in record.keys}
        assert self.num_bytes == sum(self._sizes.values()) <= self.max_bytes
        assert all(record.keys[-1].kind is EntryKind.STATE for record in self._catalog)


def _write_all(files: list[tuple[Path, blob_file.Head, Arrays]]) -> None:
    for path, head, arrays in files:
        part = path.with_suffix(_TEMPORARY)
        try:
            blob_file.write(part, head, arrays)
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def _unlink_all(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _read_all(paths: dict[BlobKey, Path], fingerprint: str) -> Blobs:
    blobs = {key: blob_file.read(path, fingerprint) for key, path in paths.items()}
    state = next((path for key, path in paths.items() if key.kind is EntryKind.STATE), None)
    if state is not None:
        os.utime(state)  # the order of use, for the next start
    return blobs
