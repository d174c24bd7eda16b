"""What the prefix index is made of: nodes, the snapshots on them, and leaves in the order they go.  [no jax]"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from dsjax.cache.spec import EntryKind

Pages = dict[EntryKind, tuple[tuple[int, int], ...]]  # pool -> (page index in the sequence, page id)


@dataclass(eq=False)
class Node:
    """One unit of some request's tokens, or (`parent` None) the root of a salt."""

    digest: bytes
    parent: Node | None
    depth: int  # units up to and with this one
    pages: Pages
    last_used: int
    tenant: str = ""  # who registered it
    alive: bool = True  # False once evicted
    children: set[Node] = field(default_factory=set)
    snapshots: dict[tuple[int, ...], Snapshot] = field(default_factory=dict)  # by tail

    @property
    def is_bare(self) -> bool:
        """Nothing here or below can serve a hit or hold a page."""
        return not self.children and not self.snapshots and not any(self.pages.values())


@dataclass(eq=False)
class Snapshot:
    """All that is needed, besides the pages of the nodes above, to continue at position `num_tokens`."""

    node: Node
    tail: tuple[int, ...]  # tokens after the node's end, fewer than a unit
    num_tokens: int
    pages: Pages  # compressed pages of the tail's entries; WINDOW pages of the last window - 1 tokens
    slot: int  # STATE
    last_used: int


class Leaves:
    """Nodes without children, the least recently used first."""

    def __init__(self):
        self._heap: list[tuple[int, int, Node]] = []  # (last_used when pushed, sequence number, node)
        self._members: set[Node] = set()
        self._sequence = itertools.count()

    def __contains__(self, node: Node) -> bool:
        return node in self._members

    def push(self, node: Node) -> None:
        if node in self._members or node.children:
            return
        self._members.add(node)
        heapq.heappush(self._heap, (node.last_used, next(self._sequence), node))
        if len(self._heap) > 64 + 2 * len(self._members):  # mostly nodes that are gone
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._members.discard(node)

    def coldest(self, keep: Node | None) -> Node | None:
        """None if there is none, or it is `keep`."""
        while self._heap:
            pushed, _, node = self._heap[0]
            if node in self._members and not node.children and node.last_used == pushed:
                return None if node is keep else node
            heapq.heappop(self._heap)
            if node in self._members:
                self._members.discard(node)
                self.push(node)  # used since; no leaf any longer is pushed again when its last child goes
        return None
