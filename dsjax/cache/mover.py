"""Moves prefixes of one data shard between the device and the tiers below.  [no jax]"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.moves import BlobKey, Download, Planned
from dsjax.cache.prefix import PrefixIndex, PrefixMatch, window_pages
from dsjax.cache.records import Record, make_record, record_digest
from dsjax.cache.spec import EntryKind
from dsjax.cache.tiers import Tiers
from dsjax.cache.tree import Node, Snapshot

CLEAN_PART = 4  # while fewer than a quarter of the snapshot slots are free, cold snapshots are copied down in advance
MAX_DOWN_BYTES = 1 << 29  # that one step gathers on each device to bring down; what goes beyond is not kept
_LOOK_AT = 8  # of the coldest snapshots, for one to copy


class Mover:
    """Brings dropped snapshots down, and up again what a request can use. Owns nothing: pages are the manager's."""

    def __init__(self, prefix: PrefixIndex, planned: Planned, tiers: Tiers):
        self.spec, self.prefix, self.planned, self.tiers = prefix.spec, prefix, planned, tiers

    def move_down(self, snapshot: Snapshot) -> None:
        """Sees to it that the tiers have a snapshot whose pages, and those of the nodes above, are in place still."""
        if self.tiers.touch(record_digest(snapshot.node.digest, snapshot.tail)):
            return
        chain: list[Node] = []
        node: Node | None = snapshot.node
        while node is not None:
            chain.append(node)
            node = node.parent
        chain.reverse()
        pages = {
            (kind, index): page  # of the deepest that lists it, which has the fullest
            for member in (*chain, snapshot)
            for kind, listed in member.pages.items()
            for index, page in listed
        }
        pages[EntryKind.STATE, 0] = snapshot.slot
        record = make_record(self.spec, [n.digest for n in chain], snapshot.tail)
        if self._num_bytes(self.tiers.lacks(record)) + self._num_bytes(d.key for d in self.planned.downloads) > (
            MAX_DOWN_BYTES
        ):
            self.tiers.num_dropped += 1
            return
        for key in self.tiers.begin(record):
            source = self.planned.source(key.kind, pages[key.kind, key.index])
            if isinstance(source, int):
                self.planned.downloads.append(Download(key.kind, source, key))
            else:
                self.tiers.put(key, source)  # it has come up in this very plan

    def _num_bytes(self, keys: Iterable[BlobKey]) -> int:
        """Of pages; STATE is small."""
        kinds = self.spec.kinds
        return sum(kinds[key.kind].page_bytes for key in keys if key.kind in kinds)

    def move_each_down(self) -> Iterator[None]:
        """See `CacheManager.move_each_down`."""
        for snapshot in reversed(self.prefix.coldest(self.prefix.num_snapshots)):
            if not self.tiers.has(record_digest(snapshot.node.digest, snapshot.tail)):
                self.move_down(snapshot)
                yield

    def clean(self) -> None:
        """Brings a cold snapshot down before it has to make room, if there is little room and nothing else to read."""
        if self.planned.downloads or CLEAN_PART * self.prefix.num_free_slots >= self.spec.num_snapshots:
            return
        for snapshot in self.prefix.coldest(_LOOK_AT):
            if not self.tiers.has(record_digest(snapshot.node.digest, snapshot.tail)):
                return self.move_down(snapshot)

    def want(self, tokens: Sequence[int], hashes: UnitHashes, num_cached: int) -> bytes:
        """See `CacheManager.want`."""
        ready = self.tiers.find(tokens, hashes)
        known = max(num_cached, ready.num_tokens if ready else 0)
        record = self.tiers.want(tokens, hashes, known + self.spec.unit_tokens)
        return record.digest if record else b""

    def promote(self, tokens: Sequence[int], hashes: UnitHashes, tenant: str = "") -> int:
        """Brings the longest ready record of a prefix of `tokens` up, as a cached prefix like others, if it is longer
        by a unit than what the device has. Returns by how many tokens; 0 if nothing changed."""
        found = self.tiers.find(tokens, hashes)
        if found is None:
            return 0
        have = self.prefix.match(tokens, hashes)
        gained = found.num_tokens - have.num_tokens
        if gained < self.spec.unit_tokens or not self._bring_up(found, tokens, hashes, have, tenant):
            return 0
        self.tiers.num_hits += 1
        self.tiers.num_cached_tokens += gained
        return gained

    def _bring_up(
        self, record: Record, tokens: Sequence[int], hashes: UnitHashes, have: PrefixMatch, tenant: str
    ) -> bool:
        spec, prefix, num_tokens = self.spec, self.prefix, record.num_tokens
        num_units = num_tokens // spec.unit_tokens
        start = num_units * spec.unit_tokens
        if num_units > prefix.max_units(tenant):
            return False
        first_token = min(have.num_shared // spec.unit_tokens, num_units) * spec.unit_tokens
        kept: dict[EntryKind, list[int]] = {}  # pages that the nodes on the device list, as far as they are full enough
        wanted: dict[EntryKind, range] = {EntryKind.WINDOW: window_pages(spec, num_tokens)}
        for kind in spec.compressed_kinds:
            kind_spec = spec.kinds[kind]
            first, last = kind_spec.num_entries(first_token), kind_spec.num_table_pages(num_tokens)
            if first == kind_spec.num_entries(num_tokens):
                wanted[kind] = range(last, last)  # no entry beyond those
            else:
                wanted[kind] = range(first // kind_spec.entries_per_page, last)
            kept[kind] = have.pages.get(kind, [])[: wanted[kind].start]
        # Held as by a request, so that making room does not free what is needed.
        held = [(kind, page) for kind, pages in kept.items() for page in pages]
        for kind, page in held:
            prefix.pools[kind].retain(page)
        prefix.touch(have)
        fits = all(len(wanted[kind]) <= prefix.pools[kind].num_available for kind in wanted)
        if fits:
            arrays = {(key.kind, key.index): blob for key, blob in self.tiers.arrays(record).items()}
            window: dict[int, int] = {}
            for kind, indices in wanted.items():
                prefix.make_free(kind, len(indices))
                pages = prefix.pools[kind].allocate(len(indices))
                held += [(kind, page) for page in pages]
                for index, page in zip(indices, pages, strict=True):
                    self.planned.add(kind, arrays[kind, index], page)
                if kind is EntryKind.WINDOW:
                    window = dict(zip(indices, pages, strict=True))
                else:
                    kept[kind] += pages
            node = prefix.add_units(hashes, num_units, None, kept, tenant)
            snapshot = prefix.add_snapshot(node, tuple(tokens[start:num_tokens]), kept, window)
            if snapshot is None:
                fits = False
            else:
                self.planned.add(EntryKind.STATE, arrays[EntryKind.STATE, 0], snapshot.slot)
        for kind, page in held:
            prefix.pools[kind].release(page)
        return fits
