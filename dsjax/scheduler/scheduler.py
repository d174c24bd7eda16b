"""Chooses the rows of each step and owns every request's state.  [no jax]

One queue serves all data shards (`shard.py`); a request belongs to a shard from its admission (`placement.py`) to its
end or preemption, after which any shard may take it.
There is no prefill and no decode phase: a running request contributes min(tokens it has - tokens computed, budget).
A step is planned before the previous one's tokens are known, so a request counts the token in flight (`num_pending`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.manager import CacheManager
from dsjax.config import SchedulerConfig
from dsjax.errors import ErrorCode, RequestError, shown
from dsjax.request import Path, Request, Status
from dsjax.scheduler import policy
from dsjax.scheduler.placement import preferred
from dsjax.scheduler.plan import Rows, ShardPlan, StepPlan
from dsjax.scheduler.policy import Limits
from dsjax.scheduler.shard import Shard
from dsjax.scheduler.swap import SwapCosts
from dsjax.scheduler.waiting import WaitingQueue

MAX_LOAD_WAIT_S = 1.0  # a request whose turn it is waits no longer for the cache's tiers
LOAD_POLL_S = 0.002  # how often an idle engine looks whether it has arrived
MEAN_OVER = 32  # finished answers that the expected length of the next is learnt from


@dataclass
class Counters:
    """Totals of all shards since the start; they only grow."""

    num_requests: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # of those, that left their state in the cache, to come back from the host
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
        self.costs = SwapCosts(config.preemption_mode)
        self.shards = [Shard(index, config, cache, self.costs) for index, cache in enumerate(caches)]
        self.waiting = WaitingQueue(config.tenants)
        self.limits = Limits.of(config)  # feedback may lower them between steps
        self.wake_s: float | None = None  # when to schedule again though nothing arrives
        self.counters = Counters()
        self._tenants = {tenant.name: tenant for tenant in config.tenants}
        self._hashes: dict[str, UnitHashes] = {}  # of waiting requests that have been looked at: they are tried again
        self._now_s = 0.0  # of the step being planned
        self._mean_output = float(config.expected_output_tokens)

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
        """Queues a request. RequestError(RESOURCE_EXHAUSTED) if the queue, or its tenant's part of it, is full."""
        self.check_room(request.tenant, 1)
        self.describe(request)
        self._look_below(request)
        self.waiting.add(request)
        self.counters.num_requests += 1

    def describe(self, request: Request) -> None:
        """Sets what its place in the queue depends on."""
        request.number = self.counters.num_requests
        most = request.max_total_tokens - request.num_prompt_tokens
        request.expected_tokens = request.num_prompt_tokens + min(most, round(self._mean_output))
        request.path = policy.path_of(self.config, request.expected_tokens)
        request.key_s = request.arrival_s + policy.handicap_s(self.config, request)

    def check_room(self, tenant: str, num: int, num_leaving: int = 0) -> None:
        """RequestError(RESOURCE_EXHAUSTED) if `num` more requests of the tenant cannot wait once some have left."""
        waiting, most = len(self.waiting) - num_leaving, self.config.max_num_waiting
        if waiting + num > most:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{waiting} requests are waiting and {num} more exceed the limit max_num_waiting={most}; retry later",
            )
        limits = self._tenants.get(tenant)
        if limits and limits.max_num_waiting and self.waiting.num_waiting(tenant) + num > limits.max_num_waiting:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"{self.waiting.num_waiting(tenant)} requests of tenant {shown(tenant)} are waiting and {num} more "
                f"exceed its max_num_waiting={limits.max_num_waiting}; retry later",
            )

    def schedule(self, now_s: float) -> StepPlan:
        """Plans the next step; `rows` is empty if nothing can be computed before a token in flight is read, or while
        a lone request waits for others or for the cache's tiers (until `wake_s`)."""
        self._now_s = now_s
        self.wake_s = self._company_s(now_s)
        if self.wake_s is not None:
            return self._empty()
        for shard in self.shards:
            shard.begin(self.limits)
            shard.grant_decodes()
        self._admit()
        for shard in self.shards:
            shard.grant_prompts()
            shard.grant_rest()
            for victim in shard.take_victims():
                self._requeue(victim)
        if any(shard.has_rows for shard in self.shards):
            return StepPlan(shards=tuple(shard.take_plan() for shard in self.shards))
        if any(request.awaited for request in self.waiting):
            self.wake_s = now_s + LOAD_POLL_S
        return self._empty()  # not dispatched, so copies wait

    def _empty(self) -> StepPlan:
        return StepPlan(shards=tuple(ShardPlan() for _ in self.shards))

    def _company_s(self, now_s: float) -> float | None:
        """Until when an idle engine waits for more requests; None if it does not."""
        wait_s = self.config.batch_wait_s
        if not wait_s or not self.waiting or self.num_running:
            return None
        if len(self.waiting) >= self.limits.max_num_seqs * len(self.shards):
            return None
        until_s = min(request.arrival_s for request in self.waiting) + wait_s
        if now_s >= until_s:
            return None
        return min([until_s, *(request.deadline_s for request in self.waiting if request.deadline_s is not None)])

    def _admit(self) -> None:
        """Starts waiting requests in their turn until the budgets, the slots or the pages of all shards are used up.

        One whose path is full lets those of other paths pass. One that fits no shard holds back all behind it, or it
        would never start where there are always smaller ones.
        """
        blocked: set[Path] = set()
        while True:
            request = self.waiting.head(self._is_early, blocked, self._tenant_blocked())
            if request is None or request.num_pending:
                return  # preempted with a token in flight: its tokens are known after the next read
            for shard in self.shards:
                shard.grant_prompts(before=request.order)
            full = all(shard.path_is_full(request.path) for shard in self.shards if shard.has_budget)
            if full or any(shard.took_from_before(request) for shard in self.shards):
                blocked.add(request.path)
                continue
            if not self._place(request) and not self._make_way(request):
                return

    def _make_way(self, request: Request) -> bool:
        """Preempts a request that has to give way to a waiting one, on the shard where least is to be computed."""
        able = (shard for shard in self.shards if shard.can_make_way(request))
        shards = sorted(able, key=lambda shard: (shard.num_tokens_left, shard.index))
        return any(shard.make_way(request) for shard in shards)

    def _tenant_blocked(self) -> Callable[[str], bool]:
        """Says of a tenant whether its own limit, or rows reserved for others, keep its requests from starting now."""
        if not self._tenants:
            return lambda name: False
        most = self.limits.max_num_seqs * len(self.shards)
        running = Counter(request.tenant for shard in self.shards for request in shard.running)

        def blocked(name: str) -> bool:
            limits = self._tenants.get(name)
            if limits and limits.max_num_seqs and running[name] >= limits.max_num_seqs:
                return True
            reserved = sum(max(0, t.reserved_seqs - running[t.name]) for t in self._tenants.values() if t.name != name)
            return reserved > 0 and running.total() + reserved >= most

        return blocked

    def _place(self, request: Request) -> bool:
        """Admits the request on the first of the preferred shards that takes it."""
        hashes = self._hashes_of(request)
        shards = self.shards
        if len(shards) > 1:
            order = preferred([shard.candidate(request, hashes) for shard in shards if shard.has_room])
            shards = [shards[index] for index in order]
        if not any(shard.admit(request, hashes) for shard in shards):
            return False
        del self._hashes[request.request_id]
        self.waiting.start(request)
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            self.counters.num_prompt_tokens += request.num_prompt_tokens
            self.counters.num_cached_tokens += request.num_cached
        return True

    def _hashes_of(self, request: Request) -> UnitHashes:
        """Of a waiting request, kept until it starts or ends."""
        found = self._hashes.get(request.request_id)
        if found is None:
            found = UnitHashes(request.cache_salt, self.shards[0].cache.spec.unit_tokens)
            self._hashes[request.request_id] = found
        return found

    def _is_early(self, request: Request) -> bool:
        """Whether it will need less computing soon: others may pass."""
        return self._awaits_sibling(request) or self._awaits_tiers(request)

    def _awaits_tiers(self, request: Request) -> bool:
        """Whether what it can use is on its way to host memory, and it has not waited for that too long."""
        cache = self.shards[0].cache
        if not cache.has_tiers:
            return False
        if request.num_preemptions and not request.awaited and not request.num_pending:
            self._look_below(request)  # its own end may have left the device since it was preempted
        if not request.awaited:
            return False
        request.awaits_until_s = request.awaits_until_s or self._now_s + MAX_LOAD_WAIT_S
        if self._now_s >= request.awaits_until_s or not cache.is_coming(request.awaited):
            request.awaited = b""
        return bool(request.awaited)

    def _look_below(self, request: Request) -> None:
        """Has the tiers of the cache make ready what is there of a request that begins to wait."""
        if not self.shards[0].cache.has_tiers or not request.reads_prefix_cache:
            return
        caches = [shard.cache for shard in self.shards]
        hashes = self._hashes_of(request)
        known = max(cache.match(request.token_ids, request.cache_salt, hashes).num_tokens for cache in caches)
        request.awaited = caches[0].want(request.token_ids, hashes, known)

    @staticmethod
    def _awaits_sibling(request: Request) -> bool:
        """Whether the first of n is still computing the prompt they share."""
        first = request.sibling
        return (
            first is not None and first.status is not Status.FINISHED and first.num_computed < first.num_prompt_tokens
        )

    def dispatched(self, plan: StepPlan) -> None:
        """Notes that the plan's step is on its way: its tokens count as computed."""
        self.counters.num_steps += 1
        self.counters.num_computed_tokens += plan.num_tokens
        for shard, part in zip(self.shards, plan.shards, strict=True):
            shard.dispatched(part.rows)

    def complete(self, shard: int, rows: Rows, tokens: Sequence[int]) -> None:
        """Takes what a step drew on a data shard: a token for each row, see `Shard.complete`."""
        self.counters.num_generated_tokens += self.shards[shard].complete(rows, tokens)

    def finish(self, request: Request, *, keep: bool = True) -> None:
        """Ends a request, returns its slot and pages; `keep` leaves its end in the prefix cache for the next turn."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.shards[request.shard].release(request, snapshot=keep)
        else:
            self.waiting.remove(request)
            self._hashes.pop(request.request_id, None)
        request.status = Status.FINISHED
        self.counters.num_finished += 1
        if keep:  # it ended by itself
            self._mean_output += (request.num_output_tokens - self._mean_output) / MEAN_OVER

    def expired(self, now_s: float) -> list[Request]:
        """Live requests whose deadline has passed."""
        return [r for r in (*self.waiting, *self.running) if r.deadline_s is not None and r.deadline_s <= now_s]

    def _requeue(self, request: Request) -> None:
        """Puts a preempted request back to its place in the order."""
        self.counters.num_preemptions += 1
        self.counters.num_swaps = sum(shard.num_swaps for shard in self.shards)
        request.awaited, request.awaits_until_s = b"", 0.0
        self.waiting.add(request)
