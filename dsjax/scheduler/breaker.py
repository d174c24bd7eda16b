"""A circuit breaker: while requests fail or a step hangs, new ones are refused at once.  [no jax]

    CLOSED --too many errors, or a stalled step--> OPEN --breaker_open_s--> HALF_OPEN --NUM_PROBES successes--> CLOSED
                                                    ^                           |
                                                    '---- a failure or stall ---'

One thread uses it. Every request that `allow` lets in is reported to `ended` once, with the number `allow` gave it, so
that what was let in before the breaker opened says nothing about the time after. Who reports a deadline finds out whose
fault it was (`is_late`): clients that leave less time than an idle engine takes must not shut out the others.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque

from dsjax.config import OverloadConfig
from dsjax.errors import ErrorCode, RequestError

log = logging.getLogger("dsjax")

NUM_PROBES = 3  # requests let in every breaker_open_s while half open; as many successes close the breaker
FAILURES = (ErrorCode.INTERNAL, ErrorCode.DEADLINE_EXCEEDED)  # not what clients do wrong, cancels, or a full queue
LATE = 2.0  # a wait is the engine's fault from so many times what an idle one takes on


def is_late(first_s: float, elapsed_s: float, idle_s: float) -> bool:
    """Whether a deadline passed after `elapsed_s` because the engine was late: most of it went by before the first
    token, which came after `first_s` (with no token all of it did), and an idle engine takes `idle_s` to that one.

    Not one that passed while the answer was coming: how long that is, its client chose.
    """
    return first_s >= LATE * idle_s and first_s > elapsed_s / 2


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Times are seconds of one clock, of the caller's choice."""

    def __init__(self, config: OverloadConfig):
        self.config = config
        self.state = BreakerState.CLOSED  # as of the last call
        self.num_opened = 0
        self.num_refused = 0
        self._since_s = 0.0  # when it opened; half open: when the present lot of probes began
        self._why = ""
        self._ended: deque[tuple[float, bool, str]] = deque()  # closed: (when, failed, tenant) of the latest requests
        self._num_ended: Counter[str] = Counter()  # those, by tenant
        self._num_failed: Counter[str] = Counter()  # of those
        self._num_probes = 0  # let in, of the present lot
        self._num_good = 0  # probes that succeeded

    def allow(self, now_s: float, step_s: float = 0.0) -> int:
        """Lets a request in and returns the number to give to `ended`.

        `step_s` is how long the step that runs now has taken so far. Raises RequestError(UNAVAILABLE).
        """
        config = self.config
        if 0 < config.step_stall_s < step_s:
            self._open(now_s, f"a step has run for {step_s:.1f} s, the limit step_stall_s={config.step_stall_s:g}")
        elif self.state is not BreakerState.CLOSED and now_s - self._since_s >= config.breaker_open_s:
            if self.state is BreakerState.OPEN:
                log.info("the circuit breaker is half open: %d requests may probe", NUM_PROBES)
            self.state, self._since_s, self._num_probes = BreakerState.HALF_OPEN, now_s, 0
        if self.state is BreakerState.OPEN or self._num_probes == NUM_PROBES:
            self.num_refused += 1
            retry_after_s = config.breaker_open_s - (now_s - self._since_s)
            raise RequestError(
                ErrorCode.UNAVAILABLE,
                f"new requests are refused for {retry_after_s:.1f} s (breaker_open_s={config.breaker_open_s:g}), "
                f"because {self._why}",
                retry_after_s,
            )
        if self.state is BreakerState.HALF_OPEN:
            self._num_probes += 1
        return self.num_opened

    def ended(self, now_s: float, number: int, code: ErrorCode | None, tenant: str = "") -> None:
        """Notes that a request let in has ended: with `code`, or None for an answer; CANCELLED for a deadline that was
        not the engine's fault.

        A probe that says nothing leaves its place to another, so that nobody can keep the breaker from closing.
        """
        if number != self.num_opened:
            return
        if not (code is None or code in FAILURES):
            self._num_probes = max(0, self._num_probes - 1)  # of an earlier lot: its places are free already
            return
        config = self.config
        if self.state is BreakerState.HALF_OPEN:
            self._num_good += code is None
            if code is not None:
                self._open(now_s, f"a request that probed ended with {code.value}")
            elif self._num_good == NUM_PROBES:
                log.info("the circuit breaker is closed: %d requests succeeded", NUM_PROBES)
                self.state, self._num_probes = BreakerState.CLOSED, 0
            return
        self._ended.append((now_s, code is not None, tenant))
        self._count(1, code is not None, tenant)
        while self._ended[0][0] <= now_s - config.breaker_window_s:
            self._count(-1, *self._ended.popleft()[1:])
        num, num_failed = len(self._ended), self._num_failed.total()
        if num >= config.breaker_min_requests and num_failed > config.breaker_error_rate * num and not self._is_one():
            self._open(
                now_s,
                f"{num_failed} of the latest {num} requests failed, "
                f"more than breaker_error_rate={config.breaker_error_rate:g} of them",
            )

    def _count(self, num: int, failed: bool, tenant: str) -> None:
        for counter, more in ((self._num_ended, num), (self._num_failed, num * failed)):
            counter[tenant] += more
            if not counter[tenant]:
                del counter[tenant]

    def _is_one(self) -> bool:
        """Whether failures are one tenant's alone, which must not shut out the others: without it there are few."""
        worst, num_failed = self._num_failed.most_common(1)[0]
        others = len(self._ended) - self._num_ended[worst]
        return others > 0 and self._num_failed.total() - num_failed <= self.config.breaker_error_rate * others

    def _open(self, now_s: float, why: str) -> None:
        if self.state is not BreakerState.OPEN:
            self.num_opened += 1
            log.warning("the circuit breaker opens: %s", why)
        self.state, self._since_s, self._why = BreakerState.OPEN, now_s, why
        self._num_good = self._num_probes = 0
        for those in (self._ended, self._num_ended, self._num_failed):
            those.clear()
