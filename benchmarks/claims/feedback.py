"""The claim of load: throughput and latency as more is offered, with limits that feedback finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.claims.bench import Bench, Row, flash, simulate, with_scheduler
from benchmarks.metrics import Record
from benchmarks.workloads import arrival_times, make_random
from dsjax.config import EngineConfig, FeedbackConfig
from dsjax.engine import Engine

HORIZON_S = 45.0  # of a run; what is judged happens in the last two thirds
TARGET_ITL_MS = 50.0
BUDGETS = (448, 512, 576, 640, 704, 768, 896, 1024)  # fixed limits among which the knee is looked for
LOADS = (0.5, 0.75, 1.0, 1.5, 2.0)  # of what fixed limits at the knee serve


def load(bench: Bench) -> Iterator[Row]:
    """The knee by a sweep of fixed budgets under more load than any serves; the same with feedback; then all loads."""
    config = flash(max_num_seqs=256, max_num_batched_tokens=BUDGETS[-1], max_num_waiting=1 << 20)
    yield _load("sim, Flash on 4 x A100", config, 200, 129280, most_rate=60.0, run=simulate)


def _load(where: str, config: EngineConfig, length: int, vocab_size: int, most_rate: float, run: Any) -> Row:
    """Prompts and answers of `length` tokens +- 50 %; at `most_rate` requests a second all is late."""
    with_feedback = replace(config, feedback=FeedbackConfig(target_itl_ms=TARGET_ITL_MS))
    goal_ms = TARGET_ITL_MS * (1 - with_feedback.feedback.headroom)

    def at(rate: float, some: EngineConfig, watch: Any = None) -> tuple[float, float]:
        """Answer tokens a second and P99 time between tokens, ms."""
        items = make_random(
            num_prompts=round(rate * HORIZON_S),
            input_len=length,
            output_len=length,
            vocab_size=vocab_size,
            range_ratio=0.5,
        )
        arrivals = arrival_times(len(items), rate)
        return steady(run(some, items, arrivals=arrivals, on_step=watch, until_s=HORIZON_S).records)

    fixed = {budget: at(most_rate, with_scheduler(config, max_num_batched_tokens=budget)) for budget in BUDGETS}
    knee = max((b for b, (_, itl) in fixed.items() if itl <= goal_ms), key=lambda b: fixed[b][0])
    limits: list[int] = []

    def watch(engine: Engine) -> None:
        if engine.clock() >= HORIZON_S / 3:
            limits.append(engine.scheduler.limits.max_num_batched_tokens)

    found_rate, found_itl = at(most_rate, with_feedback, watch)
    found = float(np.median(limits))
    capacity = fixed[knee][0] / length
    loads = {part: at(part * capacity, with_feedback) for part in LOADS}
    rates = [rate for rate, _ in loads.values()]
    rises = all(after >= 0.98 * max(rates[: i + 1]) for i, after in enumerate(rates[1:]))
    worst = max([itl for _, itl in loads.values()] + [found_itl])
    near = abs(found / knee - 1) <= 0.1 and found_rate >= 0.9 * fixed[knee][0]
    return Row(
        name="load",
        claim="batch 8 -> 16 gives +14 % and P99 x 3.4",
        where=where,
        measure=f"answer tokens/s at {', '.join(f'{part:g}' for part in LOADS)} x the knee's load; P99 between tokens "
        f"(target {TARGET_ITL_MS:.0f} ms, of which 20 % headroom); budget of a step at the knee, by fixed limits and "
        "by feedback",
        bar="never falls by over 2 %; within target; within 10 %",
        measured=f"{', '.join(f'{rate:,.0f}' for rate in rates)} tokens/s; P99 at most {worst:.1f} ms; knee {knee} "
        f"tokens ({fixed[knee][0]:,.0f} tokens/s), found {found:.0f} ({found_rate:,.0f} tokens/s)",
        met=rises and worst <= TARGET_ITL_MS and near,
        figures={
            "fixed": {str(budget): both for budget, both in fixed.items()},
            "knee": knee,
            "found": found,
            "found_rate_itl": (found_rate, found_itl),
            "loads": {str(part): both for part, both in loads.items()},
        },
    )


def steady(records: Sequence[Record]) -> tuple[float, float]:
    """Answer tokens a second, and P99 of the times between them in ms, in the last two thirds of a run."""
    times = np.concatenate([r.token_times_s for r in records])
    num = int(((times >= HORIZON_S / 3) & (times < HORIZON_S)).sum())
    gaps = [
        after - before
        for r in records
        for before, after in zip(r.token_times_s[:-1], r.token_times_s[1:], strict=True)
        if HORIZON_S / 3 <= after < HORIZON_S
    ]
    return num / (HORIZON_S * 2 / 3), float(np.percentile(gaps, 99)) * 1000
