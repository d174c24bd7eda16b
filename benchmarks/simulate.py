"""Simulates many users on a device that is not there: the real scheduler and cache manager on a virtual clock.

    python -m benchmarks.simulate --device=a100 --num_devices=4 --users=1000 --turns=3 --think_s=10
    python -m benchmarks.simulate --device=h100 --num_devices=8 --num_prompts=500 --request_rate=20 --policy=static
    python -m benchmarks.simulate --device=cpu --model=dsjax-nano --check

Prints the lines of `benchmarks.serving`. A step takes the roofline time of its bytes and operations (`dsjax.planner`)
over --efficiency, and --launch_ms; with --device=cpu, what such steps took on this machine just before. --check runs
the same requests on the real engine too and prints the ratios.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from benchmarks import machine, metrics, offline, workloads
from benchmarks.baselines import naive
from benchmarks.metrics import Record
from benchmarks.simulated import Device, StepTimer, make_engine
from benchmarks.workloads import Sessions, WorkItem
from configs.models import MODELS
from dsjax.config import EngineConfig, ModelConfig
from dsjax.config_fields import field_paths
from dsjax.engine import Engine
from dsjax.errors import ConfigError
from dsjax.request import SamplingParams
from servers.flags import define_engine_flags, engine_config, parse, run

PROGRAM = "benchmarks.simulate"
CHECKED = ("output_throughput", "p99_ttft_ms", "p99_e2el_ms")  # real / simulated, printed by --check


def define_flags(values: flags.FlagValues) -> None:
    define_engine_flags(values)
    text = {"device": "a name of the roofline table, or cpu", "label": "a name for this run, stored in the result"}
    flags.DEFINE_string("device", "a100", text["device"], flag_values=values)
    text["num_devices"] = (
        "devices of the mesh, unless --mesh says more; 4, which DeepSeek-V4-Flash needs, or this machine"
    )
    flags.DEFINE_integer("num_devices", None, text["num_devices"], 1, flag_values=values)
    flags.DEFINE_float("efficiency", 0.6, "part of the roofline that steps reach", 0.01, 1.0, flag_values=values)
    flags.DEFINE_float("launch_ms", 1.0, "that any step takes beside its work", 0.0, flag_values=values)
    flags.DEFINE_enum("policy", "ours", ["ours", "static", "naive"], "how to serve", flag_values=values)
    flags.DEFINE_integer("users", 0, "users with a conversation each; 0: independent requests", 0, flag_values=values)
    flags.DEFINE_integer("turns", 1, "of a conversation", 1, flag_values=values)
    flags.DEFINE_float("think_s", 5.0, "mean time between an answer and the next turn", 0.0, flag_values=values)
    flags.DEFINE_float("start_s", 10.0, "time over which users begin", 0.0, flag_values=values)
    flags.DEFINE_integer("turn_len", 100, "new tokens of a later turn", 1, flag_values=values)
    flags.DEFINE_integer("num_prompts", 256, "independent requests", 1, flag_values=values)
    flags.DEFINE_float("request_rate", math.inf, "of independent requests, a second, Poisson", flag_values=values)
    flags.DEFINE_integer("input_len", 1024, "mean prompt length, or of the first turn", 1, flag_values=values)
    flags.DEFINE_integer("output_len", 128, "mean answer length", 1, flag_values=values)
    flags.DEFINE_float("long_share", 0.0, "part of independent requests with --long_len tokens", 0.0, 1.0, values)
    flags.DEFINE_integer("long_len", 32768, "prompt length of long requests", 1, flag_values=values)
    flags.DEFINE_float("range_ratio", 0.0, "lengths lie within (1 +- this) of the mean", 0.0, 0.99, values)
    flags.DEFINE_integer("workload_seed", 0, "of lengths, tokens and arrivals", flag_values=values)
    flags.DEFINE_bool("check", False, "with --device=cpu: run the real engine too", flag_values=values)
    flags.DEFINE_string("label", "", text["label"], flag_values=values)
    flags.DEFINE_string("output", "", "append the result as a line of JSON to this file", flag_values=values)


def model_of(name: str) -> ModelConfig:
    """Raises ConfigError."""
    if name in MODELS:
        return MODELS[name]()
    if Path(name).is_dir():
        return ModelConfig.from_dir(name)
    raise ConfigError(f"model={name!r} must be one of {', '.join(MODELS)}, or a checkpoint's folder")


def greedy(item: WorkItem) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)


class Work:
    """What is sent, as the flags say."""

    def __init__(self, values: Any, vocab_size: int):
        self.follow: offline.Follow = lambda item, record: None
        if values.users:
            sessions = Sessions(
                num_users=values.users,
                num_turns=values.turns,
                first_len=values.input_len,
                turn_len=values.turn_len,
                output_len=values.output_len,
                vocab_size=vocab_size,
                think_s=values.think_s,
                start_s=values.start_s,
                range_ratio=values.range_ratio,
                seed=values.workload_seed,
            )
            self.items, self.arrivals = sessions.begin()
            self.follow, self.total = sessions.follow, values.users * values.turns
            grown = values.turns * values.output_len + (values.turns - 1) * values.turn_len
            self.longest = math.ceil((values.input_len + grown) * (1 + values.range_ratio))
            return
        num_long = round(values.num_prompts * values.long_share)
        parts = [
            (values.num_prompts - num_long, values.input_len, values.output_len),
            (num_long, values.long_len, values.output_len),
        ]
        self.items = workloads.make_mix(
            parts, vocab_size=vocab_size, range_ratio=values.range_ratio, seed=values.workload_seed
        )
        self.arrivals = workloads.arrival_times(len(self.items), values.request_rate, values.workload_seed)
        self.total, self.longest = len(self.items), max(len(item.prompt) for item in self.items)

    def run(self, engine: Engine, text: str, static_batch: int = 0, **clocks: Any) -> tuple[list[Record], float]:
        with tqdm(total=self.total, desc=text, unit="req") as bar:
            return offline.run(
                engine,
                self.items,
                arrivals=self.arrivals,
                params=greedy,
                follow=self.follow,
                static_batch=static_batch,
                on_finish=bar.update,
                **clocks,
            )


def simulate(
    config: EngineConfig, model: ModelConfig, timer: StepTimer | Device, work: Work, policy: str, dtype: str
) -> tuple[dict[str, Any], Engine]:
    """Runs the work on a simulated engine: (result, engine)."""
    if policy == "naive":
        config = naive(config, model, work.longest, dtype)
    engine, clock = make_engine(config, model, timer, dtype=dtype)
    static_batch = config.scheduler.max_num_seqs if policy == "static" else 0
    begin = time.perf_counter()
    records, duration = work.run(engine, "simulating", static_batch, clock=clock, sleep=clock.sleep)
    result: dict[str, Any] = metrics.summarize(records, duration) | {"wall_s": time.perf_counter() - begin}
    stats = engine.stats()
    result |= {"num_steps": stats.num_steps, "num_preemptions": stats.num_preemptions}
    result["error_examples"] = sorted({r.error for r in records if r.error})[:3]
    return result, engine


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    define_flags(values)
    parse(values, argv, f"python -m {PROGRAM} --device=a100 [flags]")
    config = engine_config(values)
    num_devices = values.num_devices or (1 if values.device == "cpu" else 4)
    if values.device == "cpu":
        result, config = _on_this_machine(config, values)
    else:
        if values.check:
            raise ConfigError("check=true needs device=cpu: only this machine's engine can be run")
        if values.model is None and values.config is None:
            config = replace(config, model="deepseek-v4-flash")
        model = model_of(config.model)
        device = Device.of(values.device, num_devices, efficiency=values.efficiency, launch_s=values.launch_ms / 1000)
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        result, engine = simulate(config, model, device, Work(values, model.vocab_size), values.policy, dtype)
        config = engine.config
    print(f"{num_devices} x {values.device}, {config.model}, {values.policy}")
    print(metrics.report(result))
    for name, label in (("num_steps", "Steps:"), ("num_preemptions", "Preemptions:"), ("wall_s", "Simulated in (s):")):
        value = result[name]
        print(f"{label:<40}{value if isinstance(value, int) else f'{value:.2f}':>12}")
    for error in result["error_examples"]:
        print(f"error: {error}")
    if values.output:
        settings = {name: values[name].value for name in values if values[name].present and name != "output"}
        record = {**machine.describe(), "settings": settings, **result, "config": field_paths(config)}
        with open(values.output, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")
    return 1 if result["failed"] else 0


def _on_this_machine(config: EngineConfig, values: Any) -> tuple[dict[str, Any], EngineConfig]:
    """Calibrates, simulates, and with --check measures the same requests on the engine itself."""
    from benchmarks import calibrate

    engine = Engine.from_config(config, progress=True)
    engine.warm_up(progress=True)
    table = calibrate.measure(engine)
    model = engine.model_config
    work = Work(values, model.vocab_size)
    dtype = "float32" if config.dtype == "auto" else config.dtype
    result, simulated = simulate(engine.config, model, table, work, values.policy, dtype)
    if values.check:
        if values.policy == "naive":
            raise ConfigError("check=true with policy=naive: give the settings of a naive engine as flags instead")
        static_batch = config.scheduler.max_num_seqs if values.policy == "static" else 0
        records, duration = work.run(engine, "measuring", static_batch)
        real = metrics.summarize(records, duration)
        print("on the engine itself:")
        print(metrics.report(real))
        for name in CHECKED:
            result[f"{name}_ratio"] = real[name] / result[name]
            print(f"{name} measured / simulated: {result[f'{name}_ratio']:.3f}")
    return result, simulated.config


if __name__ == "__main__":
    sys.exit(main())
