"""Chooses the rows of each step, first come first served, and owns every request's state.  [no jax]

There is no prefill and no decode phase: a running request contributes min(tokens it has - tokens computed, budget).
A step is planned before the previous one's tokens are known, so a request counts the token in flight (`num_pending`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsjax.cache.manager import CacheManager
from dsjax.config import SchedulerConfig
from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Request, Status
from dsjax.scheduler.plan import RowPlan, StepPlan


@dataclass
class Counters:
    """Totals since the start; they only grow."""

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

    def __init__(self, config: SchedulerConfig, cache: CacheManager):
        self.config, self.cache = config, cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order they were admitted; the last is the first to be preempted
        self.counters = Counters()

    @property
    def num_live(self) -> int:
        return len(self.waiting) + len(self.running)

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
        rows: list[RowPlan] = []
        budget = self.config.max_num_batched_tokens
        preempted = False
        for i, request in enumerate(list(self.running)):
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier one
            # Every request behind it gets at least its one token. Only the last are preempted, so it is still number i.
            num_new = self._num_new(request, budget - (len(self.running) - i - 1))
            if num_new == 0:
                continue
            while not self.cache.extend(request.request_id, request.num_computed + num_new):
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if request.status is not Status.RUNNING:
                continue
            rows.append(self._row(request, num_new))
            budget -= num_new
        if not preempted:
            self._admit(rows, budget)
        if rows:
            return StepPlan(rows=rows, copies=self.cache.take_copies())
        return StepPlan(rows=rows)

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

    def _admit(self, rows: list[RowPlan], budget: int) -> None:
        """Takes waiting requests in order until the budget, the slots or the pages are used up."""
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if request.num_pending:
                break  # preempted with a token in flight: its tokens are known after the next read
            if request.sibling is not None and self._awaits_sibling(request):
                skipped.append(self.waiting.popleft())
                continue
            remaining = request.num_tokens - request.num_computed
            if not self.config.enable_chunked_prefill and remaining > budget and rows:
                break
            use_cache = request.params.prompt_logprobs is None  # a hit would leave out the positions asked about
            first = min(remaining, budget, self.cache.spec.max_chunk_tokens)
            admission = self.cache.admit(request.request_id, request.token_ids, request.cache_salt, use_cache, first)
            if admission is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.status, request.slot = Status.RUNNING, admission.slot
            request.num_computed, request.first_of_stay = admission.num_cached, True
            request.num_prefill_tokens = len(request.token_ids)
            if request.num_preemptions == 0:
                request.num_cached = admission.num_cached
                self.counters.num_prompt_tokens += request.num_prompt_tokens
                self.counters.num_cached_tokens += admission.num_cached
            num_new = self._num_new(request, budget)
            if not self.cache.extend(request.request_id, request.num_computed + num_new):
                raise AssertionError(f"{request.request_id}: admitted without the pages of its first chunk")
            rows.append(self._row(request, num_new))
            budget -= num_new
        self.waiting.extendleft(reversed(skipped))

    @staticmethod
    def _awaits_sibling(request: Request) -> bool:
        """Whether the first of n is still computing the prompt they share."""
        first = request.sibling
        assert first is not None
        return first.status is not Status.FINISHED and first.num_computed < first.num_prompt_tokens

    def _row(self, request: Request, num_new: int) -> RowPlan:
        return RowPlan(
            request=request,
            cache=self.cache.request(request.request_id),
            start=request.num_computed,
            num_new=num_new,
            samples=request.num_computed + num_new == request.num_tokens,
            first_of_stay=request.first_of_stay,
        )

    def dispatched(self, plan: StepPlan) -> None:
        """Notes that the plan's step is on its way: its tokens count as computed."""
        self.counters.num_steps += 1
        self.counters.num_computed_tokens += plan.num_tokens
        for row in plan.rows:
            request = row.request
            request.num_computed = row.end
            request.num_pending += row.samples
            request.first_of_stay = False
            self.cache.computed(request.request_id, request.token_ids, row.end)

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
            self.running.remove(request)
            self.cache.release(request.request_id, request.token_ids, request.num_computed, snapshot=keep)
        else:
            self.waiting.remove(request)
        request.status, request.slot = Status.FINISHED, -1
        self.counters.num_finished += 1

    def expired(self, now_s: float) -> list[Request]:
        """Live requests whose deadline has passed."""
        return [r for r in (*self.waiting, *self.running) if r.deadline_s is not None and r.deadline_s <= now_s]

    def _preempt(self, request: Request) -> None:
        """Takes everything back; it will be recomputed, starting from what the prefix cache kept."""
        self.running.remove(request)
        self.cache.release(request.request_id, request.token_ids, request.num_computed)
        request.status, request.slot, request.num_computed = Status.WAITING, -1, 0
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.appendleft(request)
