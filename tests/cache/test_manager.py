"""The manager's answers for single requests; faults 7, 8, 9 and 21 of other engines."""

from __future__ import annotations

import pytest

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.manager import NO_BOUNDARY, Admission, CacheManager
from dsjax.cache.spec import Copy, EntryKind
from tests.cache.device_model import DeviceModel, prefix_names
from tests.cache.specs import cache_spec

CSA, HCA, WINDOW, STATE = EntryKind.CSA, EntryKind.HCA, EntryKind.WINDOW, EntryKind.STATE


class Runner:
    """Runs one request at a time to a given length on the device model."""

    def __init__(self, **changes):
        self.manager = CacheManager(cache_spec(**changes))
        self.device = DeviceModel(self.manager)

    def start(self, request_id: str, tokens: list[int], salt: str = "", uses_cache: bool = True) -> Admission:
        admission = self.manager.admit(request_id, tokens, salt, uses_cache, 1)
        assert admission is not None
        self.names = prefix_names(salt, tokens)
        return admission

    def go_on(self, request_id: str, tokens: list[int], end: int) -> list[int]:
        """Steps to `end`; returns where the steps ended."""
        manager, ends = self.manager, []
        start = manager.request(request_id).num_computed
        while start < end:
            boundary = manager.next_boundary(request_id, start, len(tokens))
            stop = min(end, boundary, start + manager.spec.max_chunk_tokens)
            assert manager.extend(request_id, stop)
            self.device.copy(manager.take_moves().copies)
            self.device.step(manager, [(request_id, self.names, start, stop)])
            manager.computed(request_id, tokens, stop)
            manager.check()
            ends.append(stop)
            start = stop
        return ends

    def complete(self, request_id: str, tokens: list[int], salt: str = "", uses_cache: bool = True) -> int:
        """Runs a whole prompt and finishes; returns the tokens that came from the cache."""
        admission = self.start(request_id, tokens, salt, uses_cache)
        self.go_on(request_id, tokens, len(tokens))
        self.manager.release(request_id, tokens, len(tokens), snapshot=True)
        self.manager.check()
        return admission.num_cached


def test_same_prompt_of_40_tokens_hits_32():
    runner = Runner()
    assert runner.complete("a", list(range(40))) == 0
    assert runner.complete("b", list(range(40))) == 32


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 39, 40, 41, 63, 64, 65, 120])
@pytest.mark.parametrize("changes", [{}, {"hca_ratio": 128}, {"page": 64}, {"page": 1}, {"window": 40}])
def test_second_time_all_units_but_the_last_token_hit(length, changes):
    runner = Runner(**changes)
    prompt = list(range(length))
    runner.complete("a", prompt)
    assert runner.complete("b", prompt) == (length - 1) // 8 * 8
    assert runner.complete("c", [9, 9, 9, *range(length)]) == 0  # other traffic
    assert runner.complete("d", [*prompt, 5, 6, 7]) == length  # the end of the prompt, and of the turn


def test_hit_while_the_first_still_runs():
    runner = Runner()
    runner.start("a", list(range(40)))
    runner.go_on("a", list(range(40)), 20)
    names = runner.names
    assert runner.start("b", [*range(20), 7, 7, 7]).num_cached == 16
    runner.go_on("b", [*range(20), 7, 7, 7], 23)
    runner.names = names
    runner.go_on("a", list(range(40)), 40)


def test_salts_do_not_share():
    runner = Runner()
    runner.complete("a", list(range(40)), "s1")
    assert runner.complete("b", list(range(40)), "s2") == 0
    assert runner.complete("c", list(range(40)), "s1") == 32


def test_request_without_prefix_caching_neither_takes_nor_leaves():
    runner = Runner()
    assert runner.complete("a", list(range(40)), uses_cache=False) == 0
    assert runner.manager.num_cached == 0
    assert runner.complete("b", list(range(40))) == 0
    assert runner.complete("c", list(range(40)), uses_cache=False) == 0


def test_chunks_end_where_snapshots_are_due():
    runner = Runner(budget=256)
    for request_id, length, ends in [
        ("short", 20, [8, 16, 20]),
        ("exact", 16, [8, 16]),
        ("long", 90, [16, 32, 48, 64, 80, 88, 90]),
    ]:
        tokens = [length] * length
        runner.start(request_id, tokens)
        assert runner.go_on(request_id, tokens, length) == ends
    assert runner.manager.next_boundary("long", 90, 90) == NO_BOUNDARY


