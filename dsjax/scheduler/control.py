"""What stands between the engine and its scheduler under load: feedback, admission, shedding, degradation.  [no jax]"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.config import EngineConfig
from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Path, Request, SamplingParams, Status
from dsjax.scheduler.feedback import Controller
from dsjax.scheduler.overload import Ahead, Degradation, Ladder, ServiceRate, to_shed
from dsjax.scheduler.plan import Rows, StepPlan
from dsjax.scheduler.scheduler import Scheduler

MIN_RETRY_S = 1.0  # nobody is told to come back sooner
STEPS_TO_FIRST = 3  # one step runs when a request comes, the next is on its way, the third has its prompt
STEP_WEIGHT = 0.2  # of the latest step in the mean


@dataclass(frozen=True, kw_only=True)
class ControlStats:
    """Gauges now, and totals since the start."""

    limit_num_batched_tokens: int  # of a step of each data shard
    limit_num_seqs: int  # rows of each data shard
    num_limit_changes: int
    feedback_load: float  # latency as part of its target, in the last window; above 1 it was missed
    predicted_wait_s: float  # of a new request that goes behind all that wait; 0 while no rate is known
    degrade_level: int
    num_degrade_changes: int
    num_refused: int  # requests that never waited, for what waits or for their length
    num_shed: int  # sequences that waited and were given up


class Control:
    """Asked by the engine when a request comes, told of each step and token."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler):
        self.config, self.scheduler = config, scheduler
        self.controller = Controller(config.feedback, config.scheduler)
        self.ladder = Ladder(config.overload, config.scheduler)
        self.rate = ServiceRate()
        self.num_refused = self.num_shed = 0
        self._weights = {tenant.name: tenant.weight for tenant in config.scheduler.tenants}
        self._step_s = 0.0  # mean time of steps; 0 before the first
        self._read_s = 0.0  # when the last step was read
        self._num_cached = 0  # scheduler's counter at that time
        scheduler.limits = self.controller.limits

    # --- a new request ---------------------------------------------------------------------------

    def promise(
        self, now_s: float, params: SamplingParams, num_prompt: int, max_total: int
    ) -> tuple[SamplingParams, int]:
        """What a new request gets of its parameters and of the tokens it may reach."""
        if self.ladder.level:
            self.ladder.update(now_s, self._load())  # an idle engine plans no steps: calm has to show here
        return self.ladder.params(params), num_prompt + self.ladder.max_output(params, max_total - num_prompt)

    def admit(self, now_s: float, new: Sequence[Request]) -> list[Request]:
        """Lets the sequences of a new request in, once those returned are shed (see `shed_error`).

        Raises RequestError(RESOURCE_EXHAUSTED) if they cannot wait, or would too long.
        """
        try:
            return self._admit(now_s, new)
        except RequestError:
            self.num_refused += 1
            raise

    def _admit(self, now_s: float, new: Sequence[Request]) -> list[Request]:
        first, overload, scheduler = new[0], self.config.overload, self.scheduler
        if first.path is Path.COLD and self.ladder.level >= Degradation.NO_COLD:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"prompt and expected output make {first.expected_tokens} tokens, and under load requests of "
                f"warm.max_tokens={self.config.scheduler.warm.max_tokens} and more are refused (enable_degradation)",
                max(overload.degrade_after_s, MIN_RETRY_S),
            )
        most = self.config.scheduler.max_num_waiting

        def fits(left: Ahead) -> bool:
            return left.num + len(new) <= most and self._late(now_s, first, left) is None

        is_full = len(scheduler.waiting) + len(new) > most
        late = None
        if overload.max_predicted_wait_s:
            late = self._late(now_s, first, Ahead(first, self._weight_of, scheduler.waiting.unordered()))
        shed: list[Request] = []
        if (is_full or late is not None) and overload.enable_shedding:
            shed = to_shed(list(scheduler.waiting.unordered()), new, self._weight_of, fits)
        if late is not None and not is_full and not shed:
            raise late
        try:
            scheduler.check_room(first.tenant, len(new), len(shed))
        except RequestError as error:
            error.retry_after_s = self._retry_s(sum(r.expected_tokens for r in new))
            raise
        self.num_shed += len(shed)
        return shed

    def _late(self, now_s: float, request: Request, ahead: Ahead) -> RequestError | None:
        """Why the request had better not wait beside those; None if it may."""
        limit_s = self.config.overload.max_predicted_wait_s
        wait_s = self.rate.seconds(ahead.tokens) if limit_s else None
        if wait_s is None:
            return None
        left_s = limit_s if request.deadline_s is None else request.deadline_s - now_s
        if wait_s <= min(limit_s, left_s):
            return None
        what = f"the limit max_predicted_wait_s={limit_s:g}" if limit_s <= left_s else f"its deadline in {left_s:.1f} s"
        return RequestError(
            ErrorCode.RESOURCE_EXHAUSTED,
            f"the request would wait {wait_s:.1f} s, longer than {what}; retry later",
            max(wait_s - max(min(limit_s, left_s), 0.0), MIN_RETRY_S),
        )

    def shed_error(self) -> RequestError:
        """How a shed request ends."""
        most = self.config.scheduler.max_num_waiting
        return RequestError(
            ErrorCode.RESOURCE_EXHAUSTED,
            f"given up while waiting, for a more urgent request (enable_shedding): {len(self.scheduler.waiting)} wait, "
            f"the limit max_num_waiting={most}; retry later",
            self._retry_s(self.scheduler.waiting.num_tokens),
        )

    def _retry_s(self, num_tokens: int) -> float:
        return max(self.rate.seconds(num_tokens) or 0.0, MIN_RETRY_S)

    def _weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    # --- steps -------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Before each step is planned: sets the scheduler's limits."""
        if self.config.overload.enable_degradation:
            self.ladder.update(now_s, self._load())
        elif not self.controller.enabled:
            return
        self.scheduler.limits = self.ladder.limits(self.controller.limits)

    def _load(self) -> float:
        """What waits as part of what may: requests, or seconds where there is a limit or a target."""
        limits_s = (self.config.overload.max_predicted_wait_s, self.config.feedback.target_ttft_ms / 1000)
        limits = [limit_s for limit_s in limits_s if limit_s]
        load = len(self.scheduler.waiting) / self.config.scheduler.max_num_waiting
        return max(load, self._wait_s() / min(limits)) if limits else load

    def _wait_s(self) -> float:
        return self.rate.seconds(self.scheduler.waiting.num_tokens) or 0.0

    def tokens(self, rows: Rows, now_s: float) -> None:
        """Live requests of these rows got the tokens that the rows drew."""
        if not self.controller.enabled:
            return
        for request, samples in zip(rows.requests, rows.samples, strict=True):
            if not samples or request.status is Status.FINISHED:
                continue
            if request.num_output_tokens == 1:
                self.controller.first_token(now_s - request.arrival_s)
            else:
                self.controller.next_token(now_s - request.token_s)
            request.token_s = now_s

    def end_step(self, now_s: float, sent_s: float, plan: StepPlan, num_rows: int) -> None:
        """A step was read, sent at `sent_s` with `num_rows` running on the data shard that had most."""
        step_s, self._read_s = now_s - max(sent_s, self._read_s), now_s
        num_cached, self._num_cached = self._num_cached, self.scheduler.counters.num_cached_tokens
        if self.scheduler.waiting:
            self.rate.step(step_s, plan.num_tokens + self._num_cached - num_cached)
        self.scheduler.costs.step(step_s, plan.num_tokens, plan.num_rows)
        self._step_s += (step_s - self._step_s) * (STEP_WEIGHT if self._step_s else 1)
        self.controller.step(now_s, step_s, max(part.num_tokens for part in plan.shards), num_rows)

    def first_token_s(self, num_prompt: int) -> float:
        """How long the first token takes, at the pace of the latest steps, if nobody waits; inf before any is known.

        Any thread may ask.
        """
        tokens_per_s, step_s = self.scheduler.costs.tokens_per_s, self._step_s
        return STEPS_TO_FIRST * step_s + num_prompt / tokens_per_s if tokens_per_s else math.inf

    def stats(self) -> ControlStats:
        limits = self.scheduler.limits
        return ControlStats(
            limit_num_batched_tokens=limits.max_num_batched_tokens,
            limit_num_seqs=limits.max_num_seqs,
            num_limit_changes=self.controller.num_raised + self.controller.num_lowered,
            feedback_load=self.controller.load,
            predicted_wait_s=self._wait_s(),
            degrade_level=int(self.ladder.level),
            num_degrade_changes=self.ladder.num_changes,
            num_refused=self.num_refused,
            num_shed=self.num_shed,
        )
