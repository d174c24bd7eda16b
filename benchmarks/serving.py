"""Measures serving: latency and throughput of a workload, offline (the engine in this process) or over gRPC.

    python -m benchmarks.serving --model=DIR --workload=workload.json --max_num_seqs=8 --max_model_len=1280
    python -m benchmarks.serving --backend=grpc --address=127.0.0.1:50051 --num_prompts=64 --request_rate=4

Prints the lines of `vllm bench serve` and, with --output, appends one JSON line a run with the same field names, the
resolved configuration, the machine and the versions. A run never sees another's prefixes, unless --reuse_prefix_cache.
Exits 1 if any request failed, 2 for a wrong flag or file, or a server that does not answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from absl import flags
from tqdm import tqdm

from benchmarks import machine, metrics, workloads
from benchmarks.metrics import Record
from benchmarks.workloads import WorkItem
from dsjax.config_fields import check
from dsjax.errors import ConfigError
from dsjax.request import SamplingParams
from servers.flags import define_engine_flags, engine_config, parse, run

USAGE = "python -m benchmarks.serving [--backend=offline|grpc] [flags]"
VALUES = flags.FlagValues()
define_engine_flags(VALUES)
BACKEND = flags.DEFINE_enum(
    "backend", "offline", ["offline", "grpc"], "The engine in this process, or a running server.", flag_values=VALUES
)
ADDRESS = flags.DEFINE_string("address", "127.0.0.1:50051", "The server of --backend=grpc.", flag_values=VALUES)
SERVER_PID = flags.DEFINE_integer(
    "server_pid", 0, "With grpc: the process whose CPU time is reported; 0 reports none.", flag_values=VALUES
)
WORKLOAD = flags.DEFINE_string("workload", "", "A workload file; without it requests are random.", flag_values=VALUES)
NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", 32, "Random requests, or how many of the workload file; 0 is all.", flag_values=VALUES
)
INPUT_LEN = flags.DEFINE_integer("random_input_len", 256, "Mean prompt length of random requests.", flag_values=VALUES)
OUTPUT_LEN = flags.DEFINE_integer("random_output_len", 64, "Mean answer length of random requests.", flag_values=VALUES)
RANGE_RATIO = flags.DEFINE_float(
    "random_range_ratio", 0.0, "Random lengths lie within (1 +- this) of the mean.", flag_values=VALUES
)
PREFIX_LEN = flags.DEFINE_integer(
    "random_prefix_len", 0, "Tokens that all random prompts begin with.", flag_values=VALUES
)
SAVE_WORKLOAD = flags.DEFINE_string("save_workload", "", "Writes what is sent as a workload file.", flag_values=VALUES)
WORKLOAD_SEED = flags.DEFINE_integer("workload_seed", 0, "Of random requests and arrival times.", flag_values=VALUES)
REQUEST_RATE = flags.DEFINE_float(
    "request_rate", math.inf, "Requests a second, Poisson; inf sends all at once.", flag_values=VALUES
)
MAX_CONCURRENCY = flags.DEFINE_integer(
    "max_concurrency", 0, "Requests in flight at most; 0 is no limit.", flag_values=VALUES
)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", flag_values=VALUES)
IGNORE_EOS = flags.DEFINE_bool("ignore_eos", True, "Every answer has exactly its max_tokens.", flag_values=VALUES)
RUNS = flags.DEFINE_integer("runs", 1, "How often to send the workload.", flag_values=VALUES)
NUM_WARMUPS = flags.DEFINE_integer(
    "num_warmups", 4, "Requests sent before the first run, with 4 tokens each.", flag_values=VALUES
)
REUSE_PREFIX_CACHE = flags.DEFINE_bool(
    "reuse_prefix_cache", False, "All runs share one cache salt.", flag_values=VALUES
)
REF = flags.DEFINE_string("ref", "", "JSON {id: [tokens]}: count the answers that equal it.", flag_values=VALUES)
LABEL = flags.DEFINE_string("label", "", "A name for this configuration, stored in the result.", flag_values=VALUES)
OUTPUT = flags.DEFINE_string("output", "", "Append one JSON line a run to this file.", flag_values=VALUES)
SAVE_DETAILED = flags.DEFINE_bool(
    "save_detailed", False, "Store each request's lengths and times in the result.", flag_values=VALUES
)


class Target(Protocol):
    """What is measured."""

    vocab_size: int
    model_id: str
    config: dict[str, Any]  # resolved, {dotted path: value}

    def send(self, items: Sequence[WorkItem], arrivals: list[float], salt: str, tick: Callable[[], object]) -> Sent: ...
    def cpu_s(self) -> float | None: ...
    def counters(self) -> Mapping[str, Any]: ...  # of the engine, as GetLoads has them


Sent = tuple[list[Record], float]


class Offline:
    """An engine in this process, warmed up."""

    def __init__(self):
        from benchmarks import offline
        from dsjax.config_fields import field_paths
        from dsjax.engine import Engine

        config = engine_config(VALUES)
        self.engine = Engine.from_config(config, progress=True)
        self.engine.warm_up(progress=True)
        self.vocab_size = self.engine.model_config.vocab_size
        self.model_id = config.model
        self.config = field_paths(self.engine.config)
        self._run = offline.run

    def send(self, items: Sequence[WorkItem], arrivals: list[float], salt: str, tick: Callable[[], object]) -> Sent:
        def params(item: WorkItem):
            return SamplingParams(
                temperature=TEMPERATURE.value, max_tokens=item.max_tokens, ignore_eos=IGNORE_EOS.value
            )

        return self._run(
            self.engine,
            items,
            arrivals=arrivals,
            max_concurrency=MAX_CONCURRENCY.value or None,
            params=params,
            cache_salt=salt,
            on_finish=tick,
        )

    def cpu_s(self) -> float | None:
        return time.process_time()

    def counters(self) -> Mapping[str, Any]:
        return asdict(self.engine.stats())


class Grpc:
    """A running server."""

    def __init__(self):
        from benchmarks import online

        server, model = self._ask(online.server_info(ADDRESS.value))
        self.vocab_size = model.vocab_size
        self.model_id = model.model
        self.config = json.loads(server.config_json or "{}")
        self._run, self._params = online.run, online.pb.SamplingParams

    def send(self, items: Sequence[WorkItem], arrivals: list[float], salt: str, tick: Callable[[], object]) -> Sent:
        def params(item: WorkItem):
            return self._params(temperature=TEMPERATURE.value, max_tokens=item.max_tokens, ignore_eos=IGNORE_EOS.value)

        return asyncio.run(
            self._run(
                ADDRESS.value,
                items,
                arrivals=arrivals,
                max_concurrency=MAX_CONCURRENCY.value or None,
                params=params,
                cache_salt=salt,
                on_finish=tick,
            )
        )

    def cpu_s(self) -> float | None:
        return machine.cpu_time_s(SERVER_PID.value) if SERVER_PID.value else None

    def counters(self) -> Mapping[str, Any]:
        from benchmarks import online

        return self._ask(online.counters(ADDRESS.value))

    def _ask(self, answer: Coroutine[Any, Any, Any]) -> Any:
        """Raises ConfigError if the server does not answer."""
        import grpc

        try:
            return asyncio.run(answer)
        except grpc.aio.AioRpcError as error:
            raise ConfigError(
                f"address={ADDRESS.value!r} does not answer: {error.code().name}: {error.details()}"
            ) from error


def check_flags() -> None:
    """Raises ConfigError or RequestError for a flag of this program that cannot be used."""
    for flag, low in (
        (NUM_PROMPTS, 0 if WORKLOAD.value else 1), (INPUT_LEN, 1), (OUTPUT_LEN, 1), (PREFIX_LEN, 0), (WORKLOAD_SEED, 0),
        (SERVER_PID, 0), (MAX_CONCURRENCY, 0), (RUNS, 1), (NUM_WARMUPS, 0),
    ):  # fmt: skip
        check(flag.value >= low, f"{flag.name}={flag.value} must be at least {low}")
    check(REQUEST_RATE.value > 0, f"request_rate={REQUEST_RATE.value} must be more than 0, or inf")
    check(0 <= RANGE_RATIO.value < 1, f"random_range_ratio={RANGE_RATIO.value} must be in [0, 1)")
    SamplingParams(temperature=TEMPERATURE.value)
    for flag in (SAVE_WORKLOAD, OUTPUT):
        folder = Path(flag.value).parent
        check(folder.is_dir(), f"{flag.name}={flag.value!r} cannot be written: {str(folder)!r} is no folder")


def work_of_file() -> list[WorkItem] | None:
    """The requests of --workload; None without one."""
    if not WORKLOAD.value:
        return None
    items = workloads.load(WORKLOAD.value)
    given = VALUES["num_prompts"].present
    return items[: NUM_PROMPTS.value] if given and NUM_PROMPTS.value else items


def random_work(vocab_size: int) -> list[WorkItem]:
    """The requests that the flags describe."""
    return workloads.make_random(
        num_prompts=NUM_PROMPTS.value,
        input_len=INPUT_LEN.value,
        output_len=OUTPUT_LEN.value,
        vocab_size=vocab_size,
        range_ratio=RANGE_RATIO.value,
        prefix_len=PREFIX_LEN.value,
        seed=WORKLOAD_SEED.value,
    )


def measure(target: Target, items: list[WorkItem], number: int, salt: str, ref: Any) -> dict[str, Any]:
    """Sends the workload once; the result as it is stored."""
    arrivals = workloads.arrival_times(len(items), REQUEST_RATE.value, WORKLOAD_SEED.value)
    cpu_before, before = target.cpu_s(), target.counters()
    with tqdm(total=len(items), desc=f"run {number + 1}/{RUNS.value}", unit="req") as bar:
        records, duration = target.send(items, arrivals, salt, bar.update)
    cpu_after = target.cpu_s()
    result: dict[str, Any] = {
        **machine.describe(),
        "backend": f"dsjax-{BACKEND.value}",
        "label": LABEL.value,
        "model_id": target.model_id,
        "num_prompts": len(items),
        "request_rate": "inf" if math.isinf(REQUEST_RATE.value) else REQUEST_RATE.value,
        "max_concurrency": MAX_CONCURRENCY.value or None,
        "run": number,
        "workload": WORKLOAD.value or "random",
        **metrics.summarize(records, duration),
        **metrics.padded_shares(before, target.counters()),
    }
    if cpu_before is not None and cpu_after is not None:
        result["cpu_s"] = cpu_after - cpu_before
        result["output_tokens_per_cpu_s"] = result["total_output_tokens"] / max(result["cpu_s"], 1e-9)
    if ref is not None:
        result |= metrics.compare(records, ref)
    if SAVE_DETAILED.value:
        result |= metrics.details(records)
    result["error_examples"] = sorted({r.error for r in records if r.error})[:3]
    result["config"] = target.config
    return result


def run_all() -> int:
    """Measures what the flags describe. Returns the exit code. Raises ConfigError for a wrong flag or file."""
    check_flags()  # and files, before a model is loaded
    given, ref = work_of_file(), workloads.read_json(REF.value) if REF.value else None
    check(ref is None or isinstance(ref, dict), f"ref={REF.value!r} must hold a JSON object {{id: [tokens]}}")
    target: Target = Offline() if BACKEND.value == "offline" else Grpc()
    items = random_work(target.vocab_size) if given is None else given
    if SAVE_WORKLOAD.value:
        workloads.save(SAVE_WORKLOAD.value, items)
    salt = f"bench-{os.getpid()}-{time.time_ns()}"
    warm = [WorkItem(id=i.id, prompt=i.prompt, max_tokens=min(4, i.max_tokens)) for i in items[: NUM_WARMUPS.value]]
    if warm:
        target.send(warm, [0.0] * len(warm), salt + "-warm", lambda: None)
    failed = 0
    for number in range(RUNS.value):
        result = measure(target, items, number, salt if REUSE_PREFIX_CACHE.value else f"{salt}-{number}", ref)
        print(metrics.report(result) if result["completed"] else f"none of {len(items)} requests was answered")
        for error in result["error_examples"]:
            print(f"error: {error}")
        failed += result["failed"]
        if OUTPUT.value:
            with open(OUTPUT.value, "a", encoding="utf-8") as file:
                file.write(json.dumps(result, default=str) + "\n")
    return 1 if failed else 0


def main() -> int:
    def body() -> int:
        parse(VALUES, sys.argv, USAGE)
        return run_all()

    return run("benchmarks.serving", body)


if __name__ == "__main__":
    sys.exit(main())
