"""The cache of one data shard split into 1, 2, 4 and 8 parts: memory a device, time of a decode step, bytes sent.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.kv_split --context=16384

A random model of V4's structure with 8 heads runs on 8 devices, `--rows` requests deep in their contexts (the cache is
allocated and zero: a step's work does not depend on its values). Virtual CPU devices share the machine's cores, so a
step's time there is the work of all devices together; it is no forecast for devices that have cores of their own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from absl import flags
from tqdm import tqdm

from benchmarks.machine import describe
from benchmarks.steps import make_row
from dsjax.cache.manager import CacheManager
from dsjax.config import CacheConfig, LayerKind, ModelConfig, ParallelConfig, SchedulerConfig
from dsjax.scheduler.plan import Rows, ShardPlan, StepPlan
from servers import flags as server_flags

PROGRAM = "benchmarks.kv_split"
DEVICES = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One split."""

    parts: int
    cache_bytes_a_device: int
    entries_bytes_a_device: int  # of them pages; the rest is STATE, whole on each device
    step_ms: float  # median
    step_ms_range: tuple[float, float]
    sent_bytes_a_device: int  # in a step
    num_collectives: int


def model_config(context: int) -> ModelConfig:
    """Every kind of layer; heads, groups and indexer heads enough for 8 devices."""
    return ModelConfig(
        vocab_size=2048,
        hidden_size=256,
        num_attention_heads=DEVICES,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=128,
        o_groups=DEVICES,
        o_lora_rank=64,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hash_layers=1,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        sliding_window=128,
        index_n_heads=DEVICES,
        index_head_dim=64,
        index_topk=256,
        hc_mult=4,
        max_position_embeddings=context + 64,
        layer_kinds=(LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA, LayerKind.CSA),
    )


def measure(parts: int, context: int, num_rows: int, repeat: int) -> Measured:
    """Compiles and times decode steps of `num_rows` requests with `context` tokens behind them."""
    import numpy as np
    from flax import nnx

    from dsjax.load import make_runner
    from dsjax.model.build import flat_params
    from dsjax.model.transformer import Transformer
    from dsjax.traffic import collectives

    parallel = ParallelConfig(tensor_parallel_size=DEVICES, kv_parallel=parts)
    scheduler = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=max(64, num_rows))
    cache = CacheConfig(block_size=64, enable_prefix_caching=False)
    config = model_config(context)
    weights = flat_params(Transformer(config, nnx.Rngs(0), np.dtype("float32")))
    runner, _ = make_runner(config, lambda *_: weights, cache=cache, scheduler=scheduler, parallel=parallel)
    manager = CacheManager(runner.spec)
    rows = [make_row(manager, i, context, 1, config.vocab_size) for i in range(num_rows)]
    plan = StepPlan(shards=(ShardPlan(Rows.of(rows)),))
    times = []
    for _ in range(repeat + 2):
        start = time.perf_counter()
        runner.read(runner.dispatch(plan))
        times.append((time.perf_counter() - start) * 1e3)
    times = times[2:]  # the first compiles
    bucket = runner.buckets.choose([(num_rows, num_rows)])
    text = runner.lower(bucket).compile().as_text() or ""
    found = [c for c in collectives(text) if not c.conditional]
    pages = sum(array.nbytes for array in jax.tree.leaves(runner.cache.pools)) // parts
    states = sum(x.nbytes for x in runner.cache.states.values())
    assert pages + states == runner.spec.num_bytes()
    return Measured(
        parts=parts,
        cache_bytes_a_device=pages + states,
        entries_bytes_a_device=pages,
        step_ms=statistics.median(times),
        step_ms_range=(min(times), max(times)),
        sent_bytes_a_device=sum(c.sent_bytes for c in found),
        num_collectives=sum(c.times for c in found),
    )


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_integer("context", 16384, "tokens behind each request", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("rows", 8, "requests", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("repeat", 20, "timed steps", lower_bound=1, flag_values=values)
    flags.DEFINE_list("parts", ["1", "2", "4", "8"], "splits to measure", flag_values=values)
    flags.DEFINE_string("output", "", "file to write the results to, as JSON", flag_values=values)
    server_flags.parse(values, argv, f"python -m {PROGRAM} [--context=16384] [--rows=8] [--output=FILE]")
    results = []
    for parts in tqdm(list(map(int, values.parts)), desc="splits"):
        results.append(measure(parts, values.context, values.rows, values.repeat))
    print(f"{values.rows} requests with {values.context} tokens behind them, one decode step on {DEVICES} devices")
    print(
        f"{'parts':>5} {'cache MiB a device':>19} {'step ms (range)':>24} {'KiB sent a device':>18} {'collectives':>12}"
    )
    for m in results:
        low, high = m.step_ms_range
        spread = f"{m.step_ms:.1f} ({low:.1f}-{high:.1f})"
        size, sent = m.cache_bytes_a_device / 2**20, m.sent_bytes_a_device / 2**10
        print(f"{m.parts:>5} {size:>19.1f} {spread:>24} {sent:>18.1f} {m.num_collectives:>12}")
    if values.output:
        record = {**describe(), "context": values.context, "rows": values.rows, "splits": [asdict(m) for m in results]}
        Path(values.output).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
