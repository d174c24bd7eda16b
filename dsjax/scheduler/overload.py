"""What to do when more arrives than can be served: predict waits, choose whom to shed, degrade by steps.  [no jax]

All of it is about requests that have not begun: what runs, or ran and was preempted, keeps what it was promised.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dsjax.config import OverloadConfig, SchedulerConfig
from dsjax.request import Request, SamplingParams, Status
from dsjax.scheduler.policy import Limits

log = logging.getLogger("dsjax")

RATE_OVER_S = 10.0  # time constant of the mean rate
MIN_RATE_S = 1.0  # under load, before a rate is known
LOADED, CALM = 0.5, 0.25  # parts of what may wait: above the one it is load, below the other calm
SMALL_CHUNKS = 4  # a small chunk is a fourth of a step's budget


class ServiceRate:
    """Tokens a second that requests advance, cached ones included, in steps while others wait."""

    def __init__(self):
        self._tokens = self._seconds = 0.0

    def step(self, step_s: float, num_tokens: int) -> None:
        """Notes a step during which requests waited: others say what was asked for, not what can be done."""
        kept = math.exp(-step_s / RATE_OVER_S)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + step_s

    def seconds(self, num_tokens: float) -> float | None:
        """How long so many tokens take; None if that is not known yet."""
        if self._seconds < MIN_RATE_S or not self._tokens:
            return None
        return num_tokens * self._seconds / self._tokens


class Ahead:
    """Those that wait beside a request that waits too or is new; they come and go one by one.

    Of its own tenant those before it in order start before it does; of each other tenant what its weight gives it until
    then.
    """

    def __init__(self, request: Request, weight_of: Callable[[str], float], waiting: Iterable[Request] = ()):
        self.num = 0  # requests, wherever they are
        self._request, self._weight_of = request, weight_of
        self._own, self._others = 0, {}  # tokens: prompts and expected output
        self.add(waiting)

    def add(self, requests: Iterable[Request], sign: int = 1) -> None:
        for other in requests:
            self.num += sign
            if other.tenant != self._request.tenant:
                self._others[other.tenant] = self._others.get(other.tenant, 0) + sign * other.expected_tokens
            elif other.order < self._request.order:
                self._own += sign * other.expected_tokens

    def remove(self, requests: Iterable[Request]) -> None:
        self.add(requests, -1)

    @property
    def tokens(self) -> float:
        """That start before the request does."""
        turns = (self._own + self._request.expected_tokens) / self._weight_of(self._request.tenant)
        others = self._others.items()
        return self._own + sum(min(tokens, turns * self._weight_of(tenant)) for tenant, tokens in others)


def to_shed(
    waiting: Sequence[Request],
    new: Sequence[Request],
    weight_of: Callable[[str], float],
    enough: Callable[[Ahead], bool],
) -> list[Request]:
    """The least urgent waiting requests whose end makes room for new ones (sequences of one request).

    Adds one after another, with all its sequences, until what is left is few `enough`, then takes out those without
    whom it is enough too, such as those behind the new one where that would wait too long; [] if it cannot be enough.
    The least urgent has the highest priority number; of those the tenant with most waiting tokens for its weight; of
    those it came last. It is less urgent than the new request if its number is higher, or the same and its tenant would
    still have as much waiting for its weight.
    """
    priority, tenant = new[0].priority, new[0].tenant
    groups: dict[str, list[Request]] = {}  # that may go, as far as that is known before any other goes
    for request in waiting:
        is_other = request.priority == priority and request.tenant != tenant
        if (request.priority > priority or is_other) and not _has_begun(request):
            groups.setdefault(request.parent_id, []).append(request)
    left = Ahead(new[0], weight_of, (request for request in waiting if request.parent_id not in groups))
    if not groups or not enough(left):
        return []  # the usual case, and it has to be fast
    owed: dict[str, float] = {}  # waiting tokens of a tenant by its weight
    for request in (*waiting, *new):
        owed[request.tenant] = owed.get(request.tenant, 0.0) + request.expected_tokens / weight_of(request.tenant)
    shed: list[list[Request]] = []
    for group in groups.values():
        left.add(group)
    leaving = _least_urgent_first(groups.values(), owed)
    while not enough(left):
        group = next(leaving, None)
        if group is None:
            return []
        weight_out = sum(r.expected_tokens for r in group) / weight_of(group[0].tenant)
        if group[0].priority > priority or owed[group[0].tenant] - weight_out >= owed[tenant]:
            owed[group[0].tenant] -= weight_out
            left.remove(group)
            shed.append(group)
    gone = []
    for group in shed[::-1]:
        left.add(group)
        if not enough(left):
            left.remove(group)
            gone.append(group)
    return [request for group in gone[::-1] for request in group]


def _least_urgent_first(groups: Iterable[list[Request]], owed: Mapping[str, float]) -> Iterator[list[Request]]:
    """By priority, then by what their tenants are owed by then, then the last first.

    `owed` may fall for the tenant of the group given last, and for no other: so a tenant's turn is known by a heap.
    """
    levels: dict[int, dict[str, list[list[Request]]]] = {}
    for group in sorted(groups, key=lambda group: group[0].number):
        levels.setdefault(group[0].priority, {}).setdefault(group[0].tenant, []).append(group)
    for _, tenants in sorted(levels.items(), reverse=True):
        heap = [(-owed[name], -some[-1][0].number, name) for name, some in tenants.items()]
        heapq.heapify(heap)
        while heap:
            *_, name = heapq.heappop(heap)
            yield tenants[name].pop()
            if some := tenants[name]:
                heapq.heappush(heap, (-owed[name], -some[-1][0].number, name))


def _has_begun(request: Request) -> bool:
    """Whether any sequence of its parent has: the first of them is the first to."""
    first = request.sibling or request
    return first.status is not Status.WAITING or first.num_preemptions > 0


class Degradation(enum.IntEnum):
    """Modes in the order in which they are entered; each keeps those before it."""

    NONE = 0
    SHORT_ANSWERS = 1  # new requests get at most degraded_max_tokens; they end with finish reason `length`
    SMALL_CHUNKS = 2
    NO_LOGPROBS = 3  # of new requests, for the prompt neither
    NO_COLD = 4  # new requests of the cold path are refused


class Ladder:
    """Which mode it is: one further after each `degrade_after_s` of load, one back after each of calm."""

    def __init__(self, config: OverloadConfig, scheduler: SchedulerConfig):
        self.config = config
        self.level = Degradation.NONE
        self.num_changes = 0
        self._small_chunk = max(1, scheduler.max_num_batched_tokens // SMALL_CHUNKS)
        self._towards = 0  # 1 under load, -1 in calm, 0 between: the mode stays
        self._since_s = 0.0

    def update(self, now_s: float, load: float) -> None:
        """Notes the load: what waits, as part of what may."""
        if not self.config.enable_degradation:
            return
        towards = 1 if load >= LOADED else -1 if load <= CALM else 0
        if towards != self._towards:
            self._towards, self._since_s = towards, now_s
        while towards and now_s - self._since_s >= self.config.degrade_after_s:
            self._since_s += self.config.degrade_after_s
            if self.level + towards in tuple(Degradation):
                self.level = Degradation(self.level + towards)
                self.num_changes += 1
                log.warning(
                    "degradation is %s (level %d) after %g s of %s (load %.2f)",
                    self.level.name,
                    self.level,
                    self.config.degrade_after_s,
                    "load" if towards > 0 else "calm",
                    load,
                )

    def limits(self, limits: Limits) -> Limits:
        """What is left of a step's limits."""
        if self.level < Degradation.SMALL_CHUNKS:
            return limits
        return dataclasses.replace(limits, chunk_tokens=self._small_chunk)

    def max_output(self, params: SamplingParams, num_output: int) -> int:
        """Of the output tokens that a new request may have, those that it gets."""
        if self.level < Degradation.SHORT_ANSWERS:
            return num_output
        return min(num_output, max(self.config.degraded_max_tokens, params.min_tokens))

    def params(self, params: SamplingParams) -> SamplingParams:
        """Those of a new request."""
        if self.level < Degradation.NO_LOGPROBS or (params.logprobs is None and params.prompt_logprobs is None):
            return params
        return dataclasses.replace(params, logprobs=None, prompt_logprobs=None)
