"""How long the steps of a real engine take on this machine, by bucket, for the simulator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import offline
from benchmarks.workloads import WorkItem
from dsjax.engine import Engine
from dsjax.planner import Rows
from dsjax.request import SamplingParams
from dsjax.runner.buckets import Bucket
from dsjax.scheduler.plan import StepPlan


class Sample(NamedTuple):
    """A step: what it held, and the seconds from the end of the one before it (or its own sending, if later)."""

    bucket: Bucket
    num_rows: int
    num_tokens: int
    seconds: float


class Recorder:
    """Stands between an engine and its runner and times steps. `samples` grows with every step read."""

    def __init__(self, runner: Any, clock: Callable[[], float] = time.perf_counter):
        self._runner, self._clock = runner, clock
        self._last_end = 0.0
        self._sent: list[tuple[Bucket, StepPlan, float]] = []
        self.samples: list[Sample] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def dispatch(self, plan: StepPlan) -> Any:
        start = self._clock()
        sent = self._runner.dispatch(plan)
        self._sent.append((sent.bucket, plan, start))
        return sent

    def read(self, sent: Any) -> Any:
        output = self._runner.read(sent)
        now = self._clock()
        bucket, plan, start = self._sent.pop(0)
        self.samples.append(Sample(bucket, len(plan.rows), plan.num_tokens, now - max(start, self._last_end)))
        self._last_end = now
        return output


class StepTable:
    """Seconds of a step by its bucket: a line in rows and tokens where enough steps were seen, else their mean."""

    def __init__(self, samples: Sequence[Sample]):
        by_bucket: dict[Bucket, list[Sample]] = defaultdict(list)
        for sample in samples:
            by_bucket[sample.bucket].append(sample)
        self._lines = {bucket: _line(some) for bucket, some in by_bucket.items()}

    def __call__(self, shards: Sequence[Rows], bucket: Bucket) -> float:
        """A StepTimer. A bucket that was never seen takes what the next larger one does, or the largest."""
        known = sorted(self._lines)
        at = next((b for b in known if b >= bucket and b.is_decode == bucket.is_decode), known[-1])
        line, low, high = self._lines[bucket if bucket in self._lines else at]
        num_rows = sum(map(len, shards))
        num_tokens = sum(num_new for rows in shards for _, num_new in rows)
        return float(np.clip(line @ (1.0, num_rows, num_tokens), low, high))


def _line(samples: Sequence[Sample]) -> tuple[np.ndarray, float, float]:
    """Coefficients of (1, rows, tokens), and the least and the most that they may give.

    A step that took three times the median waited for something else on this machine, and is left out.
    """
    median = np.median([s.seconds for s in samples])
    samples = [s for s in samples if s.seconds <= 3 * median]
    seconds = np.array([s.seconds for s in samples])
    if len(samples) < 20:
        return np.array([seconds.mean(), 0.0, 0.0]), seconds.mean(), seconds.mean()
    columns = np.array([(1.0, s.num_rows, s.num_tokens) for s in samples])
    line, *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    low, high = np.percentile(seconds, [1, 99])
    return line, float(low), float(high)


def measure(engine: Engine, num_requests: int = 96, seed: int = 100) -> StepTable:
    """Runs bursts of random requests of all sizes on a warm engine, first few at a time, then many."""
    runner, rng = engine.runner, np.random.default_rng(seed)
    recorder: Any = Recorder(runner)
    limit, vocab = engine.max_model_len, engine.model_config.vocab_size
    items = []
    for i in range(num_requests):
        prompt = int(np.exp(rng.uniform(np.log(4), np.log(limit // 2))))  # as many short ones as long ones
        output = int(rng.integers(4, min(64, limit // 4)))
        items.append(WorkItem(id=i, prompt=tuple(rng.integers(3, vocab, size=prompt).tolist()), max_tokens=output))
    engine.runner = recorder
    try:
        begin = 0
        most = engine.config.scheduler.max_num_seqs
        for share in (1, 1, 2, 2, most // 4, most // 2, most, 2 * most, num_requests):
            some = items[begin : begin + max(1, share)]
            begin += len(some)
            offline.run(
                engine,
                some,
                arrivals=[0.0] * len(some),
                params=lambda item: SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True),
                cache_salt=f"calibrate-{begin}",
            )
    finally:
        engine.runner = runner
    return StepTable(recorder.samples)