def test_branch_point_gets_a_snapshot():
    runner = Runner(interval=1000, budget=256)
    first, second, third = ([*range(100), *[tail] * 20] for tail in (1, 2, 3))
    assert runner.complete("a", first) == 0
    assert runner.start("b", second) == Admission(slot=1, num_cached=0, num_shared=96)
    assert runner.go_on("b", second, 120) == [96, 112, 119 + 1]
    assert runner.start("c", third).num_cached == 96


def test_partial_chunks_of_an_aborted_request_are_not_complete_units():
    runner = Runner()
    runner.start("a", list(range(40)))
    runner.manager.next_boundary("a", 0, 40)
    assert runner.manager.extend("a", 40 - 8)
    runner.manager.computed("a", list(range(40)), 13)
    runner.manager.release("a", list(range(40)), 13)
    found = runner.manager.match(list(range(40)), "")
    assert (found.num_tokens, found.num_shared) == (0, 8)


def test_copies_of_a_hit():
    runner = Runner(num_seqs=3)
    runner.complete("a", list(range(37)))
    runner.start("other", list(range(39)))  # may write on in the pages
    runner.manager.take_moves()
    request_slot = 2
    assert runner.start("b", list(range(50))) == Admission(slot=request_slot, num_cached=37, num_shared=37)
    # 37 tokens: 9 CSA entries (the second page holds one), 4 HCA entries (two full pages), 5 rows of window page 4.
    copies = {copy.kind: copy for copy in runner.manager.take_moves().copies}
    request = runner.manager.request("b")
    assert set(copies) == {CSA, WINDOW, STATE}
    assert copies[CSA].dst == request.pages[CSA][1]
    assert copies[WINDOW].dst == request.window[4]
    assert copies[STATE].dst == request_slot
    assert list(request.window) == [3, 4]


def test_snapshot_and_hit_in_one_plan_copy_from_the_row():
    runner = Runner()
    runner.start("a", list(range(8)))
    runner.go_on("a", list(range(8)), 8)  # its snapshot at 8 is copied with the next plan
    assert runner.start("b", list(range(20))).num_cached == 8
    copies = [copy for copy in runner.manager.take_moves().copies if copy.kind is STATE]
    assert copies == [Copy(STATE, 0, 4), Copy(STATE, 0, 1)]  # not 4 to 1: nothing is in 4 yet


def test_row_slot_may_be_handed_on_before_its_state_is_copied():
    runner = Runner(num_seqs=1)
    runner.complete("a", list(range(8)))
    runner.complete("b", list(range(50, 58)))
    assert runner.complete("c", list(range(20))) == 8


def test_table_rows_are_out_of_range_where_there_is_no_page():
    runner = Runner()
    runner.start("a", list(range(60)))
    runner.go_on("a", list(range(60)), 60)
    manager = runner.manager
    assert manager.extend("a", 61)
    request = manager.request("a")
    assert request.tables[CSA].tolist() == [*request.pages[CSA], *[32] * 6]
    assert sorted(request.window) == [6, 7]  # rows 53..60
    ring = [48] * 7
    ring[6], ring[0] = request.window[6], request.window[7]
    assert request.tables[WINDOW].tolist() == ring


def test_a_decoding_request_changes_a_window_page_for_the_next_in_one_extension():
    runner = Runner()
    runner.start("a", list(range(60)))
    runner.go_on("a", list(range(60)), 24)
    request, held = runner.manager.request("a"), []
    for total in range(25, 40):  # in which no page of another kind is due
        runner.go_on("a", list(range(60)), total)
        held.append(list(request.window))
    # The token after 31 sees rows 24..31 of page 3: page 2 is out of sight one token before page 4 is needed.
    assert held == 8 * [[2, 3]] + 7 * [[3, 4]]


