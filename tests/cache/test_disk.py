"""Records as files: what a new start finds, what is refused, and that no more bytes are taken than allowed."""

from __future__ import annotations

import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from dsjax.cache import blob_file, disk
from dsjax.cache.blob_file import Damaged, Foreign, Head
from dsjax.cache.disk import Disk
from dsjax.cache.hashes import UnitHashes
from dsjax.cache.moves import BlobKey
from dsjax.cache.spec import EntryKind
from dsjax.errors import ConfigError
from tests.cache.inline import Inline
from tests.cache.test_tiers import TOKENS, record_of

KEY = BlobKey(EntryKind.CSA, 3, b"0123")
ARRAYS = (
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(4, dtype=ml_dtypes.bfloat16),
    np.arange(5, dtype=np.uint16),
    np.arange(5, dtype=np.uint8),
    np.zeros((0, 2), np.uint32),
)


def open_disk(folder, max_bytes: int = 1 << 20, fingerprint: str = "model", **executors) -> Disk:
    return Disk(folder, max_bytes, fingerprint, **{"reader": Inline(), "writer": Inline(), **executors})


def blobs_of(record):
    return {key: (np.full(4, number, np.int64),) for number, key in enumerate(record.keys)}


def longest(some: Disk, tokens=TOKENS) -> int:
    return next((record.num_tokens for record in some.find(tokens, UnitHashes("", 8))), 0)


def load(some: Disk, record):
    assert some.load(record, set())
    loaded = some.take_loaded()
    some.check()
    return loaded[0][1] if loaded else None


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_file_is_safetensors_and_comes_back(tmp_path):
    path, head = tmp_path / f"{KEY.name}.safetensors", Head(KEY, "model")
    blob_file.write(path, head, ARRAYS)
    assert path.stat().st_size == head.size(ARRAYS)
    for got, want in zip(blob_file.read(path, "model"), ARRAYS, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    with safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("0"), ARRAYS[0])
        assert file.metadata()["fingerprint"] == "model"
    assert blob_file.read_head(path, "model") == Head(KEY, "model", None, path.stat().st_size)
    with pytest.raises(Foreign, match="of another model or cache layout"):
        blob_file.read_head(path, "another")


def test_no_bit_goes_unchecked(tmp_path):
    record = record_of(43)
    path, head = tmp_path / f"{record.keys[-1].name}.safetensors", Head(record.keys[-1], "model", record)
    blob_file.write(path, head, ARRAYS[:3])
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        with pytest.raises(Damaged):
            blob_file.read(path, "model")
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(Damaged):
            blob_file.read(path, "model")
    path.write_bytes(data + b"x")
    with pytest.raises(Damaged):
        blob_file.read_head(path, "model")


