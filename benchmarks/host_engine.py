"""The real engine, down to the packed arrays of each step, without a device: for measuring what the host does.

`HostRunner` is the real runner up to where a program would be launched. There it takes a vector with the same token
for every row, as the device would return it, so a step costs what the host alone needs for it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.models import MODELS
from dsjax.cache.spec import CacheSpec
from dsjax.config import CacheConfig, EngineConfig, OverloadConfig, ParallelConfig, SchedulerConfig
from dsjax.detokenizer import Detokenizer
from dsjax.engine import Engine
from dsjax.load import model_dir
from dsjax.request import MAX_LOGPROBS
from dsjax.runner.buckets import Bucket
from dsjax.runner.output import DeviceOutput
from dsjax.runner.runner import Program, Runner
from dsjax.sharding import make_mesh
from dsjax.tokenizer import Tokenizer

MODEL = "deepseek-v4-flash"  # has layers of all kinds, so its step has all the arrays that there are
TOKENIZER = "dsjax-nano"
TOKEN = 65  # that every row draws


class HostRunner(Runner):
    """A runner without programs: `launch` answers at once, with an array that `prepare` made, if there is one."""

    def __init__(self, spec: CacheSpec, scheduler: SchedulerConfig):
        nothing: Any = None  # there is no model: nothing is lowered
        super().__init__(
            config=MODELS[MODEL](),
            graph=nothing,
            params=nothing,
            spec=spec,
            scheduler=scheduler,
            mesh=make_mesh(ParallelConfig(), jax.devices("cpu")),
            dtype=jnp.dtype("float32"),
            abstract=True,
        )
        self.answers: defaultdict[Bucket, list[jax.Array]] = defaultdict(list)

    def warm_up(self, progress: bool = False) -> None:
        """There is nothing to compile."""

    def launch(self, key: Program, arrays: Sequence[np.ndarray]) -> DeviceOutput | None:
        if not isinstance(key, Bucket):
            return None
        ready = self.answers[key]
        return DeviceOutput(ready.pop() if ready else _answer(key), None, None)


def _answer(bucket: Bucket) -> jax.Array:
    """What `runner/output.py` packs, all of it TOKEN."""
    of_row = 2 + 2 * MAX_LOGPROBS
    return jnp.full((1, 1, bucket.num_rows + (bucket.num_rows + bucket.num_tokens) * of_row), TOKEN, jnp.int32)


def make_engine(
    max_num_seqs: int, max_model_len: int = 32768, *, max_predicted_wait_s: float = 0.0, **scheduler: Any
) -> Engine:
    """An engine whose cache holds `max_num_seqs` requests of 4,096 tokens, or a few of `max_model_len`."""
    config = EngineConfig(
        model=MODEL,
        cache=CacheConfig(num_gpu_blocks_override=max(max_num_seqs * 64, 2 * max_model_len // 64)),
        scheduler=SchedulerConfig(
            **{
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": 2048,
                "max_model_len": max_model_len,
                "max_num_waiting": 4096,
                **scheduler,
            }
        ),
        overload=OverloadConfig(max_predicted_wait_s=max_predicted_wait_s),
    )
    spec = CacheSpec.of(MODELS[MODEL](), config.cache, config.scheduler, max_model_len, "bfloat16")
    return Engine(
        config=config,
        model_config=MODELS[MODEL](),
        runner=HostRunner(spec, config.scheduler),
        tokenizer=Tokenizer.from_path(model_dir(TOKENIZER)),
        max_model_len=max_model_len,
    )


def prepare(engine: Engine, num_steps: int) -> None:
    """Makes the answers of so many steps of the buckets seen so far: on a device that is not the host's work."""
    assert isinstance(engine.runner, HostRunner)
    for bucket, answers in engine.runner.answers.items():
        answers += jax.block_until_ready([_answer(bucket) for _ in range(num_steps - len(answers))])


class Parts:
    """How long each part of a step takes by itself, without the parts that it calls.

    Reading the clock takes longer than many of the calls that are timed; what it takes is measured and left out.
    """

    def __init__(self):
        self._ns: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._nested: Counter[str] = Counter()  # calls out of the part
        self._part, self._since = "", 0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is the part's."""
        clock = time.perf_counter_ns

        def call(*args: Any, **named: Any) -> Any:
            caller = self._part
            now = clock()
            self._ns[caller] += now - self._since
            self._nested[caller] += 1
            self._calls[part] += 1
            self._part, self._since = part, clock()
            try:
                return function(*args, **named)
            finally:
                now = clock()
                self._ns[part] += now - self._since
                self._part, self._since = caller, clock()

        return call

    def replace(self, part: str, owner: Any, *names: str) -> None:
        """Times these methods of an object."""
        for name in names:
            setattr(owner, name, self.timed(part, getattr(owner, name)))

    def us(self, num_steps: int) -> dict[str, float]:
        """Microseconds a step by part, of so many steps."""
        inside, outside = _timer_ns()
        return {
            part: max(0.0, ns - inside * self._calls[part] - outside * self._nested[part]) / num_steps / 1000
            for part, ns in self._ns.items()
            if part
        }

    def clear(self) -> None:
        for counter in (self._ns, self._calls, self._nested):
            counter.clear()


def _timer_ns(num: int = 20000) -> tuple[float, float]:
    """What a timed call adds to its own part, and to its caller's."""

    def nothing() -> None:
        return None

    parts = Parts()
    timed = parts.timed("inside", nothing)

    def caller() -> None:
        for _ in range(num):
            timed()

    def plain() -> None:
        for _ in range(num):
            nothing()

    parts.timed("caller", caller)()
    begin = time.perf_counter_ns()
    plain()
    call = (time.perf_counter_ns() - begin) / num  # it is the part's own, and belongs to the caller only when timed
    return parts._ns["inside"] / num - call, parts._ns["caller"] / num


@contextlib.contextmanager
def time_parts(engine: Engine) -> Iterator[Parts]:
    """Times the engine's parts within the block; the engine is of no use after it."""
    parts = Parts()
    parts.replace("other", engine, "step", "add")
    parts.replace("schedule", engine.scheduler, "schedule", "dispatched", "complete", "finish", "add")
    for cache in engine.caches:
        parts.replace("cache", cache, *"admit extend next_boundary computed release take_moves match".split())
    parts.replace("build", engine.runner, "dispatch")
    parts.replace("device", engine.runner, "launch")
    parts.replace("read", engine.runner, "read")
    text = {name: getattr(Detokenizer, name) for name in ("add", "finish")}
    parts.replace("text", Detokenizer, *text)  # the class, for there is one for each request
    try:
        yield parts
    finally:
        for name, function in text.items():
            setattr(Detokenizer, name, function)
