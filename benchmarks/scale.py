"""Throughput against the number of requests at once, and against their length, on the engine in this process.

    python -m benchmarks.scale --output=benchmarks/results/scale-cpu.jsonl --plots=benchmarks/results

Two sweeps. "requests": 1, 2, 4, ... requests of equal length, all at once. "lengths": a few requests at once, with
prompts of 64, 128, ... tokens. Each sweep has one engine for all of its points, and goes over them `--runs` times, so
that a slow minute of the machine is not one point's alone. A run is as many bursts of the point's requests, one after
the other, as take `--seconds`. Without --model the weights are random, of the model `bench-60m`.

Every run is a JSON line that is written when it ends. Started again, the program measures only what its output lacks.
More load lowers throughput where even the fastest run of a point is over 3 % slower than the slowest run of a point
with less load.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from benchmarks import bench_model, machine, offline, workloads
from benchmarks.metrics import Record, padded_shares, summarize
from benchmarks.scale_plots import plot_sweep
from dsjax.config import SchedulerConfig
from dsjax.engine import Engine
from dsjax.errors import ConfigError
from dsjax.load import use_compile_cache
from dsjax.request import SamplingParams
from servers import flags as server_flags

PROGRAM = "benchmarks.scale"
NOISE = 0.03  # of a rate: ranges of runs that are no further apart are equal
FIGURES = (  # of metrics.summarize
    "total_token_throughput output_throughput duration completed mean_ttft_ms p99_ttft_ms mean_tpot_ms p99_tpot_ms"
).split()


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent at once."""

    num_requests: int
    input_len: int
    output_len: int


# flags that all runs of a file must have in common, and the commit
SETTINGS = (
    "model dtype max_num_seqs max_num_batched_tokens num_requests input_len input_lens requests_per_length output_len"
).split()
Sweep = Mapping[int, Load]  # by what varies, ascending
Runs = Mapping[int, Sequence[Mapping[str, Any]]]  # results by point


def make_engine(
    sweep: Sweep, *, model: str = "", dtype: str = "float32", max_num_seqs: int = 256, max_num_batched_tokens: int = 512
) -> Engine:
    """An engine, warm, that holds any load of the sweep, as far as `max_num_seqs` lets it."""
    scheduler = SchedulerConfig(
        max_num_seqs=min(max_num_seqs, max(load.num_requests for load in sweep.values())),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max(load.input_len + load.output_len for load in sweep.values()),
    )
    engine = bench_model.engine_of(model, dtype=dtype, scheduler=scheduler)
    engine.warm_up(progress=True)
    return engine


_BURST = itertools.count()  # each has prompts and a cache salt of its own


def measure(engine: Engine, load: Load, seconds: float) -> dict[str, Any]:
    """Bursts of a load for at least so long, at least one. Raises RuntimeError if a request fails."""
    records: list[Record] = []
    before, start, busy, own = asdict(engine.stats()), time.perf_counter(), machine.busy_s(), time.process_time()
    duration = 0.0
    while duration < seconds or not records:
        number = next(_BURST)
        items = workloads.make_random(
            num_prompts=load.num_requests,
            input_len=load.input_len,
            output_len=load.output_len,
            vocab_size=engine.model_config.vocab_size,
            seed=number,
        )
        some, took = offline.run(engine, items, arrivals=[0.0] * len(items), params=_params, cache_salt=f"b{number}")
        records, duration = records + some, duration + took
    failed = [record.error for record in records if not record.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
    summary = summarize(records, duration)
    result: dict[str, Any] = {name: summary[name] for name in FIGURES}
    result |= padded_shares(before, asdict(engine.stats()))
    wall = time.perf_counter() - start
    if busy is not None and (busy_after := machine.busy_s()) is not None:
        others = busy_after - busy - (time.process_time() - own)
        result["others_cpu_share"] = max(0.0, others) / (wall * machine.num_cores())
    return result


def _params(item: workloads.WorkItem) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)


