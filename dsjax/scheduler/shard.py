"""One data shard: its running requests, its cache, and its part of each step.  [no jax]"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from dsjax.cache.manager import CacheManager
from dsjax.cache.prefix import UnitHashes
from dsjax.config import SchedulerConfig
from dsjax.request import Request, Status
from dsjax.scheduler.placement import Candidate
from dsjax.scheduler.plan import RowPlan, ShardPlan


class Shard:
    """Plans one step at a time: `plan_running`, then `admit` for new ones, then `take_plan`, later `dispatched`."""

    def __init__(self, index: int, config: SchedulerConfig, cache: CacheManager):
        self.index, self.config, self.cache = index, config, cache
        self.running: list[Request] = []  # by rank, which is who came first; the last is the first to be preempted
        self.rows: list[RowPlan] = []  # of the step being planned
        self._budget = 0  # tokens left in it
        self._preempted = False  # nobody is admitted in a step for which pages were missing

    @property
    def has_room(self) -> bool:
        """Whether a new request may come once a step has budget for it."""
        return not self._preempted and len(self.running) < self.config.max_num_seqs

    @property
    def is_open(self) -> bool:
        """Whether the step being planned may take a new request."""
        return self.has_room and self._budget > 0

    @property
    def num_tokens_left(self) -> int:
        """Tokens that running requests have and no dispatched step computed: prompts' ends, and one a decoding row."""
        return sum(request.num_tokens - request.num_computed for request in self.running)

    def candidate(self, request: Request, hashes: UnitHashes) -> Candidate:
        """What this shard would be for a waiting request."""
        cache, hit = self.cache, 0
        if request.reads_prefix_cache:
            hit = cache.match(request.token_ids, request.cache_salt, hashes).num_tokens
        return Candidate(
            num_tokens=self.num_tokens_left + request.num_tokens - hit,
            usage=cache.usage,
            num_held=cache.num_total - cache.num_free,
            index=self.index,
            num_cached=hit,
            has_budget=self._budget > 0,
        )

    def plan_running(self) -> list[Request]:
        """Begins a step with rows for the running requests. Returns those preempted because pages were missing."""
        self.rows, self._budget = [], self.config.max_num_batched_tokens
        victims: list[Request] = []
        for i, request in enumerate(list(self.running)):
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier one
            # Every request behind it gets at least its one token. Only the last are preempted, so it is still number i.
            num_new = self._num_new(request, self._budget - (len(self.running) - i - 1))
            if num_new == 0:
                continue
            while not self.cache.extend(request.request_id, request.num_computed + num_new):
                victims.append(self.running[-1])
                self.preempt(victims[-1])
                if victims[-1] is request:
                    break
            if request.status is Status.RUNNING:
                self._add_row(request, num_new)
        self._preempted = bool(victims)
        return victims

    def _num_new(self, request: Request, budget: int) -> int:
        """Tokens of a running request for this step."""
        if request.num_tokens >= request.max_total_tokens:
            return 0  # the token in flight is its last
        begin = request.num_computed
        if not self.config.enable_chunked_prefill:
            begin = max(begin, request.num_prefill_tokens - 1)  # snapshots must not cut it: one at its end
        boundary = self.cache.next_boundary(request.request_id, begin, request.num_prefill_tokens)
        end = min(request.num_tokens, boundary)
        return max(0, min(end - request.num_computed, budget, self.cache.spec.max_chunk_tokens))

    def _add_row(self, request: Request, num_new: int) -> None:
        self.rows.append(
            RowPlan(
                request=request,
                cache=self.cache.request(request.request_id),
                start=request.num_computed,
                num_new=num_new,
                samples=request.num_computed + num_new == request.num_tokens,
                first_of_stay=request.first_of_stay,
            )
        )
        self._budget -= num_new

    def admit(self, request: Request, hashes: UnitHashes) -> bool:
        """Gives a waiting request a slot, pages and its first row. False, and nothing changed, if it does not fit."""
        remaining = request.num_tokens - request.num_computed
        if not self.is_open or (not self.config.enable_chunked_prefill and remaining > self._budget and self.rows):
            return False
        first = min(remaining, self._budget, self.cache.spec.max_chunk_tokens)
        admission = self.cache.admit(
            request.request_id, request.token_ids, request.cache_salt, request.reads_prefix_cache, first, hashes
        )
        if admission is None:
            return False
        bisect.insort(self.running, request, key=lambda r: r.rank)
        request.status, request.shard, request.slot = Status.RUNNING, self.index, admission.slot
        request.num_computed, request.first_of_stay = admission.num_cached, True
        request.num_prefill_tokens = len(request.token_ids)
        num_new = self._num_new(request, self._budget)
        if not self.cache.extend(request.request_id, request.num_computed + num_new):
            raise AssertionError(f"{request.request_id}: admitted without the pages of its first chunk")
        self._add_row(request, num_new)
        return True

    def take_plan(self) -> ShardPlan:
        """What was planned, for a step that is dispatched next."""
        return ShardPlan(rows=self.rows, copies=self.cache.take_copies())

    def dispatched(self, rows: Sequence[RowPlan]) -> None:
        """Notes that the rows are on their way: their tokens count as computed."""
        for row in rows:
            request = row.request
            request.num_computed = row.end
            request.num_pending += row.samples
            request.first_of_stay = False
            self.cache.computed(request.request_id, request.token_ids, row.end)

    def release(self, request: Request, *, snapshot: bool = False) -> None:
        """Takes slot and pages back; `snapshot` leaves the request's end in the prefix cache."""
        self.running.remove(request)
        self.cache.release(request.request_id, request.token_ids, request.num_computed, snapshot=snapshot)
        request.shard = request.slot = -1

    def preempt(self, request: Request) -> None:
        """Takes everything back; it will be recomputed, starting from what the prefix cache kept."""
        self.release(request)
        request.status, request.num_computed = Status.WAITING, 0
        request.num_preemptions += 1
