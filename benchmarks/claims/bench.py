"""What all rows are measured with: engines of one model in this process, and simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import metrics, offline
from benchmarks.metrics import Record
from benchmarks.simulate import greedy
from benchmarks.simulated import Device, make_engine
from benchmarks.workloads import WorkItem
from configs.models import MODELS
from dsjax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from dsjax.config_fields import field_paths
from dsjax.engine import Engine
from dsjax.load import load_runner, model_dir, use_compile_cache
from dsjax.serving_config import PathConfig

SCALE = 16  # lengths on the CPU are those of the claims divided by this


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim and what was measured of it."""

    name: str  # what --only takes
    claim: str
    where: str  # the machine, or what was simulated
    measure: str
    bar: str
    measured: str
    met: bool | None  # None: not measured
    figures: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def scheduler(**changes: Any) -> SchedulerConfig:
    """Paths and lengths as on the CPU here: 16 rows, steps of 256 tokens, hot below 512 tokens, warm below 1024."""
    given = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 2304,
        "expected_output_tokens": 32,
        "hot": PathConfig(max_tokens=8192 // SCALE),
        "warm": PathConfig(max_tokens=16384 // SCALE, share=0.9, budget_share=0.75),
        **changes,
    }
    return SchedulerConfig(**given)


def flash(**changes: Any) -> EngineConfig:
    """Flash with 64 rows and steps of 2048 tokens; 24 GiB a device for a bfloat16 cache."""
    given = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 65536, **changes}
    # Pages of 64 entries, on four devices
    cache = CacheConfig(block_size=16, cache_memory_bytes=24 << 30, kv_cache_dtype="bfloat16", num_snapshots=2048)
    return EngineConfig(model="deepseek-v4-flash", cache=cache, scheduler=SchedulerConfig(**given))


A100 = Device.of("a100", 4)


class Bench:
    """Runs work on the engine of one model, or on simulated ones.

    Programs are compiled once for all engines that differ only in how they schedule.
    """

    def __init__(self, model: str, compilation_cache_dir: str):
        use_compile_cache(compilation_cache_dir)
        self.model = model
        self.path = model_dir(model)
        self.model_config = ModelConfig.from_dir(self.path)
        self._runners: dict[Any, tuple[Any, int]] = {}

    def config(self, *, cache: CacheConfig | None = None, **changes: Any) -> EngineConfig:
        """Of the engine in this process; `changes` are SchedulerConfig's fields."""
        return EngineConfig(model=self.model, cache=cache or CacheConfig(), scheduler=scheduler(**changes))

    def engine(self, config: EngineConfig) -> Engine:
        """A fresh engine, warm, without a tokenizer."""
        s = config.scheduler
        key = (config.cache, s.max_num_seqs, s.max_num_batched_tokens, s.max_model_len)
        if key not in self._runners:
            runner, limit = load_runner(self.path, self.model_config, cache=config.cache, scheduler=s)
            runner.warm_up(progress=True)
            self._runners[key] = runner, limit
        runner, limit = self._runners[key]
        return Engine(config=config, model_config=self.model_config, runner=runner, tokenizer=None, max_model_len=limit)

    def run(self, config: EngineConfig, items: Sequence[WorkItem], **options: Any) -> Measured:
        """On the engine in this process; `options` are those of `offline.run`."""
        return measure(self.engine(config), items, **options)


def simulate(config: EngineConfig, items: Sequence[WorkItem], device: Device = A100, **options: Any) -> Measured:
    """The same on a simulated device."""
    engine, clock = make_engine(config, MODELS[config.model](), device)
    return measure(engine, items, clock=clock, sleep=clock.sleep, **options)


@dataclass(frozen=True)
class Measured:
    """A run: its records, its figures (those of benchmarks.serving) and the engine afterwards."""

    records: list[Record]
    figures: dict[str, Any]
    engine: Engine

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def tokens_per_s(self) -> float:
        """Prompts' and answers'."""
        return self.figures["total_token_throughput"]

    @property
    def config(self) -> dict[str, Any]:
        return field_paths(self.engine.config)


def measure(
    engine: Engine,
    items: Sequence[WorkItem],
    *,
    arrivals: Sequence[float] | None = None,
    on_step: Callable[[Engine], object] | None = None,
    **options: Any,
) -> Measured:
    """All at once unless `arrivals` say when; `on_step` sees the engine after each step."""
    watched: Any = engine if on_step is None else _Watched(engine, on_step)
    records, duration = offline.run(watched, items, arrivals=arrivals or [0.0] * len(items), params=greedy, **options)
    return Measured(records, metrics.summarize(records, duration), engine)


class _Watched:
    """An engine that shows itself after each step."""

    def __init__(self, engine: Engine, on_step: Callable[[Engine], object]):
        self._engine, self._on_step = engine, on_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        events = self._engine.step()
        self._on_step(self._engine)
        return events


def of_class(measured: Measured, longest: int) -> list[Record]:
    """Records of prompts up to so many tokens."""
    return [record for record in measured.records if record.prompt_len <= longest]


def with_scheduler(config: EngineConfig, **changes: Any) -> EngineConfig:
    return replace(config, scheduler=replace(config.scheduler, **changes))
