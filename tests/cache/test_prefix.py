"""The prefix tree: what hits, which pages it names, and what leaves first."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.pool import PagePool
from dsjax.cache.prefix import PrefixIndex, window_pages
from dsjax.cache.spec import EntryKind
from tests.cache.specs import cache_spec

CSA, HCA, WINDOW = EntryKind.CSA, EntryKind.HCA, EntryKind.WINDOW


class Writer:
    """A request that wrote `tokens`, with all its pages."""

    def __init__(self, index: PrefixIndex, tokens: list[int], salt: str = ""):
        spec = index.spec
        self.index, self.tokens = index, tokens
        self.hashes = UnitHashes(salt, spec.unit_tokens)
        self.hashes.extend(tokens, len(tokens) // spec.unit_tokens)
        self.tables = {
            kind: index.pools[kind].allocate(spec.kinds[kind].num_table_pages(len(tokens)))
            for kind in spec.compressed_kinds
        }
        num_window = -(-len(tokens) // spec.kinds[WINDOW].entries_per_page)
        self.window = dict(enumerate(index.pools[WINDOW].allocate(num_window)))

    def add_units(self, num_units: int):
        return self.index.add_units(self.hashes, num_units, None, self.tables)

    def add_snapshot(self, num_tokens: int):
        unit = self.index.spec.unit_tokens
        node = self.add_units(num_tokens // unit)
        tail = tuple(self.tokens[num_tokens // unit * unit : num_tokens])
        return self.index.add_snapshot(node, tail, self.tables, self.window)

    def leave(self) -> None:
        for kind, pages in [*self.tables.items(), (WINDOW, self.window.values())]:
            for page in pages:
                self.index.pools[kind].release(page)


@pytest.fixture
def index() -> PrefixIndex:
    return make_index()


def make_index(**changes) -> PrefixIndex:
    spec = cache_spec(**changes)
    return PrefixIndex(spec, {kind: PagePool(spec.kinds[kind].num_pages) for kind in spec.pool_kinds})


def match(index: PrefixIndex, tokens: list[int], salt: str = ""):
    found = index.match(tokens, UnitHashes(salt, index.spec.unit_tokens))
    return found.num_tokens, found.num_shared


def test_a_digest_is_of_the_one_before_and_the_ids_as_little_endian_words():
    """Names on disk are made of these: they may not change."""
    hashes = UnitHashes("salt", 2)
    hashes.extend([1, 0x01020304, 129279, 7, 5], 2)
    root = blake2b(b"salt", digest_size=32).digest()
    first = blake2b(root + bytes([1, 0, 0, 0, 4, 3, 2, 1]), digest_size=32).digest()
    second = blake2b(first + bytes([0xFF, 0xF8, 1, 0, 7, 0, 0, 0]), digest_size=32).digest()
    assert hashes.digests == [root, first, second]


def test_digests_chain_tokens_and_salt():
    a, b, c = UnitHashes("", 4), UnitHashes("", 4), UnitHashes("s", 4)
    a.extend([1, 2, 3, 4, 5, 6, 7, 8], 2)
    b.extend([9, 2, 3, 4, 5, 6, 7, 8], 2)
    c.extend([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert len({*a.digests, *b.digests, *c.digests}) == 8  # nine, of which a and b share the root
    again = UnitHashes("", 4)
    again.extend([1, 2, 3, 4], 1)
    again.extend([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert again.digests == a.digests


def test_empty_index_has_no_hit(index):
    assert match(index, list(range(20))) == (0, 0)


def test_units_alone_are_shared_but_no_hit(index):
    Writer(index, list(range(40))).add_units(5)
    assert match(index, [*range(40), 7]) == (0, 40)
    assert match(index, [*range(20), 7]) == (0, 16)
    assert match(index, list(range(40))) == (0, 39)  # one token is always recomputed


def test_snapshot_is_a_hit(index):
    writer = Writer(index, list(range(40)))
    writer.add_units(5)
    writer.add_snapshot(16)
    writer.add_snapshot(27)
    assert match(index, list(range(40))) == (27, 39)
    assert match(index, list(range(28))) == (27, 27)
    assert match(index, list(range(27))) == (16, 24)  # all but the last token
    assert match(index, [*range(26), 0, 0]) == (16, 24)  # another tail
    assert match(index, list(range(17))) == (16, 16)
    assert match(index, list(range(16))) == (0, 15)


def test_salts_are_separate(index):
    Writer(index, list(range(20)), "s1").add_snapshot(16)
    assert match(index, list(range(20)), "s2") == (0, 0)
    assert match(index, list(range(20)), "") == (0, 0)
    assert match(index, list(range(20)), "s1") == (16, 16)


def test_snapshot_on_the_root(index):
    Writer(index, list(range(5)), "s").add_snapshot(5)
    assert match(index, list(range(9)), "s") == (5, 5)
    assert match(index, list(range(9))) == (0, 0)


def test_pages_of_a_match_are_the_fullest():
    index = make_index(page=64)  # one CSA page is 256 tokens, so both writers' units list page index 0
    first = Writer(index, list(range(16)))
    first.add_units(2)
    second = Writer(index, list(range(27)))
    second.add_units(3)
    second.add_snapshot(27)
    found = index.match(list(range(17)), UnitHashes("", 8))
    assert found.pages[CSA] == first.tables[CSA]
    found = index.match(list(range(25)), UnitHashes("", 8))
    assert found.pages[CSA] == second.tables[CSA]
    found = index.match(list(range(40)), UnitHashes("", 8))
    assert (found.num_tokens, found.num_shared) == (27, 27)
    assert found.pages[CSA] == second.tables[CSA]


def test_unit_without_a_complete_entry_lists_no_page():
    index = make_index(hca_ratio=128)
    writer = Writer(index, list(range(130)))
    node = writer.add_units(16)
    assert node.pages[HCA] == ((0, writer.tables[HCA][0]),)
    assert node.parent is not None and node.parent.pages[HCA] == ()
    found = index.match(list(range(128)), UnitHashes("", 8))
    assert found.num_shared == 127 and found.pages[HCA] == []  # the entry needs token 127
    assert index.match(list(range(129)), UnitHashes("", 8)).pages[HCA] == writer.tables[HCA]


def test_snapshot_holds_the_window_pages():
    index = make_index()
    assert list(window_pages(index.spec, 16)) == [1]  # rows 9..15
    assert list(window_pages(index.spec, 17)) == [1, 2]  # rows 10..16
    assert list(window_pages(index.spec, 3)) == [0]
    assert list(window_pages(index.spec, 0)) == []
    writer = Writer(index, list(range(24)))
    snapshot = writer.add_snapshot(17)
    assert snapshot is not None and snapshot.slot == 4
    assert snapshot.pages[WINDOW] == ((1, writer.window[1]), (2, writer.window[2]))
    writer.leave()
    assert index.pools[WINDOW].num_cached == 2
    assert index.pools[CSA].num_cached == 1


def test_snapshots_leave_in_the_order_of_their_use():
    index = make_index(num_snapshots=2)
    writer = Writer(index, list(range(40)))
    writer.add_snapshot(8)
    writer.add_snapshot(16)
    index.touch(index.match(list(range(9)), UnitHashes("", 8)))
    third = writer.add_snapshot(24)
    assert third is not None and third.slot == 5  # that of the one at 16
    assert match(index, list(range(20))) == (8, 16)
    assert match(index, list(range(30))) == (24, 24)
    index.check()


def test_no_slots_no_snapshot():
    index = make_index(num_snapshots=0)
    assert Writer(index, list(range(9))).add_snapshot(8) is None


def test_make_free_evicts_old_leaves_first():
    index = make_index(num_blocks=8)  # 64 tokens: 2 CSA pages
    old, new = Writer(index, list(range(32))), Writer(index, list(range(100, 132)))
    old.add_units(4)
    new.add_units(4)
    old.leave()
    new.leave()
    assert index.pools[CSA].num_free == 0
    index.make_free(CSA, 1)
    assert match(index, list(range(32))) == (0, 0)
    assert match(index, list(range(100, 132))) == (0, 31)
    index.check()


def test_evicting_a_leaf_takes_its_snapshots():
    index = make_index(num_blocks=8)
    writer = Writer(index, list(range(32)))
    writer.add_snapshot(32)
    writer.leave()
    index.make_free(CSA, 2)
    assert (index.num_nodes, index.num_snapshots) == (0, 0)
    assert index.pools[WINDOW].num_cached == 0
    index.check()


def test_window_shortage_evicts_snapshots_only():
    index = make_index(num_blocks=8)
    writer = Writer(index, list(range(64)))
    writer.add_snapshot(32)
    writer.leave()
    index.make_free(WINDOW, 8)
    assert index.num_snapshots == 0
    assert match(index, list(range(64))) == (0, 32)


def test_nodes_without_pages_are_bounded():
    index = make_index(num_blocks=2, hca_ratio=128, unit=1)
    index.max_nodes = 10
    for start in range(0, 300, 3):  # no CSA entry of 4 tokens is ever complete
        writer = Writer(index, [start, start + 1, start + 2])
        writer.add_units(3)
        writer.leave()
        index.check()
    assert index.num_nodes <= 10


def test_clear_gives_everything_back(index):
    for start in range(0, 60, 10):
        writer = Writer(index, list(range(start, start + 30)))
        writer.add_snapshot(27)
        writer.leave()
    index.clear()
    index.check()
    assert (index.num_nodes, index.num_snapshots) == (0, 0)
    assert all(pool.num_free == pool.num_pages for pool in index.pools.values())


def test_a_tenant_over_its_limit_loses_its_own_leaves_first():
    spec = cache_spec()
    pools = {kind: PagePool(spec.kinds[kind].num_pages) for kind in spec.pool_kinds}
    index = PrefixIndex(spec, pools, {"small": 24})
    for first, tenant in ((0, "other"), (100, "small"), (200, "small"), (300, "")):
        writer = Writer(index, list(range(first, first + 16)))
        index.add_units(writer.hashes, 2, None, writer.tables, tenant)
        writer.leave()
    index.check()
    assert (index.num_cached_tokens("small"), index.num_cached_tokens("other"), index.max_units("small")) == (24, 16, 3)
    assert [match(index, list(range(first, first + 20)))[1] for first in (0, 100, 200, 300)] == [16, 8, 16, 16]
    # A longer chain of its own: all else of it goes, nothing of others; what others began is not counted.
    writer = Writer(index, list(range(24)))
    index.add_units(writer.hashes, 3, None, writer.tables, "small")
    index.check()
    assert index.num_cached_tokens("small") == 24
    assert [match(index, list(range(first, first + 30)))[1] for first in (0, 100, 200, 300)] == [24, 0, 16, 16]


def test_snapshots_on_the_way_through_a_long_prompt_go_first_until_they_are_used():
    index = make_index(num_snapshots=3)
    short, long = Writer(index, [1] * 8), Writer(index, [2] * 24)
    short.add_snapshot(8)
    for num_tokens in (8, 16):
        node = long.add_units(num_tokens // 8)
        index.add_snapshot(node, (), long.tables, long.window, is_spare=True)
    assert [s.num_tokens for s in index.coldest(3)] == [8, 16, 8] and index.coldest(3)[2].tail == ()
    long.add_snapshot(24)  # no slot is free: not the short prompt's end, though it is the oldest
    assert (match(index, [1] * 9)[0], match(index, [2] * 9)[0], match(index, [2] * 17)[0]) == (8, 0, 16)
    index.touch(index.match([2] * 17, UnitHashes("", 8)))  # used: now like others
    other = Writer(index, [3] * 8)
    other.add_snapshot(8)
    assert (match(index, [1] * 9)[0], match(index, [2] * 17)[0]) == (0, 16)
    index.check()
