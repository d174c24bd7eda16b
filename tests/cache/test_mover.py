"""What is read when a snapshot leaves, and what comes up for whom."""

from __future__ import annotations

from collections import Counter

from dsjax.cache import mover
from dsjax.cache.manager import CacheManager
from dsjax.cache.spec import EntryKind
from dsjax.cache.tiers import Tiers
from tests.cache.device_model import DeviceModel, prefix_names
from tests.cache.specs import cache_spec

CSA, HCA, WINDOW, STATE = EntryKind.CSA, EntryKind.HCA, EntryKind.WINDOW, EntryKind.STATE


class Runner:
    """Runs one request at a time on the device model, with tiers; `moves` are those of the last request."""

    def __init__(self, **changes):
        self.tiers = Tiers(1 << 20)
        self.manager = CacheManager(cache_spec(**changes), self.tiers)
        self.device = DeviceModel(self.manager)
        self.downloads: list = []
        self.uploads: list = []

    def complete(self, tokens: list[int], salt: str = "") -> int:
        """Runs a prompt to its end; returns the tokens that came from the cache."""
        manager, self.downloads, self.uploads = self.manager, [], []
        admission = manager.admit("r", tokens, salt, True, 8)
        assert admission is not None
        start = admission.num_cached
        while start < len(tokens):
            end = min(manager.next_boundary("r", start, len(tokens)), len(tokens), start + 8)
            assert manager.extend("r", end)
            self.move()
            self.device.step(manager, [("r", prefix_names(salt, tokens), start, end)])
            manager.computed("r", tokens, end)
            start = end
        manager.release("r", tokens, len(tokens), snapshot=True)
        self.move()
        manager.check()
        self.tiers.check()
        return admission.num_cached

    def move(self) -> None:
        moves = self.manager.take_moves()
        self.downloads += moves.downloads
        self.uploads += moves.uploads
        for key, arrays in self.device.move(moves):
            self.tiers.put(key, arrays)


def test_a_page_is_read_once_for_all_records_of_a_chain():
    runner = Runner(num_snapshots=1)
    runner.complete(list(range(40)))
    downloads = runner.downloads
    runner.complete([9] * 9)
    # Snapshots at 8, 16, 24, 32 and 40 of the one, 8 and 9 of the other: each brought what was not there.
    count = Counter(download.key for download in [*downloads, *runner.downloads])
    assert runner.tiers.num_records == 7 and set(count.values()) == {1}
    assert Counter(key.kind for key in count) == {STATE: 7, WINDOW: 7, CSA: 7, HCA: 7}
    assert runner.complete(list(range(40))) == 32
    # Entries are still on the device. STATE comes up for the snapshot, and for the request that begins with it.
    assert Counter(upload.kind for upload in runner.uploads) == {STATE: 2, WINDOW: 1}
    runner.manager.reset_prefix_cache()
    assert runner.complete(list(range(40))) == 32
    assert Counter(upload.kind for upload in runner.uploads) == {STATE: 2, WINDOW: 1, CSA: 1, HCA: 2}
    assert (runner.tiers.num_hits, runner.tiers.num_cached_tokens) == (2, 64)


def test_a_hit_on_the_device_is_taken_unless_the_record_is_a_unit_longer():
    runner = Runner(num_snapshots=2)
    runner.complete(list(range(20)))  # the device has 16 and 20
    runner.complete([9] * 9)  # takes both
    assert runner.tiers.num_records >= 3
    assert runner.complete([*range(16), 7]) == 16
    assert (runner.tiers.num_hits, runner.tiers.num_cached_tokens) == (1, 16)
    assert runner.complete([*range(20), 5, 5]) == 16  # 4 tokens more are not worth a move
    assert runner.tiers.num_hits == 1


def test_cold_snapshots_come_down_before_room_is_needed():
    runner = Runner(num_snapshots=8)
    runner.complete(list(range(40)))  # five snapshots: three slots are free, which is enough
    assert runner.tiers.num_records == 0
    runner.complete([7] * 20)  # one slot is free from here on
    assert runner.tiers.num_records > 0 and runner.manager.prefix.num_snapshots == 8
    assert runner.manager.prefix.num_free_slots == 0


def test_all_can_be_moved_down():
    runner = Runner(num_snapshots=16)
    runner.complete(list(range(40)))
    for _ in runner.manager.move_each_down():
        runner.move()
    assert runner.tiers.num_records == runner.manager.prefix.num_snapshots == 5
    other = CacheManager(cache_spec(num_snapshots=16), runner.tiers)
    assert other.promote([*range(40), 1], "") == 40
    other.check()


def test_a_step_brings_down_no_more_than_fits_beside_the_pools(monkeypatch):
    runner = Runner(num_snapshots=1)
    page = runner.manager.spec.kinds[WINDOW].page_bytes
    monkeypatch.setattr(mover, "MAX_DOWN_BYTES", page)  # of a kind that is smaller nothing but its own
    runner.complete(list(range(8)))
    runner.complete([9] * 9)
    assert (runner.tiers.num_records, runner.tiers.num_dropped > 0) == (0, True)
    assert runner.downloads == [] and [runner.move() for _ in runner.manager.move_each_down()] == [None]
    assert runner.downloads == []
    assert runner.complete([*range(8), 1]) == 0
