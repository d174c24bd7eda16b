"""Whether time is linear in tokens: prompts of growing length, and decode steps with growing contexts, by part.

    python -m benchmarks.linear --output=benchmarks/results/linear-cpu.jsonl --plots=benchmarks/results

Prompts go through the engine one at a time, without the prefix cache, in rounds over all lengths. Decode steps are
those of `benchmarks.step_profile`: what the pages hold is random or nothing, the work is the same. All of it runs on
an engine for the longest context, and what fits also on one for `--short_model_len` tokens: a step should cost what
its rows' contexts ask for, not what the page tables could hold. Without --model the weights are random, of `bench-60m`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from benchmarks import bench_model, offline, workloads
from benchmarks.machine import describe
from benchmarks.roof_here import measure_roof
from benchmarks.scale_plots import plot_parts
from benchmarks.step_profile import ATTENTION, Profile, measure, table
from dsjax.config import CacheConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.load import use_compile_cache
from dsjax.request import SamplingParams
from servers import flags as server_flags

PROGRAM = "benchmarks.linear"
GROWING = (*ATTENTION.values(), "indexer")  # parts that read the cache


def prompt_s(engine: Engine, num_tokens: int, seed: int) -> float:
    """Seconds from a prompt's arrival in an idle engine to its first token."""
    (item,) = workloads.make_random(
        num_prompts=1, input_len=num_tokens, output_len=1, vocab_size=engine.model_config.vocab_size, seed=seed
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (record,), _ = offline.run(engine, [item], arrivals=[0.0], params=lambda item: params)
    if not record.ok:
        raise RuntimeError(f"a prompt of {num_tokens} tokens failed: {record.error}")
    return record.ttft_s


def measure_prompts(engine: Engine, lengths: Sequence[int], runs: int) -> dict[int, list[float]]:
    """Seconds of each run of each length, after one of the shortest that is not counted: it may compile."""
    prompt_s(engine, min(lengths), 0)
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for number in tqdm(range(runs), desc=f"prompts, max_model_len {engine.max_model_len}"):
        for length in lengths:
            seconds[length].append(prompt_s(engine, length, number))
    return seconds


def prompt_table(seconds: Mapping[int, Sequence[float]]) -> str:
    """A line a length; the cost of a token beside that of the shortest's."""
    lines = ["| prompt | s (range) | ms a token | of the shortest's |", "|---|---|---|---|"]
    first = None
    for length, some in seconds.items():
        each = statistics.median(some) / length * 1e3
        first = first or each
        spread = f"{statistics.median(some):.2f} ({min(some):.2f}–{max(some):.2f})"
        lines.append(f"| {length} | {spread} | {each:.3f} | {each / first:.2f} |")
    return "\n".join(lines)


def growth(profiles: Mapping[int, Profile]) -> str:
    """Each part that reads the cache, at the longest context, as part of the same at the shortest."""
    first, last = profiles[min(profiles)], profiles[max(profiles)]
    grown = [(name, last.parts_ms[name], first.parts_ms[name]) for name in GROWING]
    grown.append(("step", last.step_ms, first.step_ms))
    return f"{max(profiles)} beside {min(profiles)} tokens: " + ", ".join(
        f"{name} {after / before:.2f}" for name, after, before in grown if before
    )


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values: Any = flags.FlagValues()
    bench_model.define_flags(values)
    flags.DEFINE_list("prompts", ["1024", "2048", "4096", "8192"], "tokens of a prompt", flag_values=values)
    contexts = [str(1024 << i) for i in range(6)]
    flags.DEFINE_list("contexts", contexts, "tokens behind each row of a decode step", flag_values=values)
    flags.DEFINE_list("rows", ["1", "8"], "rows of a decode step", flag_values=values)
    flags.DEFINE_integer("short_model_len", 2048, "of the second engine; 0 makes none", 0, flag_values=values)
    flags.DEFINE_integer("max_num_batched_tokens", 512, "of a step", 1, flag_values=values)
    flags.DEFINE_integer("runs", 3, "of every prompt", 1, flag_values=values)
    flags.DEFINE_float("seconds", 1.0, "how long to time a decode step", 0.0, flag_values=values)
    flags.DEFINE_string("output", "", "append each result as a line of JSON to this file", flag_values=values)
    flags.DEFINE_string("plots", "", "folder for the plot; needs the extra `plots`", flag_values=values)
    server_flags.parse(values, argv, f"python -m {PROGRAM} [--model=DIR] [--output=FILE] [--plots=DIR]")
    use_compile_cache(values.compilation_cache_dir)
    prompts, contexts, rows = (sorted(map(int, numbers)) for numbers in (values.prompts, values.contexts, values.rows))
    roof, results = measure_roof(values.dtype), []
    for length in (max(*prompts, *contexts) + 8, values.short_model_len):
        some, few = [n for n in prompts if n < length], [n for n in contexts if n < length]
        if not (some and few):
            continue
        scheduler = SchedulerConfig(
            max_num_seqs=max(rows), max_num_batched_tokens=values.max_num_batched_tokens, max_model_len=length
        )
        engine = bench_model.engine_of(
            values.model, dtype=values.dtype, scheduler=scheduler, cache=CacheConfig(enable_prefix_caching=False)
        )
        seconds = measure_prompts(engine, some, values.runs)
        print(f"an engine for {length} tokens:\n{prompt_table(seconds)}")
        results += [{"max_model_len": length, "prompt": n, "seconds": seconds[n]} for n in some]
        for num in rows:
            profiles = {
                context: measure(engine.runner, f"{num}x1", context, values.seconds, roof=roof, dtype=values.dtype)
                for context in tqdm(few, desc=f"decode steps of {num} rows, max_model_len {length}")
            }
            print(table({f"{p.case}, {context}": p for context, p in profiles.items()}))
            print(growth(profiles))
            results += [
                {"max_model_len": length, "context": context, **asdict(profile)}
                for context, profile in profiles.items()
            ]
            if values.plots and num == max(rows) and len(few) > 1 and length != values.short_model_len:
                parts = {part: {c: p.parts_ms[part] for c, p in profiles.items()} for part in GROWING}
                parts["step"] = {context: p.step_ms for context, p in profiles.items()}
                print(plot_parts(Path(values.plots), "contexts", f"tokens behind each of {num} rows", parts))
    if values.output:
        about = {**describe(), "model": values.model or "bench-60m, random", "dtype": values.dtype}
        with open(values.output, "a", encoding="utf-8") as file:
            for result in results:
                file.write(json.dumps({**about, **result}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