def read_done(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results a file has, none if it is not there. Raises ConfigError if they are of other settings."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = [json.loads(line) for line in lines]
    for result in done:
        for name, value in settings.items():
            if result["settings"][name] != value:
                raise ConfigError(
                    f"output={str(path)!r} has runs with {name}={result['settings'][name]!r}, and not {value!r}: name "
                    "another file, or remove it"
                )
    return done


def to_do(sweep: Sweep, num_runs: int, runs: Runs) -> list[int]:
    """The points that are to be measured where there are these runs, round after round over all points."""
    return [point for number in range(num_runs) for point in sweep if len(runs[point]) <= number]


def drops(runs: Runs) -> list[tuple[int, int, float]]:
    """(less load, more load, the latter's best rate as part of the former's worst) where more load lowers throughput.

    Of all points with less load the one with the highest worst rate is named.
    """
    found = []
    rates = {point: [r["total_token_throughput"] for r in some] for point, some in runs.items()}
    for point in rates:
        less = [other for other in rates if other < point]
        best = max(less, key=lambda other: min(rates[other]), default=point)
        ratio = max(rates[point]) / min(rates[best])
        if best != point and ratio < 1 - NOISE:
            found.append((best, point, ratio))
    return found


def table(name: str, runs: Runs) -> str:
    """A line a point: medians of its runs, and the range of its throughput."""
    rows = [f"| {name} | tokens/s | range | output tokens/s | mean TTFT s | mean TPOT ms | padding |", "|---" * 7 + "|"]
    for point, some in runs.items():
        rates = [r["total_token_throughput"] for r in some]
        mid = {key: statistics.median(r[key] for r in some) for key in (*FIGURES, "padded_share")}
        rows.append(
            f"| {point} | {mid['total_token_throughput']:.0f} | {min(rates):.0f}–{max(rates):.0f} | "
            f"{mid['output_throughput']:.0f} | {mid['mean_ttft_ms'] / 1e3:.2f} | {mid['mean_tpot_ms']:.1f} | "
            f"{mid['padded_share']:.0%} |"
        )
    for less, more, ratio in drops(runs):
        rows.append(f"more load lowers throughput: {more} has at most {ratio:.0%} of {less}'s")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values: Any = flags.FlagValues()
    bench_model.define_flags(values)
    flags.DEFINE_multi_enum("sweep", ["requests", "lengths"], ["requests", "lengths"], "repeatable", flag_values=values)
    numbers, lengths = [str(1 << i) for i in range(9)], [str(64 << i) for i in range(9)]
    flags.DEFINE_list("num_requests", numbers, "of sweep requests: how many at once", flag_values=values)
    flags.DEFINE_list("input_lens", lengths, "of sweep lengths: tokens of a prompt", flag_values=values)
    flags.DEFINE_integer("input_len", 128, "of sweep requests", 1, flag_values=values)
    flags.DEFINE_integer("requests_per_length", 4, "of sweep lengths: how many at once", 1, flag_values=values)
    flags.DEFINE_integer("output_len", 32, "tokens of an answer", 1, flag_values=values)
    flags.DEFINE_integer("max_num_seqs", 256, "most rows of the engine", 1, flag_values=values)
    flags.DEFINE_integer("max_num_batched_tokens", 512, "of a step", 1, flag_values=values)
    flags.DEFINE_integer("runs", 3, "of every point", 1, flag_values=values)
    flags.DEFINE_float("seconds", 2.0, "that a run takes at least", 0.0, flag_values=values)
    flags.DEFINE_string("output", "", "JSON lines: a run each, read at the start and added to", flag_values=values)
    flags.DEFINE_string("plots", "", "folder for the plots; needs the extra `plots`", flag_values=values)
    server_flags.parse(values, argv, f"python -m {PROGRAM} [--model=DIR] [--output=FILE] [--plots=DIR]")
    about, out = machine.describe(), values.output_len
    # the mark of a changed work tree is left out: the results themselves may lie in it
    settings = {name: values[name].value for name in SETTINGS} | {"commit": about["commit"].rstrip("+")}
    sweeps: dict[str, Sweep] = {
        "requests": {
            n: Load(num_requests=n, input_len=values.input_len, output_len=out)
            for n in sorted(map(int, values.num_requests))
        },
        "lengths": {
            n: Load(num_requests=values.requests_per_length, input_len=n, output_len=out)
            for n in sorted(map(int, values.input_lens))
        },
    }
    use_compile_cache(values.compilation_cache_dir)
    path = Path(values.output) if values.output else None
    done = read_done(path, settings) if path else []
    for name in values.sweep:
        sweep = sweeps[name]
        runs = {point: [r for r in done if (r["sweep"], r["point"]) == (name, point)] for point in sweep}
        if todo := to_do(sweep, values.runs, runs):
            engine = make_engine(
                sweep,
                model=values.model,
                dtype=values.dtype,
                max_num_seqs=values.max_num_seqs,
                max_num_batched_tokens=values.max_num_batched_tokens,
            )
            measure(engine, sweep[todo[0]], 0.0)  # the first burst touches the engine's memory for the first time
            for point in tqdm(todo, desc=name, unit="run"):
                result = {**about, "settings": settings, "sweep": name, "point": point}
                runs[point].append(result | measure(engine, sweep[point], values.seconds))
                if path:
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(runs[point][-1]) + "\n")
        print(table(name, runs))
        if values.plots:
            print(plot_sweep(Path(values.plots), name, runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
