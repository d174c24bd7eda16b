"""What the scheduler asks of one step.  [no jax]"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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


@dataclass(frozen=True)
class ShardPlan:
    """What one data shard does in a step: its moves (`cache/moves.py`), then rows in the order they are packed."""

    rows: list[RowPlan] = field(default_factory=list)
    downloads: list[Download] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)

    @cached_property
    def num_tokens(self) -> int:
        return sum(row.num_new for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A step of all data shards, in their order. A shard without rows takes part with padding."""

    shards: tuple[ShardPlan, ...]

    @cached_property
    def rows(self) -> list[RowPlan]:
        """All rows, shard after shard: the order in which `Runner.read` returns results."""
        return [row for shard in self.shards for row in shard.rows]

    @cached_property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)
