"""Compiles the engine's step for accelerators that are not there and prints what it takes on one device of each.

    python -m benchmarks.targets --target=v6e:4x4 --target=h100:8 --mesh=data:4,model:4 --expert_parallel

Nothing runs: bytes are those of the program's arguments and of the compiler's temporaries, collectives are counted in
its text. A TPU target needs libtpu, a GPU target Python 3.12, JAX 0.12 and its CUDA packages (see BUILD.md).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from benchmarks.machine import describe
from configs.models import MODELS
from dsjax.config import CacheConfig, ParallelConfig, SchedulerConfig
from dsjax.errors import ConfigError
from servers import flags as server_flags

PROGRAM = "benchmarks.targets"
USAGE = f"python -m {PROGRAM} --target=NAME ... [--model=deepseek-v4-flash] [--mesh=data:4,model:4] [--output=FILE]"
_SHORT = {"all-reduce": "ar", "all-gather": "ag", "reduce-scatter": "rs", "all-to-all": "a2a"}


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_multi_string(
        "target", None, "v6e:4x4, v5p:2x2x2, tpu7x:2x2x1 or h100:8; repeatable; default all", flag_values=values
    )
    flags.DEFINE_string("model", "deepseek-v4-flash", f"one of {', '.join(MODELS)}", flag_values=values)
    flags.DEFINE_string("kv_cache_dtype", "auto", "as of dsjax-serve", flag_values=values)
    flags.DEFINE_integer("num_layers", 0, "only the first layers; 0 is all", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("max_num_seqs", 64, "rows of a data shard's decode step", flag_values=values)
    flags.DEFINE_integer("max_num_batched_tokens", 2048, "tokens of its prefill step", flag_values=values)
    flags.DEFINE_integer("max_model_len", 32768, "tokens a request may have", flag_values=values)
    flags.DEFINE_integer("cache_memory_bytes", 16 << 30, "of a data shard's cache, at most", flag_values=values)
    flags.DEFINE_multi_string("step", ["decode", "prefill"], "decode, prefill; repeatable", flag_values=values)
    flags.DEFINE_enum(
        "kernels",
        "auto",
        ["auto", "jnp"],
        "the target's own Pallas kernels, or plain JAX in their place",
        flag_values=values,
    )
    flags.DEFINE_string("output", "", "file to write the results to, as JSON", flag_values=values)
    server_flags.define_parallel_flags(values)
    server_flags.parse(values, argv, USAGE)
    if values.model not in MODELS:
        raise ConfigError(f"model={values.model!r} must be one of {', '.join(MODELS)}")
    for step in values.step:
        if step not in ("decode", "prefill"):
            raise ConfigError(f"step={step!r} must be decode or prefill")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from dsjax.aot import TARGETS  # JAX starts here

    names = values.target or list(TARGETS)
    for name in names:
        if name not in TARGETS:
            raise ConfigError(f"target={name!r} must be one of {', '.join(TARGETS)}")
    results = _compile(names[0], values) if len(names) == 1 else _in_processes(names, values)
    print(table(results))
    if values.output:
        settings = {name: values[name].value for name in _SETTINGS}
        record = {**describe(), "settings": settings, "steps": results}
        Path(values.output).write_text(json.dumps(record, indent=1) + "\n")
    return 0


_SETTINGS = [
    *"model kernels num_layers kv_cache_dtype max_num_seqs max_num_batched_tokens".split(),
    *"max_model_len cache_memory_bytes".split(),
]


def _in_processes(names: list[str], values: flags.FlagValues) -> list[dict[str, Any]]:
    """A process a target: GPU compilers keep the first architecture they see."""
    given = [values[name] for name in values if values[name].present and name not in ("target", "output")]
    others, results = [arg for flag in given for arg in flag.serialize().splitlines()], []
    with tempfile.TemporaryDirectory() as folder:
        for name in tqdm(names, desc="targets"):
            file = Path(folder) / "result.json"
            command = [sys.executable, "-m", PROGRAM, f"--target={name}", f"--output={file}", *others]
            done = subprocess.run(command, stdout=subprocess.DEVNULL)
            if done.returncode:
                raise ConfigError(f"target={name} failed, see above")
            results += json.loads(file.read_text())["steps"]
    return results


def parallel_of(values: flags.FlagValues, num_devices: int) -> ParallelConfig:
    """The flags' mesh, or one for these devices: shards of 4 devices that split heads and cache, experts over all."""
    parallel = server_flags.parallel_config(values)
    if parallel != ParallelConfig():
        return parallel
    return ParallelConfig.of(f"data:{num_devices // 4},model:4", kv_parallel=4, expert_parallel=True)


