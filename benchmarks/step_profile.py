"""Where a step's time goes: seconds of each part of the model, for decode steps and prompts of several sizes.

    python -m benchmarks.step_profile
    python -m benchmarks.step_profile --model=DIR --dtype=bfloat16 --cases=1x1,32x1,1x512,24x1+1x488 --ops=10

A case is rows x tokens: 32x1 are 32 requests that decode with `--context` tokens behind them, 1x512 is a prompt;
joined by "+" they are one step. Without --model the weights are random, of the model `bench-60m`. Times of the step are
without a profiler; their parts come from its trace, by the named scopes of the model, scaled to that time. They are
of the program's operations, which overlap little on a CPU; a fused operation counts where its last one belongs.
swa, csa and hca are the attention of layers of that kind, with the window's part, without projections.

The operations and the bytes of a step are those that it cannot do without, by the planner (`dsjax/planner.py`): of its
tokens without padding, its expected experts and the cache entries it sees. The roofline is the longer of those bytes at
this machine's rate of reading and those operations at its rate of multiplying, both measured before.
"""

from __future__ import annotations

import collections
import glob
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from absl import flags
from tqdm import tqdm

from benchmarks import bench_model
from benchmarks.machine import describe
from benchmarks.roof_here import measure_roof
from benchmarks.roofline import Roof
from benchmarks.steps import make_row
from dsjax.cache.manager import CacheManager
from dsjax.config import CacheConfig, LayerKind, ModelConfig, SchedulerConfig
from dsjax.load import use_compile_cache
from dsjax.model.repeat import Repeat
from dsjax.planner import Planner
from dsjax.runner.runner import Runner
from dsjax.scheduler.plan import Rows, ShardPlan, StepPlan
from servers import flags as server_flags

