"""Claims of throughput: long and short requests together, 32k contexts, paged against contiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.baselines import contiguous_bytes, naive
from benchmarks.claims.bench import A100, SCALE, Bench, Measured, Row, flash, simulate
from benchmarks.workloads import Sessions, WorkItem, make_mix
from configs.models import MODELS
from dsjax.cache.spec import EntryKind
from dsjax.config import CacheConfig, EngineConfig, ModelConfig
from dsjax.config_fields import field_paths
from dsjax.engine import Engine

CPU = "CPU, {model}, lengths / 16"
SIM = "sim, Flash on 4 x A100"


def mix(bench: Bench) -> Iterator[Row]:
    """32k and 2k prompts in one queue; the unmixed rate is that of both classes one after the other."""
    config = bench.config()
    parts = ((6, 32768 // SCALE, 24), (40, 2048 // SCALE, 24))
    yield _mix(CPU.format(model=bench.model), parts, bench.model_config.vocab_size, config, bench.run)
    config = flash()
    parts = ((24, 32768, 512), (160, 2048, 512))
    yield _mix(SIM, parts, 129280, config, simulate)


def _mix(where: str, parts: Sequence[tuple[int, int, int]], vocab_size: int, config: EngineConfig, run: Any) -> Row:
    items = _varied(parts, vocab_size)
    long_len = parts[0][1]
    salts = iter("abcd")  # no run finds another's prefixes

    def tokens_and_time(some: list[WorkItem], **options: Any) -> tuple[float, float]:
        measured = run(config, some, cache_salt=next(salts), **options)
        figures = measured.figures
        return figures["total_input_tokens"] + figures["total_output_tokens"], figures["duration"]

    alone = [tokens_and_time([i for i in items if (len(i.prompt) == long_len) is is_long]) for is_long in (True, False)]
    unmixed = sum(tokens for tokens, _ in alone) / sum(seconds for _, seconds in alone)
    tokens, seconds = tokens_and_time(items)
    ours = tokens / seconds / unmixed
    tokens, seconds = tokens_and_time(items, static_batch=config.scheduler.max_num_seqs)
    static = tokens / seconds / unmixed
    return Row(
        name="mix",
        claim="32k + 2k mix loses 40 % under static batching",
        where=where,
        measure="tokens/s of the mix against both classes unmixed",
        bar="ours >= 95 %",
        measured=f"static {static:.1%}, ours {ours:.1%}",
        met=ours >= 0.95,
        figures={"unmixed_tokens_per_s": unmixed, "static": static, "ours": ours},
    )


def _varied(parts: Sequence[tuple[int, int, int]], vocab_size: int) -> list[WorkItem]:
    """Prompts of exact lengths, answers within 1 +- 0.75 of theirs."""
    items = make_mix(parts, vocab_size=vocab_size)
    factors = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    return [
        WorkItem(id=i.id, prompt=i.prompt, max_tokens=max(1, round(i.max_tokens * factors[i.id % len(factors)])))
        for i in items
    ]


def long_context(bench: Bench) -> Iterator[Row]:
    """Users who ask about 32k tokens each, turn after turn, as fast as answers come."""
    model = bench.model_config
    vocab = model.vocab_size
    sessions = Sessions(
        num_users=6, num_turns=6, first_len=1900, turn_len=8, output_len=16, vocab_size=vocab, start_s=4.0
    )
    config = bench.config()
    old = naive(config, model, 1900 + 5 * 24, "float32")
    yield _long(CPU.format(model=bench.model), sessions, bench.run, config, old)
    sessions = Sessions(
        num_users=32, num_turns=8, first_len=32768, turn_len=100, output_len=200, vocab_size=129280, start_s=100.0
    )
    config = flash()
    yield _long(SIM, sessions, simulate, config, naive(config, MODELS["deepseek-v4-flash"](), 36864))


def _long(
    where: str, sessions: Sessions, run: Callable[..., Measured], config: EngineConfig, old_config: EngineConfig
) -> Row:
    items, arrivals = sessions.begin()
    old = run(old_config, items, arrivals=arrivals, follow=sessions.follow, cache_salt="naive")
    ours = run(config, items, arrivals=arrivals, follow=sessions.follow, cache_salt="ours")
    cold = [
        run(c, items, arrivals=arrivals, cache_salt=f"cold-{n}")["request_throughput"]
        for n, c in enumerate((old_config, config))
    ]
    gain = ours["request_throughput"] / old["request_throughput"]
    p99 = ours["p99_e2el_ms"] / old["p99_e2el_ms"]
    return Row(
        name="long_context",
        claim="32k throughput 12 -> 28 req/s, P99 420 -> 210 ms",
        where=where,
        measure=f"{sessions.num_turns} turns on a 32k context, naive -> ours: requests/s and P99 latency",
        bar=">= 2.33 x and <= 0.5 x",
        measured=(
            f"{old['request_throughput']:.3f} -> {ours['request_throughput']:.3f} req/s ({gain:.2f} x), "
            f"P99 {old['p99_e2el_ms'] / 1e3:.1f} -> {ours['p99_e2el_ms'] / 1e3:.1f} s ({p99:.2f} x); "
            f"first turns alone {cold[1] / cold[0]:.2f} x"
        ),
        met=gain >= 2.33 and p99 <= 0.5,
        figures={
            "gain": gain,
            "p99_ratio": p99,
            "cold_gain": cold[1] / cold[0],
            "naive": old.figures,
            "ours": ours.figures,
            "naive_rows": old_config.scheduler.max_num_seqs,
        },
        config=ours.config,
    )


def paged(bench: Bench) -> Iterator[Row]:
    """64 requests of at most 2,048 tokens at a time, and contiguous rows in the memory that these take."""

    def on_cpu(rows: int, cache: CacheConfig) -> EngineConfig:
        return bench.config(max_num_seqs=rows, cache=cache, max_model_len=2048 // 8)

    def simulated(rows: int, cache: CacheConfig) -> EngineConfig:
        config = flash(max_num_seqs=rows, max_model_len=2048)
        return replace(config, cache=replace(cache, kv_cache_dtype="bfloat16"), parallel=A100.mesh())

    model = bench.model_config
    yield _paged(f"CPU, {bench.model}, lengths / 8", on_cpu, bench.run, model, "float32", (False,))
    yield _paged(SIM, simulated, simulate, MODELS["deepseek-v4-flash"](), "bfloat16", (False, True))


def _paged(
    where: str,
    make: Callable[[int, CacheConfig], EngineConfig],
    run: Any,
    model: ModelConfig,
    dtype: str,
    rings: Sequence[bool],  # what the contiguous rows are, see `contiguous_bytes`
) -> Row:
    """Both serve in the same way, without prefix reuse; contiguous rows are as many as fit in what paged ones took."""
    num_rows, num_requests = 64, 256
    cache = CacheConfig(block_size=16, enable_prefix_caching=False, cache_memory_bytes=1 << 50)
    config = make(num_rows, cache)
    rng, length = np.random.default_rng(0), config.scheduler.max_model_len
    items = []
    for i in range(num_requests):
        prompt, answer = (int(n) for n in rng.integers(length // 16, length // 2, 2))
        tokens = tuple(rng.integers(3, model.vocab_size, prompt).tolist())
        items.append(WorkItem(id=i, prompt=tokens, max_tokens=answer))
    peak = _Peak()
    after, results = run(config, items, on_step=peak), []
    for ring in rings:
        row_bytes = contiguous_bytes(config, model, dtype, rings=ring)
        rows = min(num_rows, max(1, int(peak.num_bytes / row_bytes)))
        before = run(make(rows, cache), items)
        results.append(
            {
                "saved": 1 - peak.num_bytes / peak.num_rows / row_bytes,
                "gain": after.tokens_per_s / before.tokens_per_s,
                "rows": rows,
                "contiguous": before.figures,
            }
        )
    texts = ["{saved:.0%} less, {gain:.2f} x against {rows} rows".format(**result) for result in results]
    return Row(
        name="paged",
        claim="batch 64 x 2,048: -40 % KV, 2.3 x throughput",
        where=where,
        measure=f"{num_requests} requests of up to 2,048 tokens, {num_rows} at a time in "
        f"{peak.num_bytes / 2**20:,.0f} MiB a device, against as many contiguous rows (every token's latents) as fit "
        "there: bytes a request, tokens/s",
        bar=">= 40 % less, >= 2.3 x",
        measured="; rows with only the window's latents: ".join(texts),
        met=results[0]["saved"] >= 0.4 and results[0]["gain"] >= 2.3,
        figures={"paged": after.figures, "peak_bytes": peak.num_bytes, "peak_rows": peak.num_rows, "results": results},
        config=field_paths(config),
    )


class _Peak:
    """Sees an engine after each step and keeps the most bytes in use, and the rows that used them."""

    def __init__(self):
        self.num_bytes, self.num_rows = 0, 1

    def __call__(self, engine: Engine) -> None:
        rows = engine.scheduler.num_running
        if rows:
            self.num_bytes, self.num_rows = max((self.num_bytes, self.num_rows), (bytes_in_use(engine), rows))


def bytes_in_use(engine: Engine) -> int:
    """Of pages that requests hold and their STATE, on a device."""
    total = engine.scheduler.num_running * engine.caches[0].spec.state_values * 4
    for cache in engine.caches:
        kinds = cache.spec.kinds
        for kind, pool in cache.pools.items():
            both = (kind, EntryKind.INDEX_KEY) if kind is EntryKind.CSA else (kind,)  # a page of CSA has keys too
            total += pool.num_used * sum(kinds[k].page_bytes for k in both)
    return total
