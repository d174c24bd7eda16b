"""What the scheduler asks of one step.  [no jax]"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from dsjax.cache.manager import RequestCache
from dsjax.cache.moves import Download, Upload
from dsjax.cache.spec import Copy
from dsjax.request import Request


class RowPlan(NamedTuple):
    """One request's share of a step: its tokens [start, start + num_new)."""

    request: Request
    cache: RequestCache
    start: int
    num_new: int
    samples: bool  # the step reaches the request's last token, so it draws the next one
    first_of_stay: bool  # first step since the request got its slot: the slot's sampling tables are another's

    @property
    def end(self) -> int:
        return self.start + self.num_new


@dataclass(eq=False)  # not frozen: a step makes one, and that would take four times as long
class Rows:
    """Rows in the order they are packed: a sequence of RowPlan that is kept as columns, which a step works on whole."""

    requests: Sequence[Request]
    caches: Sequence[RequestCache]
    slot: np.ndarray  # [rows] int32, the row slots
    start: np.ndarray  # [rows] int32
    num_new: np.ndarray  # [rows] int32
    samples: Sequence[bool]
    first_of_stay: Sequence[bool]
    num_tokens: int  # new ones, of all rows

    @classmethod
    def of(cls, rows: Sequence[RowPlan]) -> Rows:
        requests, caches, starts, num_new, samples, first = zip(*rows, strict=True) if rows else ((),) * 6
        slot, start, new = (np.array(x, np.int32) for x in ([cache.slot for cache in caches], starts, num_new))
        return cls(requests, caches, slot, start, new, samples, first, sum(num_new))

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RowPlan]:
        start, num_new = self.start.tolist(), self.num_new.tolist()
        return map(RowPlan, self.requests, self.caches, start, num_new, self.samples, self.first_of_stay)

    @overload
    def __getitem__(self, at: int) -> RowPlan: ...
    @overload
    def __getitem__(self, at: slice) -> Rows: ...
    def __getitem__(self, at: int | slice) -> RowPlan | Rows:
        columns = self.requests, self.caches, self.slot, self.start, self.num_new, self.samples, self.first_of_stay
        if isinstance(at, slice):
            requests, caches, slot, start, num_new, samples, first = (column[at] for column in columns)
            return Rows(requests, caches, slot, start, num_new, samples, first, int(num_new.sum()))  # type: ignore[arg-type]
        request, cache, _, start, num_new, samples, first = (column[at] for column in columns)
        return RowPlan(request, cache, int(start), int(num_new), samples, first)  # type: ignore[arg-type]

    @cached_property
    def end(self) -> np.ndarray:
        """[rows] int32"""
        return self.start + self.num_new

    @cached_property
    def all_sample(self) -> bool:
        return all(self.samples)


NO_ROWS = Rows.of(())


@dataclass(frozen=True)
class ShardPlan:
    """What one data shard does in a step: its moves (`cache/moves.py`), then its rows."""

    rows: Rows = NO_ROWS
    downloads: list[Download] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.rows.num_tokens


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A step of all data shards, in their order. A shard without rows takes part with padding."""

    shards: tuple[ShardPlan, ...]

    @cached_property
    def rows(self) -> list[RowPlan]:
        """All rows, shard after shard: the order in which `Runner.read` returns results."""
        return [row for shard in self.shards for row in shard.rows]

    @cached_property
    def num_rows(self) -> int:
        return sum(len(shard.rows) for shard in self.shards)

    @cached_property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)