def _compile(name: str, values: flags.FlagValues) -> list[dict[str, Any]]:
    from dsjax import aot
    from dsjax.load import make_runner

    target, model = aot.TARGETS[name], MODELS[values.model]()
    if values.num_layers:
        hashed = min(model.num_hash_layers, values.num_layers)
        model = dataclasses.replace(model, layer_kinds=model.layer_kinds[: values.num_layers], num_hash_layers=hashed)
    parallel = parallel_of(values, target.num_devices)
    runner, _ = make_runner(
        model,
        None,
        devices=aot.devices(target),
        cache=CacheConfig(cache_memory_bytes=values.cache_memory_bytes, kv_cache_dtype=values.kv_cache_dtype),
        scheduler=SchedulerConfig(
            max_num_seqs=values.max_num_seqs,
            max_num_batched_tokens=values.max_num_batched_tokens,
            max_model_len=values.max_model_len,
        ),
        parallel=parallel,
        weight_format="stored",
        scanned=True,
        kernels=values.kernels,
    )
    # The largest steps: every row decodes; a prompt's chunk fills the step, beside few others.
    most = max(bucket.num_tokens for bucket in runner.buckets.mixed)
    buckets = {
        "decode": runner.buckets.decode[-1],
        "prefill": min(bucket for bucket in runner.buckets.mixed if bucket.num_tokens == most),
    }
    out = []
    for step in tqdm(values.step, desc=name):
        report, _ = aot.compile_step(runner, buckets[step])
        out.append(
            {
                "target": name,
                "step": step,
                **{k: v for k, v in dataclasses.asdict(report).items() if k != "collectives"},
                "argument_bytes": report.argument_bytes,
                "total_bytes": report.total_bytes,
                "memory_bytes": target.memory_bytes,
                "fits": report.temp_bytes is not None and report.total_bytes <= target.memory_bytes,
                "parallel": dataclasses.asdict(parallel),
                "collectives": {
                    kind: {"count": sum(c.times for c in some), "sent_bytes": sum(c.sent_bytes for c in some)}
                    for kind in {c.kind: 0 for c in report.collectives}
                    if (some := [c for c in report.collectives if c.kind == kind and not c.conditional])
                },
            }
        )
    return out


def table(steps: list[dict[str, Any]]) -> str:
    """One line a step, in Markdown; sizes in GiB of one device."""
    lines = [
        "| target | mesh | step | weights | cache | temp | temp / arguments | collectives a step (MiB sent) |"
        " compile, wall (CPU) | fits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in steps:
        p = s["parallel"]
        mesh = f"data {p['data_parallel_size']} x model {p['tensor_parallel_size']}"
        mesh += f", kv {p['kv_parallel']}" if p["kv_parallel"] > 1 else ""
        mesh += f", stages {p['pipeline_parallel_size']}" if p["pipeline_parallel_size"] > 1 else ""
        mesh += ", experts over all" if p["expert_parallel"] else ""
        temp = s["temp_bytes"]
        sent = ", ".join(
            f"{c['count']} {_SHORT.get(kind, kind)} ({c['sent_bytes'] / 2**20:.1f})"
            for kind, c in s["collectives"].items()
        )
        compiled = temp is not None
        fits = ("yes" if s["fits"] else "no") if compiled else "refused, see the result's error"
        columns = (
            s["target"],
            mesh,
            f"{s['step']} {s['bucket']['num_tokens']}",
            f"{s['weight_bytes'] / 2**30:.2f}",
            f"{s['cache_bytes'] / 2**30:.2f}",
            f"{temp / 2**30:.2f}" if compiled else "-",
            f"{100 * temp / s['argument_bytes']:.1f} %" if compiled else "-",
            sent or "-",
            f"{s['compile_s']:.0f} s ({s['compile_cpu_s']:.0f})",
            f"{fits}, {s['total_bytes'] / 2**30:.1f} of {s['memory_bytes'] / 2**30:.0f}",
        )
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
