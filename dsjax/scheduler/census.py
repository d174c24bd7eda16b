"""How many requests of a shard run, by path and priority, and which paths have more than their share: what admission
and preemption ask without looking at all.  [no jax]"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from dsjax.request import Path, Request
from dsjax.scheduler import policy
from dsjax.serving_config import SchedulerConfig

PATHS = tuple(Path)


class Census:
    """Counts requests, whose paths and priorities do not change while they run. `share_of` says which part of the pages
    those of some paths hold."""

    def __init__(self, config: SchedulerConfig, share_of: Callable[[Iterable[Path]], float]):
        self._config, self._share_of = config, share_of
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

    def is_over_share(self, path: Path) -> bool:
        """Whether those of the path and of colder ones have the pages that are theirs."""
        share = self._config.paths[path].share
        return share < 1 and self._share_of(PATHS[path:]) >= share

    def is_full(self, path: Path, max_num_seqs: int) -> bool:
        """Whether requests of this path, or with them a hotter one, have the rows or pages that are theirs."""
        for limited in PATHS[1 : path + 1]:
            num = self.num_members(limited)
            if num and (num >= policy.row_limit(self._config, limited, max_num_seqs) or self.is_over_share(limited)):
                return True
        return False

    def over_share(self, max_num_seqs: int) -> set[Path]:
        """The paths whose requests have more than their share, and so give way."""
        found = set()
        for path in PATHS[1:]:
            if self.num_members(path) > policy.row_limit(self._config, path, max_num_seqs) or self.is_over_share(path):
                found |= {other for other in self.paths() if other >= path}
        return found

    def may_give_way(self, to: Request) -> bool:
        """Whether any is less urgent than the request or of a colder path: see `policy.gives_way`."""
        path, priority = self._kind(to)
        return any(other > path or number > priority for other, number in self._num)