def test_a_new_start_finds_everything_in_its_order(tmp_path):
    first = open_disk(tmp_path)
    for length in (43, 64, 16):
        first.save(record_of(length), blobs_of(record_of(length)))
    load(first, record_of(43))
    first.close()
    (tmp_path / "left.part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    second = open_disk(tmp_path)
    second.check()
    assert second.num_records == 3 and longest(second) == 64
    assert second.num_bytes == bytes_in(tmp_path) - len("not ours")
    assert not (tmp_path / "left.part").exists()
    got = load(second, record_of(43))
    assert got is not None and {key: int(blob[0][0]) for key, blob in got.items()} == {
        key: number for number, key in enumerate(record_of(43).keys)
    }


def test_bytes_are_bounded_and_the_least_recently_used_leave(tmp_path):
    one = open_disk(tmp_path / "one")
    one.save(record_of(16), blobs_of(record_of(16)))
    size = one.num_bytes
    some = open_disk(tmp_path / "some", 3 * size + 100)
    for salt in "abc":
        some.save(record_of(16, salt=salt), blobs_of(record_of(16, salt=salt)))
    assert some.num_records == 3
    load(some, record_of(16, salt="a"))
    some.save(record_of(16, salt="d"), blobs_of(record_of(16, salt="d")))
    some.check()
    assert [bool(some.touch(record_of(16, salt=salt).digest)) for salt in "abcd"] == [True, False, True, True]
    assert bytes_in(tmp_path / "some") == some.num_bytes <= 3 * size + 100
    large = {key: (np.zeros(10_000, np.int64),) for key in record_of(99).keys}  # more than all may take
    some.save(record_of(99), large)
    assert (some.num_skipped, some.num_records) == (1, 3)
    again = open_disk(tmp_path / "some", size)
    assert again.num_records == 1 and bytes_in(tmp_path / "some") == again.num_bytes <= size
    again.check()


@pytest.mark.parametrize("harm", ["payload", "cut", "lost"])
def test_a_blob_that_is_damaged_takes_its_records_with_it(tmp_path, harm, caplog):
    some = open_disk(tmp_path)
    for length in (43, 64):
        some.save(record_of(length), blobs_of(record_of(length)))
    shared = tmp_path / f"{record_of(43).keys[2].name}.safetensors"
    data = shared.read_bytes()
    if harm == "lost":
        shared.unlink()
    else:
        shared.write_bytes(data[:-8] if harm == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert load(some, record_of(64)) is None
    assert len(caplog.records) == 1
    assert some.num_damaged == (harm != "lost")
    assert not some.is_loading(record_of(64).digest)
    assert some.num_records == (0 if harm != "lost" else 1)  # the other's loss shows when it is read
    assert load(some, record_of(43)) is None if harm == "lost" else longest(some) == 0
    assert bytes_in(tmp_path) == some.num_bytes == 0


def test_files_of_others_are_left_alone(tmp_path, caplog):
    other = open_disk(tmp_path, fingerprint="another")
    other.save(record_of(43), blobs_of(record_of(43)))
    blob_file.write(tmp_path / "weights.safetensors", Head(KEY, "model"), ARRAYS)
    (tmp_path / "broken.safetensors").write_bytes(b"xxxx")
    with caplog.at_level(logging.WARNING):
        some = open_disk(tmp_path)
    assert (some.num_foreign, some.num_damaged, some.num_records, some.num_bytes) == (8, 2, 0, 0)
    assert len(caplog.records) == 2


def test_what_cannot_be_written_is_forgotten(tmp_path, monkeypatch, caplog):
    some = open_disk(tmp_path)

    def full(path, head, arrays):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(blob_file, "write", full)
        for length in (43, 64):
            some.save(record_of(length), blobs_of(record_of(length)))
        some.take_loaded()
    assert (some.num_records, some.num_bytes, list(tmp_path.iterdir())) == (0, 0, [])
    assert [r.getMessage().count("No space left") for r in caplog.records] == [1]
    some.save(record_of(43), blobs_of(record_of(43)))
    some.take_loaded()
    assert longest(some) == 43


def test_a_slow_disk_is_not_waited_for(tmp_path, monkeypatch):
    writer = Inline(held=True)
    some = open_disk(tmp_path, writer=writer)
    for salt in "abc":
        some.save(record_of(16, salt=salt), blobs_of(record_of(16, salt=salt)))
        monkeypatch.setattr(disk, "MAX_PENDING_BYTES", 2 * some.num_bytes if salt == "a" else disk.MAX_PENDING_BYTES)
    assert (some.num_records, some.num_skipped) == (2, 1)
    assert longest(some) == 0 and list(tmp_path.iterdir()) == []  # nothing is whole
    writer.release()
    some.take_loaded()
    assert [some.touch(record_of(16, salt=salt).digest) for salt in "abc"] == [True, True, False]
    assert bytes_in(tmp_path) == some.num_bytes
    some.check()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_cache_dir='.*/file/cache' cannot be used: Not a directory"):
        open_disk(tmp_path / "file" / "cache")


def test_loads_are_bounded(tmp_path, monkeypatch):
    some = open_disk(tmp_path, reader=Inline(held=True))
    monkeypatch.setattr(disk, "MAX_LOADS", 1)
    for length in (43, 64):
        some.save(record_of(length), blobs_of(record_of(length)))
    assert some.load(record_of(43), set()) and some.load(record_of(43), set()) and not some.load(record_of(64), set())
    some.clear()
    assert some.take_loaded() == [] and some.num_records == 0
