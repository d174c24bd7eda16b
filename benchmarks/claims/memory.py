"""Claims of memory: pages in use under pressure, prefix hits of conversations."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.claims.bench import Bench, Row
from benchmarks.workloads import Sessions, make_mix
from dsjax.config import CacheConfig
from dsjax.engine import Engine


def pressure(bench: Bench) -> Iterator[Row]:
    """More requests than the pages hold, a tenth of them as long as the cache allows any to be."""
    cache = CacheConfig(num_gpu_blocks_override=36, num_snapshots=16)  # 2,304 tokens
    config = bench.config(cache=cache)
    items = make_mix(((8, 1800, 32), (56, 160, 32)), vocab_size=bench.model_config.vocab_size, range_ratio=0.2)
    usage: list[float] = []

    def watch(engine: Engine) -> None:
        if engine.scheduler.waiting:
            usage.append(max(cache.usage for cache in engine.caches))

    measured = bench.run(config, items, on_step=watch)
    long = [r for r in measured.records if r.prompt_len > 1000]
    mean, done = sum(usage) / len(usage), sum(r.ok for r in long) / len(long)
    stats = measured.engine.stats()
    return_all = measured["failed"] == 0
    yield Row(
        name="pressure",
        claim="memory use 65-70 % -> 92-95 %, long-request success 78 -> 99.5 %",
        where=f"CPU, {bench.model}, cache of 2,304 tokens",
        measure="pages of the fullest pool in use, mean of the steps while requests wait; long requests that end well",
        bar=">= 95 %, 100 %, no failure",
        measured=f"{mean:.1%} in use, {done:.0%} of {len(long)} long requests, {measured['failed']} failures of "
        f"{len(items)}, {stats.num_preemptions} preemptions",
        met=mean >= 0.95 and done == 1 and return_all,
        figures={"usage": mean, "preemptions": stats.num_preemptions, **measured.figures},
        config=measured.config,
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
