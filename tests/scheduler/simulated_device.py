"""A device with a sharp knee and always more requests than it can serve, to close a controller's loop.  [no jax]"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dsjax.scheduler.feedback import Controller, percentile
from dsjax.scheduler.policy import Limits


@dataclass(frozen=True)
class Device:
    """A step takes `flat_s`, and beyond a knee much longer for each row or token more; noise is a factor."""

    knee_rows: int = 10**9
    knee_tokens: int = 10**9
    flat_s: float = 0.02
    row_s: float = 0.02
    token_s: float = 0.001
    noise: float = 0.0  # standard deviation of the logarithm

    def step_s(self, num_tokens: int, num_rows: int, rng: random.Random) -> float:
        over = self.row_s * max(0, num_rows - self.knee_rows) + self.token_s * max(0, num_tokens - self.knee_tokens)
        return (self.flat_s + over) * math.exp(self.noise * rng.gauss(0, 1))


@dataclass
class _Row:
    arrival_s: float
    prompt_left: int
    output_left: int
    started: bool = False


class Sample(NamedTuple):
    now_s: float
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass
class Run:
    """What happened: the limits after each step, times between tokens, tokens generated and computed."""

    limits: list[Sample] = field(default_factory=list)
    itls: list[tuple[float, float]] = field(default_factory=list)  # (when, seconds)
    finished: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens of prompt and answer)

    def after(self, since_s: float) -> Run:
        return Run(*([x for x in values if x[0] >= since_s] for values in (self.limits, self.itls, self.finished)))

    def itl_p99(self) -> float:
        return percentile((itl for _, itl in self.itls), 0.99)

    def tokens_per_s(self) -> float:
        return sum(tokens for _, tokens in self.finished) / (self.limits[-1].now_s - self.limits[0].now_s)


class Fixed:
    """Fixed limits in a controller's place."""

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int):
        self.limits = Limits(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)

    def step(self, *args) -> None: ...
    def first_token(self, ttft_s: float) -> None: ...
    def next_token(self, itl_s: float) -> None: ...


def run(
    controller: Controller | Fixed,
    device: Callable[[float], Device],  # at a time
    seconds: float,
    *,
    prompt: int,
    output: int,
    requests_per_s: float = math.inf,
    seed: int = 0,
) -> Run:
    """Steps until `seconds`. Requests whose row is free come at once, or with random gaps at a finite rate."""
    rng = random.Random(seed)
    out, rows, waiting = Run(), [], []
    now_s, next_s = 0.0, 0.0
    while now_s < seconds:
        while next_s <= now_s and (requests_per_s < math.inf or not waiting):
            jitter = rng.uniform(0.5, 1.5)
            waiting.append(_Row(next_s, max(1, int(prompt * jitter)), max(1, int(output * jitter))))
            next_s = next_s + rng.expovariate(requests_per_s) if requests_per_s < math.inf else now_s
        limits = controller.limits
        budget = max(limits.max_num_batched_tokens, len(rows))
        computed: list[tuple[_Row, int]] = []
        for i, row in enumerate(rows):
            num_new = min(max(row.prompt_left, 1), budget - (len(rows) - i - 1))
            computed.append((row, num_new))
            budget -= num_new
        while budget > 0 and len(rows) < limits.max_num_seqs and (waiting or requests_per_s == math.inf):
            row = waiting.pop(0) if waiting else _Row(now_s, prompt, max(1, int(output * rng.uniform(0.5, 1.5))))
            rows.append(row)
            computed.append((row, min(row.prompt_left, budget)))
            budget -= computed[-1][1]
        if not rows:
            now_s = next_s
            continue
        num_tokens = sum(num_new for _, num_new in computed)
        step_s = device(now_s).step_s(num_tokens, len(rows), rng)
        now_s += step_s
        for row, num_new in computed:
            if row.prompt_left > num_new:
                row.prompt_left -= num_new
                continue
            row.prompt_left = 0
            row.output_left -= 1
            if row.started:
                controller.next_token(step_s)
                out.itls.append((now_s, step_s))
            else:
                controller.first_token(now_s - row.arrival_s)
                row.started = True
            if row.output_left == 0:
                rows.remove(row)
                out.finished.append((now_s, prompt + output))
        controller.step(now_s, step_s, num_tokens, len(computed))
        limits = controller.limits
        out.limits.append(Sample(now_s, limits.max_num_batched_tokens, limits.max_num_seqs))
    return out
