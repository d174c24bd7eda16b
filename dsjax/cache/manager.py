"""Who holds which page and slot: admits, extends and releases requests, and keeps what they leave behind.  [no jax]

A plan (one engine step) goes: `release`/`admit`/`extend` as the schedule wants, `take_moves`, dispatch, then
`computed` for every request of the step. What is moved before the step, and in which order, is in `moves.py`: a page
may be freed, handed out again and overwritten by the plan that copies it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.held import NO_BOUNDARY, Admission, HeldPages, PromisedPages, RequestCache
from dsjax.cache.mover import Mover
from dsjax.cache.moves import Moves, Planned
from dsjax.cache.pool import PagePool
from dsjax.cache.prefix import PrefixIndex, PrefixMatch
from dsjax.cache.spec import CacheSpec, Copy, EntryKind
from dsjax.cache.tiers import Tiers

SHORT_PROMPT_UNITS = 8  # prompts up to this many units leave a snapshot on each


class CacheManager:
    """The one owner of pages and slots."""

    def __init__(self, spec: CacheSpec, tiers: Tiers | None = None, tenant_tokens: Mapping[str, int] | None = None):
        """Without `tiers` what leaves the device is gone. `tenant_tokens` limits what tenants may have cached."""
        self.spec = spec
        self.pools = {kind: PagePool(spec.kinds[kind].num_pages) for kind in spec.pool_kinds}
        self.prefix = PrefixIndex(spec, self.pools, tenant_tokens)
        self._window = spec.kinds[EntryKind.WINDOW]
        self._requests: dict[str, RequestCache] = {}
        self._held = HeldPages()
        self._promised = PromisedPages(spec)
        kinds = [spec.kinds[kind] for kind in spec.pool_kinds]
        self._tables = {k.kind: np.full((spec.num_slots, k.table_width), k.num_pages, np.int32) for k in kinds}
        self._free_slots = deque(range(spec.num_slots))
        self._planned = Planned()
        self._mover: Mover | None = None
        if tiers is not None:
            self._mover = Mover(self.prefix, self._planned, tiers)
            self.prefix.on_drop = self._mover.move_down

    # --- reading -------------------------------------------------------------------------------

    @property
    def num_total(self) -> int:
        """Pages of all pools."""
        return sum(pool.num_pages for pool in self.pools.values())

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.pools.values())

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds: free as soon as someone wants them."""
        return sum(pool.num_cached for pool in self.pools.values())

    @property
    def usage(self) -> float:
        """In [0, 1]: the part of the fullest pool that requests hold."""
        return max(pool.num_used / pool.num_pages for pool in self.pools.values())

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def share_of(self, groups: Iterable[int]) -> float:
        """In [0, 1]: the part of the fullest pool that requests of these groups hold; a page they share counts for
        each."""
        return max(self._held.num(groups, kind) / pool.num_pages for kind, pool in self.pools.items())

    def request(self, request_id: str) -> RequestCache:
        """The running request's pages; KeyError if it is not running."""
        return self._requests[request_id]

    def match(self, tokens: Sequence[int], salt: str, hashes: UnitHashes | None = None) -> PrefixMatch:
        """What `admit` would find; changes nothing but `hashes`."""
        return self.prefix.match(tokens, hashes or UnitHashes(salt, self.spec.unit_tokens))

    # --- tiers -----------------------------------------------------------------------------------

    @property
    def has_tiers(self) -> bool:
        """Whether what leaves the device is kept below it."""
        return self._mover is not None and self.spec.num_snapshots > 0

    def want(self, tokens: Sequence[int], hashes: UnitHashes, num_cached: int) -> bytes:
        """Has the tiers make ready what a waiting request can use beyond `num_cached` tokens.
        Returns what `is_coming` takes while that is on its way; b"" if there is nothing to wait for."""
        return self._mover.want(tokens, hashes, num_cached) if self._mover and self.spec.num_snapshots else b""

    def is_coming(self, awaited: bytes) -> bool:
        """Whether it is still on its way."""
        return self._mover is not None and self._mover.tiers.is_coming(awaited)

    def promote(self, tokens: Sequence[int], salt: str) -> int:
        """Brings up what the tiers have ready of `tokens`, as `admit` does; returns how many tokens were gained."""
        hashes = UnitHashes(salt, self.spec.unit_tokens)
        return self._mover.promote(tokens, hashes) if self._mover and self.spec.num_snapshots else 0

    def move_each_down(self) -> Iterator[None]:
        """Brings the snapshots that the tiers lack down, the latest used first; before each next one is the time to do
        the moves. Nothing else may be asked of the cache meanwhile."""
        return self._mover.move_each_down() if self._mover else iter(())

    # --- admitting and extending -------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        tokens: Sequence[int],
        salt: str,
        use_prefix_cache: bool,
        num_first_tokens: int,
        hashes: UnitHashes | None = None,
        tenant: str = "",
        group: int = 0,
    ) -> Admission | None:
        """Gives the request a slot and what the prefix cache has of `tokens` (all it has so far, at least one).

        None, and nothing changed, if no slot is free or the pages for `num_first_tokens` tokens after the hit are
        not to be had. After an Admission, `extend` by up to that many succeeds if called before other requests'.
        `hashes` are those of the same salt and tokens, if the caller has them already: long prompts take long.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is running already")
        if not self._free_slots:
            return None
        caches_prefix = use_prefix_cache and self.spec.num_snapshots > 0
        hashes = hashes or UnitHashes(salt, self.spec.unit_tokens)
        if self._mover and caches_prefix:
            self._mover.promote(tokens, hashes, tenant)
        match = self.prefix.match(tokens, hashes) if caches_prefix else PrefixMatch()
        request = RequestCache(
            request_id=request_id,
            slot=self._free_slots[0],
            num_cached=match.num_tokens,
            num_shared=match.num_shared,
            num_computed=match.num_tokens,
            slot_tables=self._tables,
            pages={kind: list(match.pages.get(kind, ())) for kind in self.spec.compressed_kinds},
            window=dict(match.snapshot.pages[EntryKind.WINDOW]) if match.snapshot else {},
            hashes=hashes,
            caches_prefix=caches_prefix,
            num_promised=len(tokens),
            tenant=tenant,
            group=group,
            num_kept=match.num_tokens,
        )
        copies = self._take_partial(request, match)
        self._retain(request)
        need = request.need(self.spec, min(len(tokens), match.num_tokens + max(1, num_first_tokens)))
        # The copied page is the first of those needed, unless the shared entries reach beyond the first chunk.
        wanted = {kind: max(need.get(kind, 0), kind in copies) for kind in self.pools}
        fits = all(wanted[k] <= self.pools[k].num_available for k in wanted)
        if not (fits and self._promised.has_room(request, self.pools)):
            self._release_pages(request)
            return None
        self._free_slots.popleft()
        self._requests[request_id] = request
        self._promised.add(request)
        self.prefix.touch(match)
        # Sources are resolved before pages are allocated: a source may be evicted and handed out for its own copy.
        sources = {kind: self._planned.source(kind, page) for kind, (_, page) in copies.items()}
        for kind, (index, page) in copies.items():
            self.prefix.make_free(kind, 1, keep=match)
            if self.pools[kind].num_free or not self.pools[kind].num_cache_refs(page):
                (page,) = self._allocate(kind, 1)
                self._planned.add(kind, sources[kind], page)
            else:  # there is no other page, and by now nothing else that lists this one
                self.pools[kind].retain(page)
            self._put(request, kind, index, page)
        for kind, table in request.tables.items():
            table.fill(self.spec.kinds[kind].num_pages)
            if kind in request.pages:
                table[: len(request.pages[kind])] = request.pages[kind]
        for logical, page in request.window.items():
            self._tables[EntryKind.WINDOW][request.slot, logical % self._window.table_width] = page
        if match.snapshot:
            self._planned.add(EntryKind.STATE, self._planned.source(EntryKind.STATE, match.snapshot.slot), request.slot)
        else:
            self._planned.forget(EntryKind.STATE, request.slot)  # of a request that came and went in this plan
        return Admission(slot=request.slot, num_cached=match.num_tokens, num_shared=match.num_shared)

    def _take_partial(self, request: RequestCache, match: PrefixMatch) -> dict[EntryKind, tuple[int, int]]:
        """Removes the shared pages that the request will write to; returns {pool: (page index, page id)} to copy.

        A page that no request holds and only the match lists is written on in place: no one has entries beyond those.
        """
        copies: dict[EntryKind, tuple[int, int]] = {}
        for kind, pages in request.pages.items():
            spec = self.spec.kinds[kind]
            is_partial = spec.num_entries(request.num_shared) % spec.entries_per_page
            if is_partial and self.pools[kind].num_cache_refs(pages[-1]) != match.num_listed[kind]:
                copies[kind] = len(pages) - 1, pages.pop()
        pool, is_partial = self.pools[EntryKind.WINDOW], request.num_cached % self._window.entries_per_page
        if request.window and is_partial and pool.num_cache_refs(next(reversed(request.window.values()))) != 1:
            copies[EntryKind.WINDOW] = request.window.popitem()
        return copies

    def _retain(self, request: RequestCache) -> None:
        for kind, pages in request.pages.items():
            for page in pages:
                self.pools[kind].retain(page)
            self._held.add(request, kind, len(pages))
        for page in request.window.values():
            self.pools[EntryKind.WINDOW].retain(page)
        self._held.add(request, EntryKind.WINDOW, len(request.window))

    def extend(self, request_id: str, num_tokens_total: int) -> bool:
        """Makes room for the entries and window rows of all tokens below `num_tokens_total`.

        False if pages are missing even with the prefix cache emptied; then nothing was allocated or evicted.
        Window pages that the next token no longer sees are given back either way, one perhaps a token later.
        """
        request = self._requests[request_id]
        if num_tokens_total <= request.steady_until:
            return True
        if num_tokens_total - request.num_computed > self.spec.max_chunk_tokens:
            raise ValueError(
                f"a chunk of {num_tokens_total - request.num_computed} tokens is more than "
                f"max_chunk_tokens={self.spec.max_chunk_tokens}"
            )
        self._free_behind_window(request)
        need = request.need(self.spec, num_tokens_total)
        if any(num > self.pools[kind].num_available for kind, num in need.items()):
            return False
        for kind, num in need.items():
            for index, page in enumerate(self._allocate(kind, num), request.next_index(self.spec.kinds[kind])):
                self._put(request, kind, index, page)
        request.steady_until = request.find_steady(self.spec)
        return True

    def _allocate(self, kind: EntryKind, num: int) -> list[int]:
        self.prefix.make_free(kind, num)
        pages = self.pools[kind].allocate(num)
        for page in pages:
            self._planned.forget(kind, page)  # planned for whoever held the page before
        return pages

    def _put(self, request: RequestCache, kind: EntryKind, index: int, page: int) -> None:
        if kind is EntryKind.WINDOW:
            request.window[index] = page
            self._tables[kind][request.slot, index % self._window.table_width] = page
        else:
            self._promised.give(request, self.spec.kinds[kind])
            request.pages[kind].append(page)
            self._tables[kind][request.slot, index] = page
        self._held.add(request, kind, 1)

    def _free_behind_window(self, request: RequestCache) -> None:
        first = self._window.first_seen(request.num_computed)
        while request.window and (logical := next(iter(request.window))) < first:
            self.pools[EntryKind.WINDOW].release(request.window.pop(logical))
            self._held.add(request, EntryKind.WINDOW, -1)
            self._tables[EntryKind.WINDOW][request.slot, logical % self._window.table_width] = self._window.num_pages

    # --- leaving something for later requests --------------------------------------------------------

    def next_boundary(self, request_id: str, num_computed: int, num_prompt_tokens: int) -> int:
        """Where the chunk that begins at `num_computed` must end at the latest, so that a snapshot can be taken there.

        `num_prompt_tokens` counts what is to be prefilled (of a preempted request also its output so far).
        NO_BOUNDARY beyond it, and for requests without prefix caching.
        """
        request = self._requests[request_id]
        request.boundary = NO_BOUNDARY
        if not request.caches_prefix or num_computed >= num_prompt_tokens:
            return NO_BOUNDARY
        unit = self.spec.unit_tokens
        is_short = num_prompt_tokens <= SHORT_PROMPT_UNITS * unit
        interval = unit if is_short else self.spec.snapshot_interval_tokens
        points = (
            request.num_shared // unit * unit,  # another prompt branched off here
            (num_prompt_tokens - 1) // unit * unit,  # what the same prompt hits next time
            num_prompt_tokens,
        )
        on_the_way = (num_computed // interval + 1) * interval
        request.boundary = min(point for point in (*points, on_the_way) if point > num_computed)
        request.is_spare = request.boundary not in points
        return request.boundary

    def advance(self, request: RequestCache, num_computed: int) -> None:
        """Notes that dispatched steps cover so many tokens, all below `quiet_until`: else `computed` is called."""
        request.num_computed = num_computed

    def computed(self, request_id: str, tokens: Sequence[int], num_computed: int) -> Copy | None:
        """Notes that a dispatched step covers the request's first `num_computed` tokens.

        `tokens` are those the host knows, perhaps fewer. Registers complete units, and at a boundary takes a
        snapshot; returns the STATE copy for that, which is also among the next plan's copies.
        """
        request = self._requests[request_id]
        request.num_computed = num_computed
        if not request.caches_prefix:
            return None
        if num_computed >= (request.num_units + 1) * self.spec.unit_tokens:
            self._register(request, tokens, num_computed)
        if num_computed == request.boundary:
            return self._snapshot(request, tokens, request.is_spare)
        return None

    def _register(self, request: RequestCache, tokens: Sequence[int], num_computed: int, again: bool = False) -> None:
        num_units = min(len(tokens), num_computed) // self.spec.unit_tokens
        num_units = min(num_units, self.prefix.max_units(request.tenant))
        if num_units > request.num_units or (again and num_units and not (request.node and request.node.alive)):
            request.hashes.extend(tokens, num_units)
            request.node = self.prefix.add_units(request.hashes, num_units, request.node, request.pages, request.tenant)
            request.num_units = num_units

    def _snapshot(self, request: RequestCache, tokens: Sequence[int], is_spare: bool = False) -> Copy | None:
        num_tokens, unit = request.num_computed, self.spec.unit_tokens
        if not 0 < num_tokens <= len(tokens):
            return None  # the newest token is still on the device
        num_units = num_tokens // unit
        if num_units > self.prefix.max_units(request.tenant):
            return None
        request.hashes.extend(tokens, num_units)
        node = self.prefix.add_units(request.hashes, num_units, request.node, request.pages, request.tenant)
        request.node, request.num_units = node, num_units
        request.num_kept = num_tokens
        tail = tuple(tokens[num_units * unit : num_tokens])
        if self.prefix.find_snapshot(node, tail):
            return None
        snapshot = self.prefix.add_snapshot(node, tail, request.pages, request.window, is_spare)
        if snapshot is None:
            return None
        return self._planned.add(EntryKind.STATE, self._planned.source(EntryKind.STATE, request.slot), snapshot.slot)

    # --- releasing -----------------------------------------------------------------------------------

    def release(
        self, request_id: str, tokens: Sequence[int] | None = None, num_computed: int = 0, snapshot: bool = False
    ) -> None:
        """Takes the slot and pages back: the request finished, was aborted or is preempted.

        With `tokens` (which steps up to `num_computed` covered) its complete units stay cached; with `snapshot` also
        the state after the last token, where the next turn goes on, if `tokens` reach as far as the steps did.
        """
        request = self._requests.pop(request_id)
        if tokens is not None and request.caches_prefix:
            self._register(request, tokens, min(num_computed, request.num_computed), again=True)
            if snapshot and num_computed == request.num_computed:
                self._snapshot(request, tokens)
        self._promised.add(request, -1)
        self._release_pages(request)
        self._free_slots.append(request.slot)

    def _release_pages(self, request: RequestCache) -> None:
        for kind, pages in request.pages.items():
            for page in pages:
                self.pools[kind].release(page)
            self._held.add(request, kind, -len(pages))
        for page in request.window.values():
            self.pools[EntryKind.WINDOW].release(page)
        self._held.add(request, EntryKind.WINDOW, -len(request.window))

    def reset_prefix_cache(self) -> None:
        """Forgets everything cached here. Running requests go on, and leave nothing: their entries may be outdated."""
        self.prefix.clear()
        self._planned.downloads.clear()
        for request in self._requests.values():
            request.caches_prefix = False

    # --- moves ----------------------------------------------------------------------------------------

    def take_moves(self) -> Moves:
        """What to move before the step that is dispatched next."""
        if self._mover:
            self._mover.clean()
        return self._planned.take()

    # --- checking --------------------------------------------------------------------------------------

    def check(self) -> None:
        """AssertionError unless every page and slot is accounted for once. For tests: looks at everything."""
        self.prefix.check()
        for kind, pool in self.pools.items():
            is_window = kind is EntryKind.WINDOW
            held = [list(r.window.values()) if is_window else r.pages[kind] for r in self._requests.values()]
            pool.check((page for pages in held for page in pages), self.prefix.held_pages(kind))
            spec = self.spec.kinds[kind]
            for request in self._requests.values():
                expected = np.full(spec.table_width, spec.num_pages, np.int32)
                pages = request.window if is_window else dict(enumerate(request.pages[kind]))
                assert len({index % spec.table_width for index in pages}) == len(pages), "two live pages on one column"
                for index, page in pages.items():
                    expected[index % spec.table_width] = page
                assert (request.tables[kind] == expected).all(), f"{request.request_id}: {kind} table is out of date"
        self._held.check(self._requests.values())
        self._promised.check(self._requests.values())
        slots = sorted([*self._free_slots, *(request.slot for request in self._requests.values())])
        assert slots == list(range(self.spec.num_slots)), f"row slots: {slots}"
        assert sum(pool.num_free + pool.num_cached + pool.num_used for pool in self.pools.values()) == self.num_total
