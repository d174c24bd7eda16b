"""An engine without a device: the real scheduler and cache manager on a clock that jumps from step to step.  [no jax]

A step takes what a `StepTimer` says. As on a device, it begins when it has been sent and the one before it has ended;
sending costs the host nothing, and reading waits for the end. The token after a request's last one is that plus 1, so
that equal prompts have equal answers and a conversation's next turn finds its prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.roofline import SIMULATED, Roof
from dsjax.cache.spec import CacheSpec
from dsjax.config import EngineConfig, ModelConfig, ParallelConfig
from dsjax.engine import Engine
from dsjax.errors import ConfigError
from dsjax.planner import Planner, Rows
from dsjax.runner.buckets import Bucket, Buckets
from dsjax.runner.padding import Padding
from dsjax.scheduler.plan import StepPlan

StepTimer = Callable[[Sequence[Rows], Bucket], float]  # rows of each data shard, the bucket -> seconds


class Clock(Protocol):
    def __call__(self) -> float: ...
    def wait_until(self, time_s: float) -> None: ...


class VirtualClock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Equal devices with the links between them, and how near to their roofs programs come."""

    roof: Roof
    num_devices: int = 1
    efficiency: float = 0.6  # of the roofline, which no program reaches
    launch_s: float = 1e-3  # that any step takes beside its work
    collective_s: float = 10e-6  # that a collective takes beside its bytes

    @classmethod
    def of(cls, name: str, num_devices: int = 1, **options: float) -> Device:
        """By the name of the roofline table. Raises ConfigError."""
        if name not in SIMULATED:
            raise ConfigError(f"device={name!r} must be one of {', '.join(SIMULATED)}")
        return cls(roof=SIMULATED[name], num_devices=num_devices, **options)  # type: ignore[arg-type]

    def mesh(self) -> ParallelConfig:
        """Data shards of four devices that split heads and cache, or of all there are; experts over all devices."""
        if self.num_devices == 1:
            return ParallelConfig()
        shard = 4 if self.num_devices % 4 == 0 else self.num_devices
        return ParallelConfig.of(
            f"data:{self.num_devices // shard},model:{shard}", kv_parallel=shard, expert_parallel=True
        )


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Times a step as the longer of its bytes and its operations on the device that has most to do.

    Where devices share a data shard, each layer also has two all-reduces of the tokens' activations in bfloat16 (one
    after attention, one after the experts), which nothing hides.
    """

    planner: Planner
    device: Device

    def __call__(self, shards: Sequence[Rows], bucket: Bucket) -> float:
        cost, device = self.planner.step(shards, bucket), self.device
        work = device.roof.seconds(cost.bytes_moved, cost.flops) / device.efficiency
        return work + device.launch_s + self._collectives(bucket.num_tokens)

    def _collectives(self, num_tokens: int) -> float:
        model, size = self.planner.model, self.planner.parallel.tensor_parallel_size
        if size == 1:
            return 0.0
        sent = 2 * num_tokens * model.hidden_size * 2 * (size - 1) / size
        return 2 * model.num_hidden_layers * (self.device.collective_s + sent / self.device.roof.link_bytes_per_s)


class Sent(NamedTuple):
    """A step on its way."""

    tokens: np.ndarray  # [rows]; 0 where it draws none
    end_s: float
    bucket: Bucket


class SimulatedRunner:
    """Stands in for `Runner`. `on_step` is told of each step's rows, bucket and seconds."""

    def __init__(
        self,
        spec: CacheSpec,
        buckets: Buckets,
        timer: StepTimer,
        clock: Clock,
        *,
        vocab_size: int,
        num_shards: int = 1,
        on_step: Callable[[StepPlan, Bucket, float], object] | None = None,
    ):
        self.spec, self.num_shards, self.buckets, self.timer, self.clock = spec, num_shards, buckets, timer, clock
        self.on_step, self.padding = on_step, Padding()
        self._vocab_size = vocab_size
        self._last = np.zeros((num_shards, spec.num_slots), np.int64)  # token of each slot
        self._free_s = 0.0  # when the device has done all that was sent

    def warm_up(self, progress: bool = False) -> None:
        """There is nothing to compile."""

    def dispatch(self, plan: StepPlan) -> Sent:
        rows = [[(row.start, row.num_new) for row in part.rows] for part in plan.shards]
        bucket = self.buckets.choose([(len(part.rows), part.num_tokens) for part in plan.shards])
        self.padding.add(bucket, self.num_shards, plan.num_tokens)
        seconds = self.timer(rows, bucket)
        if self.on_step is not None:
            self.on_step(plan, bucket, seconds)
        self._free_s = max(self._free_s, self.clock()) + seconds
        tokens = [self._token(shard, row) for shard, part in enumerate(plan.shards) for row in part.rows]
        return Sent(np.array(tokens, np.int32), self._free_s, bucket)

    def _token(self, shard: int, row: Any) -> int:
        if not row.samples:
            return 0
        known = row.request.token_ids
        last = known[-1] if row.end == len(known) else self._last[shard, row.cache.slot]
        token = self._last[shard, row.cache.slot] = (int(last) + 1) % self._vocab_size
        return int(token)

    def read(self, sent: Sent) -> Sent:
        self.clock.wait_until(sent.end_s)
        return sent


def make_engine(
    config: EngineConfig,
    model: ModelConfig,
    timer: StepTimer | Device,
    *,
    dtype: str = "bfloat16",
    on_step: Callable[[StepPlan, Bucket, float], object] | None = None,
) -> tuple[Engine, VirtualClock]:
    """The engine of a config, on `Roofline` times of a device or on a timer's. Raises ConfigError.

    With a Device and the default mesh, the mesh is the device's; and weights and cache must fit in its memory.
    """
    scheduler = config.scheduler
    if isinstance(timer, Device) and config.parallel == ParallelConfig():
        config = replace(config, parallel=timer.mesh())
    parallel, max_model_len = config.parallel, scheduler.max_model_len or model.max_position_embeddings
    spec = CacheSpec.of(model, config.cache, scheduler, max_model_len, dtype, num_parts=parallel.kv_parallel)
    if isinstance(timer, Device):
        planner = Planner(model, spec, dtype=dtype, stored=config.weight_format != "widened", parallel=parallel)
        planner.check_fits(timer.roof.memory_bytes)
        timer = Roofline(planner=planner, device=timer)
    clock = VirtualClock()
    runner: Any = SimulatedRunner(
        spec,
        Buckets(scheduler),
        timer,
        clock,
        vocab_size=model.vocab_size,
        num_shards=parallel.data_parallel_size,
        on_step=on_step,
    )
    engine = Engine(
        config=config, model_config=model, runner=runner, tokenizer=None, max_model_len=max_model_len, clock=clock
    )
    return engine, clock
