"""Claims of memory: pages in use under pressure, prefix hits of conversations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.claims.bench import Bench, Row, with_scheduler
from benchmarks.workloads import Sessions, make_mix
from dsjax.config import CacheConfig
from dsjax.config_fields import field_paths
from dsjax.engine import Engine


def pressure(bench: Bench) -> Iterator[Row]:
    """More requests than the pages hold, some nearly as long as the cache allows any to be."""
    cache = CacheConfig(num_gpu_blocks_override=36, num_snapshots=16)  # 2,304 tokens
    config = bench.config(cache=cache)
    items = make_mix(((8, 1800, 32), (56, 160, 32)), vocab_size=bench.model_config.vocab_size, range_ratio=0.2)
    needed = sum(len(item.prompt) + item.max_tokens - 1 for item in items)

    def run(enable_preemption: bool) -> dict[str, Any]:
        usage: list[float] = []

        def watch(engine: Engine) -> None:
            if engine.scheduler.waiting:
                usage.append(max(cache.usage for cache in engine.caches))

        some = with_scheduler(config, enable_preemption=enable_preemption)
        measured = bench.run(some, items, on_step=watch, cache_salt=str(enable_preemption))
        stats = measured.engine.stats()
        long = [r for r in measured.records if r.prompt_len > 1000]
        return {
            "usage": sum(usage) / len(usage),
            "long_done": sum(r.ok for r in long) / len(long),
            "num_preemptions": stats.num_preemptions,
            "computed_of_needed": stats.num_computed_tokens / needed,
            **measured.figures,
        }

    text = (
        "{usage:.1%} in use, {long_done:.0%} of long requests, {failed} failures, {num_preemptions} preemptions, "
        "{computed_of_needed:.2f} x the tokens needed, {duration:.1f} s"
    )
    ours, reserving = run(True), run(False)
    yield Row(
        name="pressure",
        claim="memory use 65-70 % -> 92-95 %, long-request success 78 -> 99.5 %",
        where=f"CPU, {bench.model}, cache of 2,304 tokens",
        measure=f"{len(items)} requests: pages of the fullest pool in use, mean of the steps while requests wait; long "
        "requests that end well",
        bar=">= 95 %, 100 %, no failure",
        measured=f"{text.format(**ours)}; with enable_preemption=false {text.format(**reserving)}",
        met=any(r["usage"] >= 0.95 and r["long_done"] == 1 and not r["failed"] for r in (ours, reserving)),
        figures={"preempting": ours, "reserving": reserving},
        config=field_paths(config),
    )


def prefix(bench: Bench) -> Iterator[Row]:
    """Ten-turn conversations; each prompt is all that was said."""
    sessions = Sessions(
        num_users=8,
        num_turns=10,
        first_len=150,
        turn_len=25,
        output_len=30,
        vocab_size=bench.model_config.vocab_size,
        think_s=0.5,
        start_s=2.0,
        range_ratio=0.5,
    )
    items, arrivals = sessions.begin()
    config = bench.config()
    measured = bench.run(config, items, arrivals=arrivals, follow=sessions.follow)
    cached, total = measured["total_cached_tokens"], measured["total_input_tokens"]
    yield Row(
        name="prefix",
        claim="prefix hit rate over 85 % on multi-turn chats",
        where=f"CPU, {bench.model}",
        measure=f"prompt tokens found in the cache, {sessions.num_users} chats of {sessions.num_turns} turns",
        bar="> 85 %",
        measured=f"{cached / total:.1%}: {cached:,} of {total:,} prompt tokens not computed",
        met=cached / total > 0.85,
        figures={"hit_rate": cached / total, **measured.figures},
        config=measured.config,
    )