PROGRAM = "benchmarks.step_profile"
ATTENTION = {LayerKind.SLIDING: "swa", LayerKind.CSA: "csa", LayerKind.HCA: "hca"}
# scopes of the model's code, of which the innermost in an operation's path counts; attention's by the layer's kind
PARTS = ("mhc", "projections", "compressor", "indexer", *ATTENTION.values(), "router", "shared", "experts", "sample")
OTHER = "other"
TRACED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Of one case."""

    case: str
    num_tokens: int
    step_ms: float  # median
    step_ms_range: tuple[float, float]
    parts_ms: dict[str, float]
    num_ops: int  # operations run in a step
    flops: float  # that it cannot do without
    bytes_moved: float
    roof_ms: float  # that they take at least
    top_ops: list[tuple[float, int, str]]  # ms, times, what

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_ms * 1e3

    @property
    def roof_share(self) -> float:
        return self.roof_ms / self.step_ms


def parse_case(case: str) -> list[tuple[int, int]]:
    """ "24x1+1x488" -> [(24, 1), (1, 488)]. Raises ValueError."""
    parts = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part) for part in case.split("+")]
    if not all(parts):
        raise ValueError(f"cases={case!r} must be ROWSxTOKENS, joined by +: 32x1, 1x512, 24x1+1x488")
    return [(int(part[1]), int(part[2])) for part in parts if part]


def part_of(op_name: str, kinds: Mapping[str, LayerKind]) -> str:
    """The part of the model that an operation's path, as JAX names it, belongs to. `kinds` are those of the layers, by
    the names of their scopes."""
    scopes = op_name.split("/")
    part = next((name for name in reversed(scopes) if name in PARTS or name == "attention"), OTHER)
    if part == "attention":
        part = next((ATTENTION[kinds[name]] for name in scopes if name in kinds), OTHER)
    return part


def op_paths(text: str) -> dict[str, str]:
    """The path of each operation of a compiled program. Some products of a single row have none of their own: theirs is
    that of an operation that uses their result."""
    paths: dict[str, str] = {}
    operands: dict[str, list[str]] = {}
    for name, rest in re.findall(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*)$", text, re.MULTILINE):
        found = re.search(r'op_name="([^"]*)"', rest)
        paths[name], operands[name] = found[1] if found else "", re.findall(r"%([\w.\-]+)", rest)
    for name in reversed(paths):  # an operation comes after those whose results it uses
        for operand in operands[name]:
            if paths.get(operand) == "":
                paths[operand] = paths[name]
    return paths


def layer_scopes(config: ModelConfig) -> dict[str, LayerKind]:
    """The scope of each layer, and of each of those that a loop goes over."""
    kinds, repeat = config.layer_kinds, Repeat.of(config)
    scopes = {f"layer{i}": kind for i, kind in enumerate(kinds)}
    return scopes | {f"repeated{k}": kinds[repeat.first + k] for k in range(repeat.period)}


def measure(
    runner: Runner, case: str, context: int, seconds: float, *, roof: Roof, dtype: str = "float32", num_ops: int = 0
) -> Profile:
    """Compiles and times a case, then traces it. `dtype` is the weights'."""
    manager = CacheManager(runner.spec)
    sizes = [num_new for count, num_new in parse_case(case) for _ in range(count)]
    vocab = runner.config.vocab_size
    rows = [make_row(manager, i, context if n == 1 else 0, n, vocab) for i, n in enumerate(sizes)]
    plan = StepPlan(shards=(ShardPlan(Rows.of(rows)),))

    def step() -> float:
        start = time.perf_counter()
        runner.read(runner.dispatch(plan))
        return (time.perf_counter() - start) * 1e3

    for _ in range(3):  # the first compiles
        step()
    times = [step()]
    while sum(times) < seconds * 1e3 or len(times) < 5:
        times.append(step())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED_STEPS):
                step()
        bucket = runner.buckets.choose([(len(sizes), sum(sizes))])
        own_ns, count = _own_times(folder, text := runner.program_text(bucket))
    op_names = op_paths(text)
    shapes = dict(re.findall(r"^\s*(?:ROOT )?%([\w.\-]+) = ([\w\[\],()]+)", text, re.MULTILINE))
    cost = Planner(runner.config, runner.spec, dtype=dtype, stored=False).step([[(r.start, r.num_new) for r in rows]])
    scopes = layer_scopes(runner.config)
    parts: collections.Counter[str] = collections.Counter()
    alike: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    for name, ns in own_ns.items():
        path = op_names.get(name, "")
        parts[part_of(path, scopes)] += ns
        entry = alike[f"{re.sub(r'[.0-9]+$', '', name)} {shapes.get(name, '')} {'/'.join(path.split('/')[-3:])}"]
        entry[0] += ns / TRACED_STEPS / 1e6
        entry[1] += count[name] // TRACED_STEPS
    total, median = sum(parts.values()), statistics.median(times)
    top = sorted(((ms, int(num), what) for what, (ms, num) in alike.items()), reverse=True)[:num_ops]
    return Profile(
        case=case,
        num_tokens=sum(sizes),
        step_ms=median,
        step_ms_range=(min(times), max(times)),
        parts_ms={name: parts[name] / total * median for name in (*PARTS, OTHER)},
        num_ops=sum(count.values()) // TRACED_STEPS,
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        roof_ms=roof.seconds(cost.bytes_moved, cost.flops) * 1e3,
        top_ops=top,
    )


