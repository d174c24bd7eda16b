"""What a running request holds.  [no jax]"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from dsjax.cache.prefix import UnitHashes
from dsjax.cache.spec import EntryKind, KindSpec
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
