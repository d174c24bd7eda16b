"""A controller that finds how many rows and tokens a step may hold so that latencies stay within targets.  [no jax]

It judges windows of measurements, one at a time and only while its limits are in force. A good window during which a
limit was reached raises that limit by a step; a bad one takes back what was raised last, or if nothing was, lowers the
limit that the slow steps point at, in proportion to the excess. Both limits so search the *knee*, the largest value
that holds, as `_Knob` describes. Only one moves at a time, so the two never fight.

What is judged is the *load*: the 99th percentile of the time between tokens as part of its target, or of the steps'
time as part of a third of the target for first tokens, whichever is greater. (A request that arrives while a step runs
and the next one is on its way has its first token three steps later at most, unless it waits for budget or a row.)
Load is good up to 1 - headroom. A value that was good stays until load exceeds 1 twice running, or the headroom is in
use for five windows: that is what the headroom is for. First tokens that are late although steps are not, want budget.
Late because of a full queue, they are for `overload.py`: no limit of a step helps there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from dsjax.config import FeedbackConfig, SchedulerConfig
from dsjax.scheduler.policy import Limits

MIN_STEP_S = 1e-6  # where a clock is too coarse to see a step
MIN_STEPS, MIN_ITLS = 10, 20  # in a window that counts; with fewer it goes on ...
MOST_WINDOWS = 5  # ... but where answers are of one token there are no times between tokens, and nobody to wait for
START = 4  # the first limits are a fourth of the config's: climbing to the knee costs less than draining down to it
STRIDES = 8  # a limit of which no bad value is known rises by an eighth of the config's at most
PAYS = 0.95  # a rise may not lower the rate below this part of what it was
HELPS = 0.8  # of what a fall has to do: with less it is undone
RESOLUTION = 0.03  # of a limit: less than that below a bad value is close enough
PROBE_WINDOWS = 10  # until a limit that is close enough tries the bad value again, for loads change ...
MOST_PROBE_WINDOWS = 160  # ... twice as long after each attempt that fails, up to this


class _Step(NamedTuple):
    num_tokens: int
    num_rows: int
    step_s: float


class _Fall(NamedTuple):
    """Where a limit was before it began to fall. It has to help, or a target out of reach would take all the rate.

    If a target can be reached at all, what is left of the load when a part p of the limit is, is 1 - (1 - p)^2 at most:
    a step without rows or prompts then takes less than p of what it took.
    """

    knob: _Knob
    value: int
    used: int
    load: float

    def helped(self, load: float) -> bool:
        return load <= self.load * (1 - HELPS * (1 - min(1, self.knob.value / self.used)) ** 2)


class _Knob:
    """One limit, and what is known of it: it held at `good`, and did not at `bad` (0: unknown).

    Below a known `bad` value it rises by half the distance, until that is less than RESOLUTION; there it rests, and
    probes after `probe_s`. Without one it rises by a step that doubles. A rise that lowers the rate (rows or tokens a
    second) is bad whatever the latency, and after a fall it goes on falling while that makes the rate better.
    """

    def __init__(self, most: int, window_s: float):
        self.value = -(-most // START)
        self.most, self.good, self.bad = most, 0, 0
        self.fresh = False  # raised, and not yet found good or bad
        self.num_raised = self.num_lowered = 0
        self._step = self._stride = max(1, most // STRIDES)
        self._good_rate = 0.0
        self._before: tuple[int, float] | None = None  # while it falls: the value before, and its rate
        self._probing = False
        self.idle_until_s = 0.0  # until when it is not lowered, because that did not help
        self._window_s, self._probe_at_s = window_s, 0.0
        self._probe_s = self._idle_s = PROBE_WINDOWS * window_s

    def raised(self, now_s: float, most: int) -> bool:
        """Raises it if it is time to, at most to `most`."""
        if self.value >= most:
            return False
        least = max(1, round(RESOLUTION * self.value))
        step = (self.bad - self.value) // 2 if self.bad else self._step
        if step < least:
            if now_s < self._probe_at_s:
                return False
            self.bad, self._probing, step = 0, True, least
        self.value = min(most, self.value + step)
        self._step = min(2 * step, self._stride)
        self.fresh = True
        self.num_raised += 1
        return True

    def pays(self, now_s: float, rate: float, least: int) -> bool:
        """Its value was reached in a good window, at `rate`. False, and it has moved, if another one is better."""
        before, self._before = self._before, None
        if before is not None and rate > before[1] / PAYS and self.value > least:
            self._before = self.value, rate
            self._lower_to(int(0.9 * self.value), least)
            return False
        if before is not None and rate < before[1] and before[0] < self.bad:  # it fell too far
            self.value, self._good_rate = before
            self.good, self.bad = self.value, self.value + 1
            self.num_raised += 1
            return False
        if self.fresh and rate < PAYS * self._good_rate:
            self.failed(now_s, self.value, 0.9, least, rate)
            return False
        if self.fresh and self._probing:
            self._probe_s = PROBE_WINDOWS * self._window_s
        self.good, self._good_rate = self.value, rate
        self._idle_s = PROBE_WINDOWS * self._window_s
        self.fresh = self._probing = False
        return True

    def failed(self, now_s: float, used: int, factor: float, least: int, rate: float) -> None:
        """`used` of it was too much. Goes back to the good value below that, or down to `factor` of it."""
        self.bad = min(self.value, used)
        if self.fresh and 0 < self.good < self.bad:
            if self._probing:
                self._probe_s = min(2 * self._probe_s, MOST_PROBE_WINDOWS * self._window_s)
            self._lower_to(self.good, least)
        else:  # not what was raised last: the device or its load has changed
            self.good, self._good_rate, self._before = 0, 0.0, (self.bad, rate)
            self._probe_s = PROBE_WINDOWS * self._window_s
            self._lower_to(int(factor * self.bad), least)
        self._probe_at_s = now_s + self._probe_s

    def undo(self, now_s: float, value: int) -> None:
        """Lowering it from `value` did not help."""
        self.value, self.bad, self._before = value, 0, None
        self.idle_until_s = now_s + self._idle_s
        self._idle_s = min(2 * self._idle_s, MOST_PROBE_WINDOWS * self._window_s)
        self.num_raised += 1

    def _lower_to(self, value: int, least: int) -> None:
        self.value = max(min(value, self.bad - 1, self.value - 1), least)
        self.fresh = self._probing = False
        self._step = max(1, round(RESOLUTION * self.value))
        self.num_lowered += 1


class Controller:
    """The limits of a step on each data shard; `step` after each one, `first_token` and `next_token` before it."""

    def __init__(self, config: FeedbackConfig, scheduler: SchedulerConfig):
        self.config = config
        self.load = 0.0  # of the last window judged
        self._itl_s, self._ttft_s = config.target_itl_ms / 1000, config.target_ttft_ms / 1000
        self._goal = 1 - config.headroom
        self._most = Limits.of(scheduler)
        self._tokens = _Knob(scheduler.max_num_batched_tokens, config.feedback_window_s)
        self._rows = _Knob(scheduler.max_num_seqs, config.feedback_window_s)
        # With rows for some tenants alone, there has to be one for all others, or they would never start.
        self._least_rows = 1 + sum(tenant.reserved_seqs for tenant in scheduler.tenants)
        self._rows.value = max(self._rows.value, self._least_rows)
        self._tokens.value = max(self._tokens.value, self._rows.value)
        self._strain = 0.0  # of good values: they are given up at 1
        self._fall: _Fall | None = None  # the last, until a good window
        self._num_rows = 0  # of the last step
        self._settle = 0  # steps to come that were sent with earlier limits
        self._begin_window()

    def _begin_window(self) -> None:
        self._begin_s = 0.0  # set by its first step
        self._steps: list[_Step] = []
        self._itls: list[float] = []
        self._ttfts: list[float] = []

    @property
    def enabled(self) -> bool:
        return self._itl_s > 0 or self._ttft_s > 0

    @property
    def limits(self) -> Limits:
        """For the steps to come; the budget is never less than the rows."""
        if not self.enabled:
            return self._most
        return Limits(max_num_batched_tokens=self._tokens.value, max_num_seqs=self._rows.value)

    @property
    def num_raised(self) -> int:
        return self._tokens.num_raised + self._rows.num_raised

    @property
    def num_lowered(self) -> int:
        return self._tokens.num_lowered + self._rows.num_lowered

    def first_token(self, ttft_s: float) -> None:
        """Notes the time from a request's arrival to its first token."""
        if self._ttft_s:
            self._ttfts.append(ttft_s)

    def next_token(self, itl_s: float) -> None:
        """Notes the time between two tokens of a request."""
        if self._itl_s:
            self._itls.append(itl_s)

    def step(self, now_s: float, step_s: float, num_tokens: int, num_rows: int) -> None:
        """Notes a step read at `now_s`, `step_s` after the one before it or, if that is later, after it was sent.

        `num_tokens` and `num_rows` are of the data shard that had most.
        """
        if not self.enabled:
            return
        step_s = max(step_s, MIN_STEP_S)
        self._num_rows = num_rows
        if self._settle or num_rows > self._rows.value:  # rows beyond a lower limit run to their end
            self._settle = max(self._settle - 1, 0)
            self._begin_window()
            return
        if not self._steps:
            self._begin_s = now_s - step_s
        self._steps.append(_Step(num_tokens, num_rows, step_s))
        windows = (now_s - self._begin_s) / self.config.feedback_window_s
        few = self._itl_s and len(self._itls) < MIN_ITLS and windows < MOST_WINDOWS
        if len(self._steps) < MIN_STEPS or few:
            return
        fresh = self._tokens.fresh or self._rows.fresh
        if windows >= 1 or (fresh and self._is_plainly_bad()):
            if self._judge(now_s):
                self._settle = 2
            self._begin_window()

    def _is_plainly_bad(self) -> bool:
        """More than half of the times are too long: what was raised need not wait for the end of the window."""
        return self._load_of(0.5) > self._goal

    def _load_of(self, part: float) -> float:
        """That percentile of the window, as part of the target."""
        load = 0.0
        if self._itls:
            load = percentile(self._itls, part) / self._itl_s
        if self._ttft_s:
            load = max(load, percentile((s.step_s for s in self._steps), part) / (self._ttft_s / 3))
        return load

    def _judge(self, now_s: float) -> bool:
        """Moves a limit if the window says so; whether it did."""
        self.load = load = self._load_of(0.99)
        is_late = bool(self._ttfts) and percentile(self._ttfts, 0.99) > self._goal * self._ttft_s
        risen = [knob for knob in (self._tokens, self._rows) if knob.fresh and self._used(knob) > knob.good]
        if load > self._goal:
            self._strain += 0.5 if load > 1 else 0.2
            if not risen and self._strain < 0.99:
                return False
            self._strain = 0.0
            if self._fall is not None and not risen and not self._fall.helped(load):
                self._fall.knob.undo(now_s, self._fall.value)
                self._fall = None
                return True
            knob = risen[0] if len(risen) == 1 else self._to_blame(is_late)
            return self._lower(now_s, knob, load)
        self._strain, self._fall = 0.0, None
        reached = [knob for knob in (self._tokens, self._rows) if self._is_reached(knob)]
        for knob in reached:
            if not knob.pays(now_s, self._rate(knob), self._least(knob)):
                return True
        for knob in reached if is_late else reversed(reached):
            if knob.raised(now_s, knob.most if knob is self._tokens else min(knob.most, self._tokens.value)):
                return True
        return False

    def _is_reached(self, knob: _Knob) -> bool:
        """Whether the limit held something back: budgets are full now and then, rows all the time."""
        if knob is self._rows:
            return sum(s.num_rows >= knob.value for s in self._steps) >= 0.5 * len(self._steps)
        return sum(s.num_tokens >= 0.95 * knob.value for s in self._steps) >= 0.1 * len(self._steps)

    def _amount(self, knob: _Knob, step: _Step) -> int:
        return step.num_rows if knob is self._rows else step.num_tokens

    def _used(self, knob: _Knob) -> int:
        """What slow steps typically had of it, or if none was slow, the fullest step."""
        slow = [self._amount(knob, s) for s in self._steps if self._is_slow(s)]
        return int(percentile(slow, 0.5)) if slow else max(self._amount(knob, s) for s in self._steps)

    def _rate(self, knob: _Knob) -> float:
        """Rows or tokens a second, in steps with as many as the limit allows."""
        full = [s for s in self._steps if self._amount(knob, s) >= 0.95 * knob.value]
        return percentile((self._amount(knob, s) / s.step_s for s in full), 0.5)

    def _least(self, knob: _Knob) -> int:
        return self._least_rows if knob is self._rows else max(self._rows.value, self._num_rows)

    def _is_slow(self, step: _Step) -> bool:
        limits = [limit for limit in (self._itl_s, self._ttft_s / 3) if limit]
        return step.step_s > self._goal * min(limits)

    def _lower(self, now_s: float, knob: _Knob, load: float) -> bool:
        factor = min(max(self._goal / load, 0.5), 0.9)
        for each in (knob, self._rows if knob is self._tokens else self._tokens):
            least, value, used = self._least(each), each.value, self._used(each)
            if min(value, used) > least and (now_s >= each.idle_until_s or each.fresh):
                rate = percentile((self._amount(each, s) / s.step_s for s in self._steps), 0.5)
                each.failed(now_s, used, factor, least, rate)
                if each.good == 0 and (self._fall is None or self._fall.knob is not each):
                    self._fall = _Fall(each, value, min(value, used), load)
                return True
        return False

    def _to_blame(self, is_late: bool) -> _Knob:
        """The limit that slow steps point at.

        It is the one of which slow steps have more than fast ones. If nothing tells, steps that only decode do: slow
        ones have too many rows. If all are slow and compute prompts, rows give way first if first tokens are late too,
        for the device is past its knee and those requests had better wait; else tokens. If that does not help, it is
        undone, and the other's turn.
        """
        slow = [s for s in self._steps if self._is_slow(s)][-50:]
        fast = [s for s in self._steps if not self._is_slow(s)][-50:]
        if slow and fast:
            more_tokens = _part_above([s.num_tokens for s in slow], [s.num_tokens for s in fast])
            more_rows = _part_above([s.num_rows for s in slow], [s.num_rows for s in fast])
            if abs(more_tokens - more_rows) > 0.1:
                return self._tokens if more_tokens > more_rows else self._rows
        if any(s.num_tokens == s.num_rows for s in self._steps):
            return self._rows
        return self._rows if is_late else self._tokens


def _part_above(these: list[int], those: list[int]) -> float:
    """How often one of these is greater than one of those; ties count half."""
    return sum((a > b) + 0.5 * (a == b) for a in these for b in those) / (len(these) * len(those))


def percentile(values: Iterable[float], part: float) -> float:
    """The least value that `part` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(part * len(ordered)) - 1, 0)]