def test_extend_is_all_or_nothing():
    manager = CacheManager(cache_spec(num_blocks=6))  # 2 CSA pages of 32 tokens
    for request_id in "ab":
        assert manager.admit(request_id, [ord(request_id)] * 8, "", True, 8) is not None
        assert manager.extend(request_id, 8)
        manager.computed(request_id, [ord(request_id)] * 8, 8)
    before = manager.num_free
    assert not manager.extend("a", 36)
    assert manager.num_free == before
    manager.check()
    manager.release("b")
    assert manager.extend("a", 36)


def test_admission_needs_a_slot_and_the_pages_of_the_first_chunk():
    manager = CacheManager(cache_spec(num_blocks=6, num_seqs=2))
    assert manager.admit("a", [1] * 32, "", True, 32) is not None
    assert manager.extend("a", 32)
    assert manager.admit("b", [2] * 20, "", True, 20) is None  # 2 of 6 window pages are left
    assert manager.admit("b", [2] * 20, "", True, 16) is not None
    assert manager.admit("c", [3], "", True, 1) is None  # no slot
    with pytest.raises(ValueError, match="'b' is running already"):
        manager.admit("b", [2], "", True, 1)
    manager.check()


def test_cached_pages_make_room_for_requests():
    runner = Runner(num_blocks=6)
    for i in range(8):
        runner.complete(str(i), [i] * 48)
    assert runner.manager.usage == 0
    assert runner.complete("again", [7] * 48) == 40


def test_oversized_chunk_is_refused():
    manager = CacheManager(cache_spec())
    manager.admit("a", [1] * 40, "", True, 32)
    with pytest.raises(ValueError, match="33 tokens is more than max_chunk_tokens=32"):
        manager.extend("a", 33)


def test_the_pages_of_prompts_that_run_are_promised_to_them():
    manager = CacheManager(cache_spec(num_blocks=6))  # 2 CSA pages of 32 tokens
    assert manager.admit("a", [1] * 40, "", False, 8)  # has none yet, and will need both
    assert manager.admit("b", [2] * 8, "", False, 8) is None
    assert manager.admit("c", [3] * 3, "", False, 3)  # completes no entry
    manager.release("a")
    assert manager.admit("b", [2] * 8, "", False, 8)
    manager.check()


def test_counts_and_usage():
    manager = CacheManager(cache_spec(num_blocks=6))  # 6 window, 2 CSA, 3 HCA pages
    assert (manager.num_total, manager.num_free, manager.num_cached, manager.usage) == (11, 11, 0, 0.0)
    manager.admit("a", [1] * 24, "", True, 24)
    manager.extend("a", 24)
    assert (manager.num_free, manager.usage) == (11 - 3 - 1 - 2, 2 / 3)


def test_reset_keeps_running_requests_and_forgets_what_they_computed():
    runner = Runner()
    runner.start("a", list(range(40)))
    runner.go_on("a", list(range(40)), 20)
    runner.manager.reset_prefix_cache()
    runner.go_on("a", list(range(40)), 40)
    runner.manager.release("a", list(range(40)), 40, snapshot=True)
    runner.manager.check()
    assert runner.manager.num_free == runner.manager.num_total
    assert runner.complete("b", list(range(40))) == 0


def test_preempted_request_goes_on_from_its_last_snapshot():
    runner = Runner()
    tokens = list(range(40))
    runner.start("a", tokens)
    runner.go_on("a", tokens, 30)
    runner.manager.release("a", tokens, 30, snapshot=True)
    assert runner.start("a", tokens).num_cached == 30


def test_token_still_on_the_device_takes_no_snapshot():
    runner = Runner()
    tokens = list(range(12))
    runner.start("a", tokens)
    runner.go_on("a", tokens, 12)
    known = [*tokens, 50]
    for end in (13, 14):
        assert runner.manager.extend("a", end)
        assert runner.manager.computed("a", known, end) is None
    runner.manager.release("a", known, 14, snapshot=True)
    assert runner.manager.match([*known, 1, 2], "").num_tokens == 12
    runner.manager.check()


def test_hashes_that_the_caller_keeps_are_not_computed_again():
    manager, tokens, hashes = CacheManager(cache_spec()), list(range(40)), UnitHashes("salt", 8)
    assert manager.match(tokens, "salt", hashes).num_tokens == 0
    assert len(hashes.digests) == 6  # of 0 to 5 units
    assert manager.admit("a", tokens, "salt", True, 32, hashes) is not None
    assert manager.request("a").hashes is hashes
