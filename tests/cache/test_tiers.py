"""Host memory below the device: what is shared, what is ready when, and who leaves first."""

from __future__ import annotations

import numpy as np

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.moves import BlobKey
from dsjax.cache.records import Record, make_record, record_digest
from dsjax.cache.spec import EntryKind
from dsjax.cache.tiers import Tiers
from tests.cache.specs import cache_spec

CSA, HCA, WINDOW, STATE = EntryKind.CSA, EntryKind.HCA, EntryKind.WINDOW, EntryKind.STATE
SPEC = cache_spec()  # units, window and pages of 8; a CSA page is 32 tokens, an HCA page 16
TOKENS = list(range(100))


def record_of(num_tokens: int, tokens=TOKENS, salt: str = "") -> Record:
    hashes = UnitHashes(salt, 8)
    hashes.extend(tokens, num_tokens // 8)
    return make_record(SPEC, hashes.digests, tokens[num_tokens // 8 * 8 : num_tokens])


def blob(num_bytes: int = 8):
    return (np.zeros(num_bytes, np.uint8),)


def store(tiers: Tiers, record: Record) -> int:
    """Returns how many blobs came down."""
    new = tiers.begin(record)
    for key in new:
        tiers.put(key, blob())
    tiers.check()
    return len(new)


def found(tiers: Tiers, tokens, salt: str = "") -> int:
    record = tiers.find(tokens, UnitHashes(salt, 8))
    return record.num_tokens if record else 0


def test_what_a_record_refers_to():
    hashes = UnitHashes("", 8)
    hashes.extend(TOKENS, 12)
    own = record_digest(hashes.digests[5], TOKENS[40:43])
    assert record_of(43) == Record(
        own,
        hashes.digests[5],
        43,
        3,
        (
            BlobKey(WINDOW, 4, hashes.digests[5]),
            BlobKey(WINDOW, 5, own),
            BlobKey(CSA, 0, hashes.digests[4]),
            BlobKey(CSA, 1, own),
            BlobKey(HCA, 0, hashes.digests[2]),
            BlobKey(HCA, 1, hashes.digests[4]),
            BlobKey(HCA, 2, own),
            BlobKey(STATE, 0, own),
        ),
    )


def test_full_pages_are_shared_along_a_chain():
    tiers = Tiers(1000)
    assert store(tiers, record_of(43)) == 8
    assert store(tiers, record_of(64)) == 5  # WINDOW 7, CSA 1, HCA 2 and 3, STATE
    assert store(tiers, record_of(64)) == 0
    assert store(tiers, record_of(64, salt="s")) == 8
    assert (tiers.num_bytes, tiers.num_records) == (8 * 21, 4)


def test_the_longest_ready_record_is_found():
    tiers = Tiers(1000)
    for length in (16, 40, 43):
        store(tiers, record_of(length))
    assert [found(tiers, TOKENS[:n]) for n in (16, 17, 40, 41, 43, 44, 99)] == [0, 16, 16, 40, 40, 43, 43]
    assert found(tiers, TOKENS, "s") == found(tiers, [7, *TOKENS]) == 0
    assert found(tiers, [*TOKENS[:42], 7, 7, 7]) == 40
    *most, last = tiers.begin(record_of(64))
    for key in most:
        tiers.put(key, blob())
    assert found(tiers, TOKENS) == 43
    assert tiers.want(TOKENS, UnitHashes("", 8), 0) == record_of(64) and tiers.is_coming(record_of(64).digest)
    assert tiers.want(TOKENS, UnitHashes("", 8), 65) is None
    tiers.put(last, blob())
    assert found(tiers, TOKENS) == 64
    assert tiers.want(TOKENS, UnitHashes("", 8), 0) is None and not tiers.is_coming(record_of(64).digest)


def test_the_least_recently_used_leaves_and_shared_blobs_stay():
    tiers = Tiers(8 * 16)
    store(tiers, record_of(43))
    store(tiers, record_of(64))  # 13 blobs
    tiers.arrays(record_of(43))
    assert store(tiers, record_of(16, salt="s")) == 4  # WINDOW, HCA, CSA and STATE: 17 are too many
    assert (found(tiers, TOKENS), found(tiers, TOKENS, "s"), tiers.num_evicted) == (43, 16, 1)
    assert tiers.num_bytes == 8 * 12


def test_a_record_larger_than_the_memory_is_not_kept():
    tiers = Tiers(8 * 7)
    assert store(tiers, record_of(43)) == 8
    assert (found(tiers, TOKENS), tiers.num_bytes, tiers.num_evicted) == (0, 0, 1)


def test_what_arrives_for_nobody_is_dropped():
    tiers = Tiers(1000)
    keys = tiers.begin(record_of(43))
    tiers.clear()
    for key in keys:
        tiers.put(key, blob())
    tiers.check()
    assert tiers.num_bytes == 0
