"""How many requests of a shard run, by path and priority: what each admission asks without looking at all.  [no jax]"""

from __future__ import annotations

from collections import Counter

from dsjax.request import Path, Request
from dsjax.scheduler import policy
from dsjax.serving_config import SchedulerConfig


class Census:
    """Counts requests, whose paths and priorities do not change while they run."""

    def __init__(self, config: SchedulerConfig):
        self._config = config
        self._num: Counter[tuple[Path, int]] = Counter()  # only of those that some have

    def _kind(self, request: Request) -> tuple[Path, int]:
        return request.path, policy.priority_of(self._config, request)

    def add(self, request: Request) -> None:
        self._num[self._kind(request)] += 1

    def remove(self, request: Request) -> None:
        kind = self._kind(request)
        self._num[kind] -= 1
        if not self._num[kind]:
            del self._num[kind]

    def num_members(self, path: Path) -> int:
        """Those that a path's limits count: its own and colder ones."""
        return sum(num for (other, _), num in self._num.items() if other >= path)

    def paths(self) -> set[Path]:
        return {path for path, _ in self._num}

    def may_give_way(self, to: Request) -> bool:
        """Whether any is less urgent than the request or of a colder path: see `policy.gives_way`."""
        path, priority = self._kind(to)
        return any(other > path or number > priority for other, number in self._num)
