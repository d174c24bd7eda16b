"""The engine: adds and cancels requests, and is the only loop. One thread calls it.

Step n is sent to the device before step n - 1 is read, so the host's work hides behind the device's.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from dsjax.cache.manager import CacheManager
from dsjax.cache.tiers import Tiers, TierStats
from dsjax.config import EngineConfig, ModelConfig
from dsjax.distributed import Leader
from dsjax.engine_tiers import EngineTiers
from dsjax.errors import ErrorCode, RequestError, shown
from dsjax.request import Request, TokenEvent
from dsjax.request_bounds import RequestBounds
from dsjax.runner.compiles import COMPILES
from dsjax.runner.output import Sent
from dsjax.runner.padding import PaddingStats
from dsjax.runner.runner import Runner
from dsjax.scheduler.control import Control, ControlStats
from dsjax.scheduler.plan import StepPlan
from dsjax.scheduler.scheduler import Scheduler
from dsjax.sequence import LiveSequence
from dsjax.tokenizer import Tokenizer

log = logging.getLogger("dsjax")

HINT_POLL_S = 0.005  # how often an idle engine looks for what it prefetches from disk; a file takes some milliseconds


@dataclass(frozen=True, kw_only=True)
class EngineStats(ControlStats, PaddingStats, TierStats):
    """Gauges now, and totals since the start, of all data shards together."""

    num_waiting: int
    num_running: int
    num_running_per_shard: tuple[int, ...]
    num_pages_total: int
    num_pages_free: int
    num_pages_cached: int  # free as soon as someone wants them
    kv_cache_usage: float  # in [0, 1], of the fullest pool of any data shard
    num_pages_of: dict[str, int]  # by kind; one may be full while the sums above say that most are free
    num_pages_used_of: dict[str, int]  # by kind: those that requests hold
    num_compiles_after_warm_up: int
    num_requests: int
    num_finished: int
    num_preemptions: int
    num_swaps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_computed_tokens: int


class _InFlight(NamedTuple):
    plan: StepPlan
    output: Sent
    sent_s: float
    num_rows: int  # running on the data shard that had most


class Engine:
    """Serves one model. `step` raising means that the engine is dead: nothing after it can be trusted."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        model_config: ModelConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        leader: Leader | None = None,  # of the engine's other processes
        clock: Callable[[], float] = time.monotonic,  # seconds; a simulation brings its own
        tiers: Tiers | None = None,  # where cached prefixes go that leave the device
    ):
        self.clock = clock
        self.leader = leader or Leader()
        self.config, self.model_config, self.runner, self.tokenizer = config, model_config, runner, tokenizer
        self.max_model_len = max_model_len
        # Each data shard keeps its part of what a tenant may have cached.
        most = {t.name: t.max_cached_tokens for t in config.scheduler.tenants if t.max_cached_tokens}
        most = {name: -(-tokens // runner.num_shards) for name, tokens in most.items()}
        self.caches = [CacheManager(runner.spec, tiers, most) for _ in range(runner.num_shards)]
        self.tiers = EngineTiers(tiers, self.caches, runner)
        self.scheduler = Scheduler(config.scheduler, self.caches)
        self._bounds = RequestBounds.of(config, model_config, runner.spec, max_model_len, tokenizer is not None)
        self.control = Control(config, self.scheduler)
        self._live: dict[str, list[LiveSequence]] = {}  # by the caller's id
        self._by_request: dict[Request, LiveSequence] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._shed: list[tuple[LiveSequence, RequestError]] = []  # given up while waiting; the next step says so
        self._seeds = random.Random(config.seed)
        self._deadlines = 0  # live sequences that have one

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: bool = False) -> Engine:
        """Loads the checkpoint and builds the engine; `warm_up` is the caller's next step. Raises ConfigError."""
        from dsjax.load import load_engine

        return load_engine(config, progress=progress)

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every step shape, in all processes. Raises PeerLost."""
        self.runner.warm_up(progress)
        self.leader.wait_ready()

    def watch(self, fail: Callable[[BaseException], None]) -> None:
        """`fail` is called with a PeerLost on another thread when a process is lost: `step` may never return then."""
        self.leader.watch(fail)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the engine's other processes: in order, or as failed if the engine ends because of `error`.

        With a cache on disk, what is cached on the device is written there first, for the next start.
        """
        self.tiers.close(keep=error is None)
        self.leader.close(error)

    # --- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request; `params.n` > 1 becomes that many sequences with the same id and an `index` each.

        Raises RequestError: INVALID_ARGUMENT for a prompt or limit that cannot be served, ALREADY_EXISTS for an id
        that is live, RESOURCE_EXHAUSTED when the queue is full or too long.
        """
        params, now_s = request.params, self.clock()
        if request.request_id in self._live:
            raise RequestError(
                ErrorCode.ALREADY_EXISTS,
                f"request_id={shown(request.request_id)} is live; use another, or none for a new one",
            )
        max_total = self._bounds.check(request)
        params, max_total = self.control.promise(now_s, params, request.num_prompt_tokens, max_total)
        stop_ids = self._bounds.stop_ids(params)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        sequences: list[LiveSequence] = []
        for index in range(params.n):
            child = Request(
                request_id=f"{request.request_id}#{index}",
                parent_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                cache_salt=request.cache_salt,
                arrival_s=request.arrival_s or now_s,
                priority=request.priority,
                tenant=request.tenant,
                session_id=request.session_id,
                deadline_s=request.deadline_s,
                index=index,
                sibling=sequences[0].request if sequences else None,
                seed=seed + index,
                stop_ids=stop_ids,
                max_total_tokens=max_total,
            )
            self.scheduler.describe(child)
            sequences.append(LiveSequence(child, self.tokenizer))
        for shed in self.control.admit(now_s, [sequence.request for sequence in sequences]):
            self.scheduler.finish(shed, keep=False)
            self._shed.append((self._by_request[shed], self.control.shed_error()))
        for sequence in sequences:
            self.scheduler.add(sequence.request)
        self._deadlines += request.deadline_s is not None
        self._live[request.request_id] = sequences
        self._by_request.update((s.request, s) for s in sequences)

    def cancel(self, request_id: str) -> bool:
        """Ends a request without an event; its pages return at once. False if it was not live."""
        sequences = self._live.get(request_id)
        if sequences is None:
            return False
        for sequence in list(sequences):
            self._end(sequence, keep=False)
        return True

    def has_work(self) -> bool:
        return self.scheduler.num_live > 0 or bool(self._in_flight) or bool(self._shed)

    def wake_s(self) -> float | None:
        """When, on the engine's clock, to step again although nothing arrives; None: at once if there is work."""
        if self._in_flight or self._shed:
            return None
        if self.tiers.has_hints and not self.scheduler.num_live:
            return self.clock() + HINT_POLL_S
        return self.scheduler.wake_s

    # --- the loop ------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Sends the next step, then reads the one before it. Returns what became known, perhaps nothing.

        Raises PeerLost when a process of the engine is lost.
        """
        self.leader.check()
        events = self._expire()
        now_s = self.clock()
        self.control.begin_step(now_s)
        self.tiers.tend(self.scheduler.costs)
        plan = self.scheduler.schedule(now_s)
        if plan.num_rows:
            output = self.runner.dispatch(plan)
            self.scheduler.dispatched(plan)
            num_rows = max(len(shard.running) for shard in self.scheduler.shards)
            self._in_flight.append(_InFlight(plan, output, now_s, num_rows))
        elif not self._in_flight:
            self.tiers.move()
        if len(self._in_flight) > 1 or (self._in_flight and not plan.num_rows):
            events += self._complete(self._in_flight.popleft())
        return events

    def _expire(self) -> list[TokenEvent]:
        """Ends what was shed, and what has passed its deadline."""
        shed, self._shed, events = self._shed, [], []
        for sequence, error in shed:
            if sequence.request in self._by_request:  # not cancelled meanwhile
                self._end(sequence, keep=False)
                events.append(sequence.failed(error))
        if not self._deadlines:
            return events
        for request in self.scheduler.expired(self.clock()):
            sequence = self._by_request[request]
            state = request.status.value
            self._end(sequence, keep=False)
            error = RequestError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"the deadline passed while {state}, after {request.num_output_tokens} output tokens",
            )
            events.append(sequence.failed(error))
        return events

    def _complete(self, step: _InFlight) -> list[TokenEvent]:
        output = self.runner.read(step.output)
        now_s = self.clock()
        events: list[TokenEvent] = []
        drawn, num_rows, num_tokens = output.tokens.tolist(), 0, 0
        for shard, rows in enumerate(part.rows for part in step.plan.shards):
            tokens = drawn[num_rows : num_rows + len(rows)]
            self.scheduler.complete(shard, rows, tokens)
            self.control.tokens(rows, now_s)
            for r, (request, token, samples) in enumerate(zip(rows.requests, tokens, rows.samples, strict=True)):
                sequence = self._by_request.get(request)
                if sequence is None:
                    continue  # it ended while the step was in flight
                if sequence.prompt_logprobs is not None:
                    sequence.add_prompt_logprobs(rows[r], output, num_tokens + int(rows.num_new[:r].sum()))
                if samples:
                    event = sequence.advance(token, output, num_rows + r)
                    events.append(event)
                    if event.finish_reason is not None:
                        self._end(sequence, keep=True)
            num_rows, num_tokens = num_rows + len(rows), num_tokens + rows.num_tokens
        self.control.end_step(now_s, step.sent_s, step.plan, step.num_rows)
        return events

    def _end(self, sequence: LiveSequence, *, keep: bool) -> None:
        request = sequence.request
        self.scheduler.finish(request, keep=keep)
        if keep:
            self.tiers.remember(request)
        del self._by_request[request]
        siblings = self._live[request.parent_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[request.parent_id]
            self._deadlines -= request.deadline_s is not None

    # --- looking -------------------------------------------------------------------------------

    def first_token_s(self, num_prompt: int) -> float:
        """How long the first token takes if nobody waits, see `Control.first_token_s`. Any thread may ask."""
        return self.control.first_token_s(num_prompt)

    def stats(self) -> EngineStats:
        caches = self.caches
        return EngineStats(
            num_waiting=len(self.scheduler.waiting),
            num_running=self.scheduler.num_running,
            num_running_per_shard=tuple(len(shard.running) for shard in self.scheduler.shards),
            num_pages_total=sum(cache.num_total for cache in caches),
            num_pages_free=sum(cache.num_free for cache in caches),
            num_pages_cached=sum(cache.num_cached for cache in caches),
            kv_cache_usage=max(cache.usage for cache in caches),
            num_pages_of={
                kind.value: sum(cache.pools[kind].num_pages for cache in caches) for kind in caches[0].spec.pool_kinds
            },
            num_pages_used_of={
                kind.value: sum(cache.pools[kind].num_used for cache in caches) for kind in caches[0].spec.pool_kinds
            },
            num_compiles_after_warm_up=COMPILES.after_warm_up,
            **asdict(self.scheduler.counters),
            **asdict(self.control.stats()),
            **asdict(self.runner.padding.stats()),
            **asdict(self.tiers.stats()),
        )

    def reset_prefix_cache(self) -> None:
        """Forgets everything cached, on all data shards and below."""
        for cache in self.caches:
            cache.reset_prefix_cache()
        self.tiers.forget()

    def prefetch(self, *, token_ids: Sequence[int] = (), session_id: str = "", cache_salt: str = "") -> bool:
        """A hint that a request will soon begin with these tokens, or go on where the session's last one ended.

        Moves what the tiers have of them up to the device. False if that is nothing. Raises
        RequestError(INVALID_ARGUMENT) for tokens that no request may begin with.
        """
        if len(token_ids) or not session_id:
            self._bounds.check_prompt(token_ids)
        return self.tiers.prefetch(token_ids, session_id, cache_salt)
