"""Chooses the rows of each step, first come first served, and owns every request's state.  [no jax]

One queue serves all data shards (`shard.py`); a request belongs to a shard from its admission (`placement.py`) to its
end or preemption, after which any shard may take it.
There is no prefill and no decode phase: a running request contributes min(tokens it has - tokens computed, budget).
A step is planned before the previous one's tokens are known, so a request counts the token in flight (`num_pending`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.cache.manager import CacheManager
from dsjax.cache.prefix import UnitHashes
from dsjax.config import SchedulerConfig
from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Request, Status
from dsjax.scheduler.placement import preferred
from dsjax.scheduler.plan import RowPlan, ShardPlan, StepPlan
from dsjax.scheduler.shard import Shard


@dataclass
class Counters:
    """Totals of all shards since the start; they only grow."""

    num_requests: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of requests first scheduled
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0


class Scheduler:
    """Waiting and running requests. `schedule`, then `dispatched`, later `complete`, for each step."""

    def __init__(self, config: SchedulerConfig, caches: Sequence[CacheManager]):
        """`caches` has one for each data shard."""
        self.config = config
        self.shards = [Shard(index, config, cache) for index, cache in enumerate(caches)]
        self.waiting: deque[Request] = deque()  # those with a rank first, in its order; then the others as they came
        self.counters = Counters()
        self._next_rank = 0
        self._head: Request | None = None  # the last that fitted no shard, and its hashes: it is tried in every step
        self._hashes = UnitHashes("", 1)

    @property
    def running(self) -> list[Request]:
        """Those of all shards, shard after shard."""
        return [request for shard in self.shards for request in shard.running]

    @property
    def num_running(self) -> int:
        return sum(len(shard.running) for shard in self.shards)

    @property
    def num_live(self) -> int:
        return len(self.waiting) + self.num_running

    def add(self, request: Request) -> None:
        """Queues a request. RequestError(RESOURCE_EXHAUSTED) if the queue is full."""
        if len(self.waiting) >= self.config.max_num_waiting:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{len(self.waiting)} requests are waiting, the limit max_num_waiting={self.config.max_num_waiting}; "
                "retry later",
            )
        self.waiting.append(request)
        self.counters.num_requests += 1

    def schedule(self) -> StepPlan:
        """Plans the next step; `rows` is empty if nothing can be computed before a token in flight is read."""
        for shard in self.shards:
            for request in shard.plan_running():
                self._requeue(request)
        self._admit()
        if any(shard.rows for shard in self.shards):
            return StepPlan(shards=tuple(shard.take_plan() for shard in self.shards))
        return StepPlan(shards=tuple(ShardPlan() for _ in self.shards))  # not dispatched, so copies wait

    def _admit(self) -> None:
        """Takes waiting requests in order until the budgets, the slots or the pages of all shards are used up.

        The first that fits no shard holds back all behind it.
        """
        skipped: list[Request] = []
        while self.waiting and any(shard.is_open for shard in self.shards):
            request = self.waiting[0]
            if request.num_pending:
                break  # preempted with a token in flight: its tokens are known after the next read
            if request.sibling is not None and self._awaits_sibling(request):
                skipped.append(self.waiting.popleft())
                continue
            if not self._place(request):
                break
            self.waiting.popleft()
        self.waiting.extendleft(reversed(skipped))

    def _place(self, request: Request) -> bool:
        """Admits the request on the first of the preferred shards that takes it."""
        if request.rank < 0:
            request.rank, self._next_rank = self._next_rank, self._next_rank + 1
        if self._head is not request:
            self._head, self._hashes = request, UnitHashes(request.cache_salt, self.shards[0].cache.spec.unit_tokens)
        shards = self.shards
        if len(shards) > 1:
            order = preferred([shard.candidate(request, self._hashes) for shard in shards if shard.has_room])
            shards = [shards[index] for index in order]
        if not any(shard.admit(request, self._hashes) for shard in shards):
            return False
        self._head = None
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_cached_tokens += request.num_cached
        return True

    @staticmethod
    def _awaits_sibling(request: Request) -> bool:
        """Whether the first of n is still computing the prompt they share."""
        first = request.sibling
        assert first is not None
        return first.status is not Status.FINISHED and first.num_computed < first.num_prompt_tokens

    def dispatched(self, plan: StepPlan) -> None:
        """Notes that the plan's step is on its way: its tokens count as computed."""
        self.counters.num_steps += 1
        self.counters.num_computed_tokens += plan.num_tokens
        for shard, part in zip(self.shards, plan.shards, strict=True):
            shard.dispatched(part.rows)

    def complete(self, row: RowPlan, token_id: int) -> bool:
        """Takes the token a row drew. False if the request ended while the step was in flight: drop the token."""
        request = row.request
        if request.status is Status.FINISHED:
            return False
        request.num_pending -= 1
        request.token_ids.append(token_id)
        self.counters.num_generated_tokens += 1
        return True

    def finish(self, request: Request, *, keep: bool = True) -> None:
        """Ends a request, returns its slot and pages; `keep` leaves its end in the prefix cache for the next turn."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.shards[request.shard].release(request, snapshot=keep)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        self.counters.num_finished += 1

    def expired(self, now_s: float) -> list[Request]:
        """Live requests whose deadline has passed."""
        return [r for r in (*self.waiting, *self.running) if r.deadline_s is not None and r.deadline_s <= now_s]

    def _requeue(self, request: Request) -> None:
        """Puts a preempted request before all that came later than it."""
        self.counters.num_preemptions += 1
        at = 0
        while at < len(self.waiting) and 0 <= self.waiting[at].rank < request.rank:
            at += 1
        self.waiting.insert(at, request)
