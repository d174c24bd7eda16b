"""dsjax-serve on a device that is not there: the real server, engine and tokenizer; a step takes --step_ms.

    python -m benchmarks.paced --step_ms=33.3 --log=log.json -- --config=nano --max_num_seqs=300

What follows `--` are flags of dsjax-serve. At its end the server writes what only it can know, for
`benchmarks.streams_cost` to read; times are of CLOCK_MONOTONIC, which processes share.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.simulated import SimulatedRunner
from dsjax.cache.spec import CacheSpec
from dsjax.config import EngineConfig, ModelConfig
from dsjax.engine import Engine
from dsjax.load import model_dir
from dsjax.request import TokenEvent
from dsjax.runner.buckets import Buckets
from dsjax.tokenizer import Tokenizer
from servers import flags as server_flags
from servers.main import main as serve

PROGRAM = "benchmarks.paced"
USAGE = f"python -m {PROGRAM} [--step_ms=33.3] --log=FILE -- FLAGS OF dsjax-serve"


class RealClock:
    """time.monotonic."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - time.monotonic()))


class LoggedEngine:
    """An engine that notes when its steps and each request's first token came, and the CPU time of its steps."""

    def __init__(self, engine: Engine, path: str):
        self._engine, self._path, self._thread_id = engine, path, 0
        self._steps: list[tuple[float, float]] = []  # end, CPU seconds
        self._first_tokens: dict[str, tuple[float, float]] = {}  # when the device had it, when the step returned it
        self._read_s = 0.0
        self._read, engine.runner.read = engine.runner.read, self._timed_read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _timed_read(self, sent: Any) -> Any:
        output, self._read_s = self._read(sent), time.monotonic()
        return output

    def step(self) -> list[TokenEvent]:
        self._thread_id = threading.get_native_id()
        begin_s = time.thread_time()
        events = self._engine.step()
        cpu_s, now_s = time.thread_time() - begin_s, time.monotonic()
        self._steps.append((now_s, cpu_s))
        for event in events:
            if event.num_output_tokens == 1:
                self._first_tokens[event.request_id] = self._read_s, now_s
        return events

    def close(self, error: BaseException | None = None) -> None:
        self._engine.close(error)
        log = {"thread_id": self._thread_id, "steps": self._steps, "first_tokens": self._first_tokens}
        Path(self._path).write_text(json.dumps(log), encoding="utf-8")


def make_engine(config: EngineConfig, step_s: float) -> Engine:
    """An engine whose steps take `step_s` of real time and draw the last token + 1. Raises ConfigError."""
    path, scheduler = model_dir(config.model), config.scheduler
    model = ModelConfig.from_dir(path)
    max_model_len = scheduler.max_model_len or model.max_position_embeddings
    clock = RealClock()
    runner: Any = SimulatedRunner(
        CacheSpec.of(model, config.cache, scheduler, max_model_len),
        Buckets(scheduler),
        lambda rows, bucket: step_s,
        clock,
        vocab_size=model.vocab_size,
    )
    return Engine(
        config=config,
        model_config=model,
        runner=runner,
        tokenizer=Tokenizer.from_path(path),
        max_model_len=max_model_len,
        clock=clock,
    )


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values: Any = flags.FlagValues()
    flags.DEFINE_float("step_ms", 1000 / 30, "of a step, whatever is in it", 0.1, flag_values=values)
    flags.DEFINE_string("log", "", "file for the log", flag_values=values)
    serve_flags = server_flags.parse(values, argv, USAGE, positional=True)

    def make(config: EngineConfig) -> Any:
        return LoggedEngine(make_engine(config, values.step_ms / 1e3), values.log)

    return serve([PROGRAM, *serve_flags], make_engine=make)


if __name__ == "__main__":
    sys.exit(main())
