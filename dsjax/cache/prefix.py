"""What of earlier requests can be used again: a tree of hashed units, with snapshots on it.  [no jax]

A *node* is a unit of `unit_tokens` tokens after its parent's tokens; it lists the compressed pages that hold the
entries which that unit completes. A *snapshot* hangs on the node of the last complete unit before position n and adds
what is needed to go on from n: the window pages, a STATE slot and, for the tokens between the node's end and n (its
tail), their compressed pages. The root of a salt is a node of no tokens.

Every listed page holds one reference of the prefix cache. Whoever wrote a listed page had, or copied, all entries of
that page before the listed ones, so along a chain the deepest member that lists a page index has the fullest page.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.pool import PagePool
from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.cache.tree import Leaves, Node, Pages, Snapshot


@dataclass(frozen=True, kw_only=True)
class PrefixMatch:
    """The best hit for some tokens."""

    num_tokens: int = 0  # where computing goes on; 0 is no hit
    num_shared: int = 0  # >= num_tokens: compressed entries of these tokens exist
    snapshot: Snapshot | None = None
    node: Node | None = None  # the deepest node of the chain
    pages: dict[EntryKind, list[int]] = field(default_factory=dict)  # compressed: page ids by index, up to num_shared
    num_listed: dict[EntryKind, int] = field(default_factory=dict)  # by what of it the last of those pages is listed


class PrefixIndex:
    """The tree, its least-recently-used orders and its references to pages and snapshot slots.

    What makes room for a page is the least recently used that may list one. For a compressed page that is a leaf, which
    takes its snapshots with it, or a snapshot whose tail has such a page, which leaves alone: the ends of many requests
    hang on the node that all of them share. For a window page or a slot it is a snapshot. A tenant with a limit loses
    its own leaves first: those that it registered and under which nobody else has a node.
    """

    def __init__(
        self, spec: CacheSpec, pools: dict[EntryKind, PagePool], tenant_tokens: Mapping[str, int] | None = None
    ):
        """`tenant_tokens` limits what single tenants may have cached."""
        self.spec = spec
        self.pools = pools
        self.on_drop: Callable[[Snapshot], None] | None = None  # told of a snapshot while its pages are still there
        # Nodes that hold no page cost only memory of the host: bounded by what the pools could ever describe.
        capacity = (
            spec.kinds[k].num_pages * spec.kinds[k].entries_per_page * spec.kinds[k].ratio for k in spec.pool_kinds
        )
        self.max_nodes = 1024 + 2 * max(capacity) // spec.unit_tokens
        self._nodes: dict[bytes, Node] = {}
        self._leaves = Leaves()
        self._max_units = {name: tokens // spec.unit_tokens for name, tokens in (tenant_tokens or {}).items()}
        self._tenant_leaves = {name: Leaves() for name in self._max_units}
        self._num_units: Counter[str] = Counter()  # by tenant
        self._snapshots: OrderedDict[Snapshot, None] = OrderedDict()  # least recently used first
        self._spare: OrderedDict[Snapshot, None] = OrderedDict()  # of those, what goes before the others: not used yet
        self._tails: dict[EntryKind, OrderedDict[Snapshot, None]] = {  # of those, what lists a page of the kind
            kind: OrderedDict() for kind in spec.compressed_kinds
        }
        self._free_slots = list(range(spec.num_slots + spec.num_snapshots - 1, spec.num_slots - 1, -1))
        self._clock = 0

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_free_slots(self) -> int:
        """Snapshots that can be added before one has to go."""
        return len(self._free_slots)

    def coldest(self, num: int) -> list[Snapshot]:
        """The `num` snapshots that would go first."""
        rest = (snapshot for snapshot in self._snapshots if snapshot not in self._spare)
        return list(itertools.islice(itertools.chain(self._spare, rest), num))

    def num_cached_tokens(self, tenant: str) -> int:
        """Of the units that a tenant registered."""
        return self._num_units[tenant] * self.spec.unit_tokens

    def max_units(self, tenant: str) -> int:
        """The most units that one request of the tenant may register."""
        return self._max_units.get(tenant, self.max_nodes)

    # --- finding -------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], hashes: UnitHashes) -> PrefixMatch:
        """The longest usable prefix of `tokens`, at most all but the last of them. Changes nothing but `hashes`."""
        limit, unit = len(tokens) - 1, self.spec.unit_tokens
        hashes.extend(tokens, len(tokens) // unit)
        chain: list[Node] = []
        for digest in hashes.digests[: len(tokens) // unit + 1]:
            node = self._nodes.get(digest)
            if node is None:
                break
            chain.append(node)
        if not chain:
            return PrefixMatch()
        snapshot = None
        for node in reversed(chain):
            start = node.depth * unit
            usable = [
                s
                for tail, s in node.snapshots.items()
                if 0 < s.num_tokens <= limit and tuple(tokens[start : s.num_tokens]) == tail
            ]
            if usable:
                snapshot = max(usable, key=lambda s: s.num_tokens)
                break
        num_tokens = snapshot.num_tokens if snapshot else 0
        num_shared = max(num_tokens, min(chain[-1].depth * unit, limit))
        listed: list[Pages] = [node.pages for node in chain]
        if snapshot and num_shared == num_tokens:
            listed.append(snapshot.pages)
        pages, num_listed = {}, {}
        for kind in self.spec.compressed_kinds:
            by_index = {index: page for member in listed for index, page in member.get(kind, ())}
            pages[kind] = [by_index[i] for i in range(self.spec.kinds[kind].num_table_pages(num_shared))]
            last = pages[kind][-1:]
            num_listed[kind] = sum(page in last for member in listed for _, page in member.get(kind, ()))
        return PrefixMatch(
            num_tokens=num_tokens,
            num_shared=num_shared,
            snapshot=snapshot,
            node=chain[-1],
            pages=pages,
            num_listed=num_listed,
        )

    def touch(self, match: PrefixMatch) -> None:
        """Marks what a hit uses as most recently used."""
        self._clock += 1
        node = match.node
        while node:
            node.last_used = self._clock
            node = node.parent
        if match.snapshot in self._snapshots:
            self._use(match.snapshot)

    # --- adding --------------------------------------------------------------------------------

    def add_units(
        self,
        hashes: UnitHashes,
        num_units: int,
        start: Node | None,
        tables: dict[EntryKind, list[int]],
        tenant: str = "",
    ) -> Node:
        """Registers units up to `num_units` of a request that holds `tables`; returns the last one's node.

        `num_units` must be at most `max_units(tenant)`. `start` is a node of the same chain from which to go on, unless
        it has been evicted. Units that exist are kept as they are: the request's pages of the same text stay its own.
        """
        self._clock += 1
        unit = self.spec.unit_tokens
        node = start if start and start.alive else self._add(hashes.digests[0], None, {}, "")
        node.last_used = self._clock
        for depth in range(node.depth + 1, num_units + 1):
            found = self._nodes.get(hashes.digests[depth])
            node = found or self._add(
                hashes.digests[depth], node, self._listed(depth * unit - unit, depth * unit, tables), tenant
            )
            node.last_used = self._clock
        while len(self._nodes) > max(self.max_nodes, num_units + 1) and self._evict(self._leaves.coldest(node), node):
            pass
        own = self._tenant_leaves.get(tenant)
        while (
            own is not None
            and self._num_units[tenant] > self._max_units[tenant]
            and self._evict(own.coldest(node), node)
        ):
            pass
        return node

    def _add(self, digest: bytes, parent: Node | None, pages: Pages, tenant: str) -> Node:
        existing = self._nodes.get(digest)
        if existing:
            return existing
        node = Node(digest, parent, parent.depth + 1 if parent else 0, pages, self._clock, tenant)
        if parent:
            parent.children.add(node)
            self._num_units[tenant] += 1
        self._retain(pages)
        self._nodes[digest] = node
        self._push(node)
        return node

    def _listed(self, start: int, end: int, tables: dict[EntryKind, list[int]]) -> Pages:
        """Compressed pages of the entries that tokens [start, end) complete."""
        pages: Pages = {}
        for kind in self.spec.compressed_kinds:
            spec = self.spec.kinds[kind]
            first, last = spec.num_entries(start), spec.num_entries(end)
            # No entry, no page: a unit may be shorter than an entry.
            stop = (last - 1) // spec.entries_per_page + 1 if first < last else 0
            pages[kind] = tuple((i, tables[kind][i]) for i in range(first // spec.entries_per_page, stop))
        return pages

    def find_snapshot(self, node: Node, tail: tuple[int, ...]) -> Snapshot | None:
        """The snapshot of that text, marked as most recently used."""
        snapshot = node.snapshots.get(tail)
        if snapshot:
            self._use(snapshot)
        return snapshot

    def _use(self, snapshot: Snapshot) -> None:
        snapshot.last_used = self._clock
        self._snapshots.move_to_end(snapshot)
        self._spare.pop(snapshot, None)
        for kind, tails in self._tails.items():
            if snapshot.pages[kind]:
                tails.move_to_end(snapshot)

    def add_snapshot(
        self,
        node: Node,
        tail: tuple[int, ...],
        tables: dict[EntryKind, list[int]],
        window: dict[int, int],  # logical page -> page id, held by the request
        is_spare: bool = False,
    ) -> Snapshot | None:
        """Adds a snapshot at the node's end plus `tail`, evicting the least recently used one if no slot is free.

        A spare one goes before all that are not until it has been used: of a long prompt there are many on the way,
        and those of a few prompts would drive out the ends of all others.

        None if there are no slots at all.
        """
        while not self._free_slots:
            if not self.evict_snapshot(keep_node=node):
                return None
        start = node.depth * self.spec.unit_tokens
        num_tokens = start + len(tail)
        pages = self._listed(start, num_tokens, tables)
        needed = window_pages(self.spec, num_tokens)
        pages[EntryKind.WINDOW] = tuple((logical, window[logical]) for logical in needed)
        self._retain(pages)
        snapshot = Snapshot(node, tail, num_tokens, pages, self._free_slots.pop(), self._clock)
        node.snapshots[tail] = snapshot
        self._snapshots[snapshot] = None
        for kind, tails in self._tails.items():
            if pages[kind]:
                tails[snapshot] = None
        if is_spare:
            self._spare[snapshot] = None
        return snapshot

    # --- evicting ------------------------------------------------------------------------------

    def make_free(self, kind: EntryKind, num: int, keep: PrefixMatch | None = None) -> None:
        """Evicts until `num` pages of the pool are free or nothing more can be evicted: nothing but `keep`, which has
        just been used."""
        pool = self.pools[kind]
        while pool.num_free < num and self._evict_one(kind, keep or PrefixMatch()):
            pass

    def _evict_one(self, kind: EntryKind, keep: PrefixMatch) -> bool:
        """Drops what a page of the pool is to be had from; False if there is nothing."""
        is_window = kind is EntryKind.WINDOW
        order = (self._spare or self._snapshots) if is_window else self._tails[kind]
        snapshot, leaf = next(iter(order), None), None if is_window else self._leaves.coldest(keep.node)
        if snapshot and snapshot is not keep.snapshot and (leaf is None or snapshot.last_used <= leaf.last_used):
            self._drop_snapshot(snapshot, None)
            return True
        return self._evict(leaf)

    def evict_snapshot(self, keep_node: Node | None = None) -> bool:
        """Drops the least recently used snapshot; False if there is none. `keep_node` is not pruned for being bare."""
        if not self._snapshots:
            return False
        self._drop_snapshot(next(iter(self._spare or self._snapshots)), keep_node)
        return True

    def clear(self) -> None:
        """Drops everything, telling nobody."""
        on_drop, self.on_drop = self.on_drop, None
        while self._evict(self._leaves.coldest(None)):
            pass
        self.on_drop = on_drop

    def _evict(self, leaf: Node | None, keep: Node | None = None) -> bool:
        """Drops a leaf with its snapshots; False if there is none."""
        if leaf is None:
            return False
        for snapshot in list(leaf.snapshots.values()):
            self._drop_snapshot(snapshot, leaf)
        self._remove(leaf)
        self._prune(leaf.parent, keep)
        return True

    def _drop_snapshot(self, snapshot: Snapshot, keep_node: Node | None) -> None:
        if self.on_drop is not None:
            self.on_drop(snapshot)
        del self._snapshots[snapshot]
        for order in (self._spare, *self._tails.values()):
            order.pop(snapshot, None)
        del snapshot.node.snapshots[snapshot.tail]
        self._free_slots.append(snapshot.slot)
        self._release(snapshot.pages)
        self._prune(snapshot.node, keep_node)

    def _prune(self, node: Node | None, keep: Node | None) -> None:
        while node and node is not keep and node.is_bare:
            self._remove(node)
            node = node.parent

    def _remove(self, node: Node) -> None:
        node.alive = False
        del self._nodes[node.digest]
        self._release(node.pages)
        for leaves in self._leaves_of(node):
            leaves.discard(node)
        parent = node.parent
        if parent:
            self._num_units[node.tenant] -= 1
            parent.children.discard(node)
            parent.last_used = max(parent.last_used, node.last_used)
            self._push(parent)

    def _push(self, node: Node) -> None:
        for leaves in self._leaves_of(node):
            leaves.push(node)

    def _leaves_of(self, node: Node) -> Iterable[Leaves]:
        own = self._tenant_leaves.get(node.tenant) if node.parent else None
        return (self._leaves,) if own is None else (self._leaves, own)

    def _retain(self, pages: Pages) -> None:
        for kind, listed in pages.items():
            for _, page in listed:
                self.pools[kind].retain(page, cache=True)

    def _release(self, pages: Pages) -> None:
        for kind, listed in pages.items():
            for _, page in listed:
                self.pools[kind].release(page, cache=True)

    # --- checking ------------------------------------------------------------------------------

    def held_pages(self, kind: EntryKind) -> Iterator[int]:
        """Every reference of the prefix cache to pages of a pool."""
        holders = itertools.chain(self._nodes.values(), self._snapshots)
        return (page for holder in holders for _, page in holder.pages.get(kind, ()))

    def check(self) -> None:
        """AssertionError unless the tree, the orders and the snapshot slots agree. For tests: looks at everything."""
        for digest, node in self._nodes.items():
            assert node.alive and node.digest == digest and all(child.alive for child in node.children)
            assert node.parent is None or (
                node in node.parent.children and self._nodes[node.parent.digest] is node.parent
            )
            assert node.children or all(node in leaves for leaves in self._leaves_of(node)), "a leaf that would stay"
            assert all(s in self._snapshots and s.node is node for s in node.snapshots.values())
        assert sum(len(node.snapshots) for node in self._nodes.values()) == len(self._snapshots)
        assert all(s.node.alive for s in self._snapshots) and self._spare.keys() <= self._snapshots.keys()
        for kind, tails in self._tails.items():
            assert list(tails) == [s for s in self._snapshots if s.pages[kind]], "two orders of snapshots"
        assert all(s.last_used <= s.node.last_used for s in self._snapshots), "a node that would go before its snapshot"
        assert Counter(n.tenant for n in self._nodes.values() if n.parent) == +self._num_units
        slots = sorted([*self._free_slots, *(s.slot for s in self._snapshots)])
        assert slots == list(range(self.spec.num_slots, self.spec.num_state_slots)), f"snapshot slots: {slots}"


def window_pages(spec: CacheSpec, num_tokens: int) -> range:
    """Logical WINDOW pages with the rows that token `num_tokens` sees besides its own."""
    window = spec.kinds[EntryKind.WINDOW]
    assert window.window is not None
    first = max(0, num_tokens - window.window + 1)
    if first == num_tokens:
        return range(0)
    return range(first // window.entries_per_page, (num_tokens - 1) // window.entries_per_page + 1)
