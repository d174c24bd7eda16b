"""The steps of a shard in which all that runs decodes and nobody comes or goes.  [no jax]

Then the next step has the same rows, a token further each. What changes besides is known in advance: a row needs a
page, or completes a unit of the prefix cache, at a number of tokens (`RequestCache.quiet_until`), and the first request
may end of its length after so many steps. So a step looks only at the few rows that have something due.

What the steps change of every request, its `num_computed` and `num_pending`, is written down when the streak ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from dsjax.cache.manager import CacheManager
from dsjax.request import Request
from dsjax.scheduler.plan import Rows


class Streak:
    """Begins with the rows of a dispatched step, each of which drew a token; then `grant` and `dispatched` by turns,
    `complete` for each step with these requests that is read meanwhile, and at last `end`."""

    def __init__(self, rows: Rows, cache: CacheManager):
        self.rows = rows  # of the last dispatched step
        self._cache = cache
        self._num_steps = self._num_read = 0
        self._quiet_steps = 0  # before so many steps nothing is due
        self.next_rows = rows  # of the next step, and which of them change by more than their number of tokens: `grant`
        self._due: list[int] = []

    @cached_property
    def _most_steps(self) -> int:
        """Until a token in flight is the last that its request may have."""
        ends = self.rows.end.tolist()  # each has a token more
        left = (r.max_total_tokens - end - 1 for r, end in zip(self.rows.requests, ends, strict=True))
        return self._num_steps + min(left)

    @cached_property
    def _token_ids(self) -> list[list[int]]:
        return [request.token_ids for request in self.rows.requests]

    @cached_property
    def _quiet_until(self) -> np.ndarray:
        return np.array([cache.quiet_until(self._cache.spec) for cache in self.rows.caches])

    @cached_property
    def _same(self) -> tuple[np.ndarray, list[bool], list[bool], int]:
        """What all steps after the first have: a token each, which draws the next one."""
        num = len(self.rows)
        return np.ones(num, np.int32), [True] * num, [False] * num, num

    @cached_property
    def grants(self) -> dict[Request, int]:
        """Tokens of each request in every step."""
        return dict.fromkeys(self.rows.requests, 1)

    def grant(self) -> bool:
        """Gets the pages of the next step. False if a row takes no part in it or pages are missing: it ends here."""
        if self._num_steps >= self._most_steps:
            return False
        rows = self.rows
        self.next_rows, self._due = Rows(rows.requests, rows.caches, rows.slot, rows.end, *self._same), []
        if self._num_steps >= self._quiet_steps:
            self._due = (self.next_rows.end > self._quiet_until).nonzero()[0].tolist()
        for r in self._due:
            held, end = self.rows.caches[r], int(self.next_rows.end[r])
            self._cache.advance(held, end - 1)
            if not self._cache.extend(held.request_id, end):
                return False
        return True

    def dispatched(self) -> None:
        """The next step is on its way: its tokens count as computed."""
        for r in self._due:
            held, end = self.rows.caches[r], int(self.next_rows.end[r])
            self._cache.computed(held.request_id, self.rows.requests[r].token_ids, end)
            self._quiet_until[r] = held.quiet_until(self._cache.spec)
        self.rows = self.next_rows
        self._num_steps += 1
        if self._num_steps > self._quiet_steps:
            self._quiet_steps = self._num_steps + int((self._quiet_until - self.rows.end).min())

    def complete(self, tokens: Sequence[int]) -> None:
        """A step was read: a token for each row."""
        for token_ids, token in zip(self._token_ids, tokens, strict=True):
            token_ids.append(token)
        self._num_read += 1

    def end(self) -> None:
        """Writes down what the dispatched steps changed of all requests."""
        rows, num_pending = self.rows, self._num_steps - self._num_read
        for request, held, end in zip(rows.requests, rows.caches, rows.end.tolist(), strict=True):
            request.num_computed = end
            request.num_pending += num_pending
            self._cache.advance(held, end)
