"""What a running request holds.  [no jax]"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.pool import PagePool
from dsjax.cache.spec import CacheSpec, EntryKind, KindSpec
from dsjax.cache.tree import Node

NO_BOUNDARY = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a request starts with."""

    slot: int  # row slot
    num_cached: int  # tokens that need no computing
    num_shared: int  # tokens whose compressed entries exist: must not be written again


@dataclass(eq=False, kw_only=True)
class RequestCache:
    """The pages and slot of a running request. Read by the scheduler and the runner, written by the manager alone."""

    request_id: str
    slot: int
    num_cached: int
    num_shared: int  # entries below num_shared // ratio are in place: the runner drops writes to them
    num_computed: int  # tokens that dispatched steps (or the prefix cache) cover
    slot_tables: dict[EntryKind, np.ndarray]  # of all slots: int32 [num_slots, table_width], see `tables`
    pages: dict[EntryKind, list[int]]  # compressed pages by index
    window: dict[int, int]  # logical page (position // entries_per_page) -> page id, ascending
    hashes: UnitHashes
    caches_prefix: bool
    num_promised: int  # tokens it had when admitted: others are admitted beside it only if their pages are left
    tenant: str = ""
    group: int = 0  # whose pages are counted together, see `CacheManager.share_of`
    steady_until: int = 0  # extensions up to so many tokens change nothing, see `find_steady`
    node: Node | None = None  # of the last unit registered
    num_units: int = 0  # registered
    boundary: int = NO_BOUNDARY  # where the next snapshot is due
    num_kept: int = 0  # tokens that would be a hit if it were released now, unless they are evicted
    is_spare: bool = False  # that snapshot is one of several on the way through a long prompt

    @property
    def tables(self) -> dict[EntryKind, np.ndarray]:
        """int32 [table_width] page ids; num_pages (out of range) where there is none."""
        return {kind: table[self.slot] for kind, table in self.slot_tables.items()}

    def num_to_come(self, spec: KindSpec) -> int:
        """Pages of a compressed kind that its promised tokens need and it has not got."""
        return max(0, spec.num_table_pages(self.num_promised) - len(self.pages[spec.kind]))

    def num_pages(self, kind: EntryKind) -> int:
        """Pages of a pool that it holds."""
        return len(self.pages.get(kind, self.window))

    def need(self, spec: CacheSpec, num_tokens: int) -> dict[EntryKind, int]:
        """How many pages it lacks for its first `num_tokens` tokens, of each kind of which it lacks some."""
        found = {}
        for kind, pages in self.pages.items():
            num = spec.kinds[kind].num_table_pages(num_tokens) - len(pages)
            if num > 0:
                found[kind] = num
        window = spec.kinds[EntryKind.WINDOW]
        num = -(-num_tokens // window.entries_per_page) - self.next_index(window)
        if num > 0:
            found[EntryKind.WINDOW] = num
        return found

    def next_index(self, spec: KindSpec) -> int:
        """Of the first page of a kind that it lacks."""
        if spec.kind is not EntryKind.WINDOW:
            return len(self.pages[spec.kind])
        first = spec.first_seen(self.num_computed)
        return max(first, next(reversed(self.window)) + 1) if self.window else first

    def find_steady(self, spec: CacheSpec) -> int:
        """The most tokens up to which it lacks nothing, and sees a row of its first window page or did so a token ago:
        where pages divide the window it lacks the next one then."""
        if not self.window:
            return 0
        window = spec.kinds[EntryKind.WINDOW]
        rows, first, last = window.entries_per_page, next(iter(self.window)), next(reversed(self.window))
        limits = [(last + 1) * rows, (first + 1) * rows + (window.window or 0)]
        for kind, pages in self.pages.items():
            compressed = spec.kinds[kind]
            limits.append((len(pages) * compressed.entries_per_page + 1) * compressed.ratio - 1)
        return min(limits)

    def quiet_until(self, spec: CacheSpec) -> int:
        """The most tokens up to which `extend` and `computed` change nothing but `num_computed`, of a request that
        decodes: its newest token is still on the device, so a unit that ends with it cannot be registered yet."""
        limits = [self.steady_until]
        if self.caches_prefix:
            limits.append((self.num_units + 1) * spec.unit_tokens)
            if self.boundary > self.num_computed:
                limits.append(self.boundary - 1)
        return min(limits)


class HeldPages:
    """How many pages running requests hold, by group; one that two share counts for each."""

    def __init__(self):
        self._num: Counter[tuple[int, EntryKind]] = Counter()

    def add(self, request: RequestCache, kind: EntryKind, num: int) -> None:
        self._num[request.group, kind] += num

    def num(self, groups: Iterable[int], kind: EntryKind) -> int:
        return sum(self._num[group, kind] for group in groups)

    def check(self, requests: Iterable[RequestCache]) -> None:
        """AssertionError unless the requests are those that were counted. For tests."""
        held: Counter[tuple[int, EntryKind]] = Counter()
        for request in requests:
            for kind in (*request.pages, EntryKind.WINDOW):
                held[request.group, kind] += request.num_pages(kind)
        assert +held == +self._num, f"{held} pages are held and {self._num} counted"


class PromisedPages:
    """How many compressed pages the promised tokens of running requests need that these have not got."""

    def __init__(self, spec: CacheSpec):
        self._kinds = [spec.kinds[kind] for kind in spec.compressed_kinds]
        self._num: Counter[EntryKind] = Counter()
        self._num_requests = 0

    def add(self, request: RequestCache, num: int = 1) -> None:
        """Counts a request that starts; -1: no longer."""
        self._num_requests += num
        for spec in self._kinds:
            self._num[spec.kind] += num * request.num_to_come(spec)

    def give(self, request: RequestCache, spec: KindSpec) -> None:
        """A request that is counted is about to get a page more."""
        self._num[spec.kind] -= request.num_to_come(spec) > 0

    def has_room(self, new: RequestCache, pools: Mapping[EntryKind, PagePool]) -> bool:
        """Whether all prompts that run and a new one can be computed to their ends, without preempting each other."""
        return not self._num_requests or all(
            self._num[spec.kind] + new.num_to_come(spec) <= pools[spec.kind].num_available for spec in self._kinds
        )

    def check(self, requests: Iterable[RequestCache]) -> None:
        """AssertionError unless the requests are those that were counted. For tests."""
        requests = list(requests)
        to_come = {spec.kind: sum(request.num_to_come(spec) for request in requests) for spec in self._kinds}
        counted = {spec.kind: self._num[spec.kind] for spec in self._kinds}
        assert (len(requests), to_come) == (self._num_requests, counted), f"{to_come} are to come and {counted} counted"