def _own_times(folder: str, text: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Nanoseconds that each operation of a program took itself, without those inside it, and how often it ran."""
    known = set(re.findall(r"^\s*(?:ROOT )?%([\w.\-]+) = ", text, re.MULTILINE))
    own: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        for line in plane.lines:
            events = sorted((e.start_ns, -e.duration_ns, e.name) for e in line.events if e.name in known)
            inside: list[tuple[float, str]] = []  # ends and names of the operations around this one
            for start, minus_duration, name in events:
                while inside and inside[-1][0] <= start:
                    inside.pop()
                own[name] -= minus_duration
                count[name] += 1
                if inside:
                    own[inside[-1][1]] += minus_duration
                inside.append((start - minus_duration, name))
    return own, count


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    bench_model.define_flags(values)
    flags.DEFINE_list("cases", ["1x1", "8x1", "32x1", "1x512", "1x2048"], "steps to profile", flag_values=values)
    flags.DEFINE_integer("context", 460, "tokens behind a decoding row", lower_bound=1, flag_values=values)
    flags.DEFINE_float("seconds", 3.0, "how long to time a case", lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer("ops", 0, "operations to list, the slowest first", lower_bound=0, flag_values=values)
    flags.DEFINE_string("output", "", "append a JSON line a case to this file", flag_values=values)
    server_flags.parse(values, argv, f"python -m {PROGRAM} [--model=DIR] [--cases=32x1,1x512] [--output=FILE]")
    cases = {case: parse_case(case) for case in values.cases}
    use_compile_cache(values.compilation_cache_dir)
    options: dict[str, Any] = {
        "cache": CacheConfig(enable_prefix_caching=False),
        "scheduler": SchedulerConfig(
            max_num_seqs=max(sum(count for count, _ in rows) for rows in cases.values()),
            max_num_batched_tokens=max(sum(count * num for count, num in rows) for rows in cases.values()),
            max_model_len=max(values.context, *(num for rows in cases.values() for _, num in rows)) + 8,
        ),
        "dtype": values.dtype,
    }
    runner, _ = bench_model.runner_of(values.model, **options)
    roof = measure_roof(values.dtype)
    profiles = [
        measure(runner, case, values.context, values.seconds, roof=roof, dtype=values.dtype, num_ops=values.ops)
        for case in tqdm(cases, desc="cases")
    ]
    print(f"this machine: {roof.bytes_per_s / 1e9:.1f} GB/s, {roof.flops_per_s / 1e9:.0f} GFLOP/s in {values.dtype}")
    print(table({p.case: p for p in profiles}))
    if values.output:
        about = {**describe(), "model": values.model or "bench-60m, random", "dtype": values.dtype}
        about |= {"roof_bytes_per_s": roof.bytes_per_s, "roof_flops_per_s": roof.flops_per_s}
        with open(values.output, "a", encoding="utf-8") as file:
            for profile in profiles:
                file.write(json.dumps({**about, "context": values.context, **asdict(profile)}) + "\n")
    return 0


def table(by_title: Mapping[str, Profile]) -> str:
    """Milliseconds of each part, a column a profile with its title."""
    profiles = by_title.values()
    lines = [f"{'ms':14}" + "".join(f"{title:>16}" for title in by_title)]
    for name in (*PARTS, OTHER):
        lines.append(f"{name:14}" + "".join(f"{p.parts_ms[name]:16.2f}" for p in profiles))
    lines.append(f"{'step':14}" + "".join(f"{p.step_ms:16.2f}" for p in profiles))
    spread = [f"{p.step_ms_range[0]:.1f}-{p.step_ms_range[1]:.1f}" for p in profiles]
    lines.append(f"{'':14}" + "".join(f"{text:>16}" for text in spread))
    lines.append(f"{'tokens/s':14}" + "".join(f"{p.tokens_per_s:16.0f}" for p in profiles))
    lines.append(f"{'GFLOP/s':14}" + "".join(f"{p.flops / p.step_ms / 1e6:16.1f}" for p in profiles))
    lines.append(f"{'GB/s':14}" + "".join(f"{p.bytes_moved / p.step_ms / 1e6:16.2f}" for p in profiles))
    lines.append(f"{'of roofline':14}" + "".join(f"{p.roof_share:16.1%}" for p in profiles))
    lines.append(f"{'operations':14}" + "".join(f"{p.num_ops:16d}" for p in profiles))
    for p in profiles:
        lines += [f"{p.case}: {ms:8.3f} ms {num:5d} x {what}" for ms, num, what in p.top_ops]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
