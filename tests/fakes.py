"""A runner without a device, and engines on it: the next token is the last one + 1, and ids are bytes.

The runner keeps what a device would keep (last tokens, and in `DeviceModel` what every page and STATE slot was computed
from), so a plan that reads a wrong page, copies too late or sends a wrong row fails in `dispatch`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsjax.cache.manager import RequestCache
from dsjax.cache.moves import Arrays, BlobKey, Moves
from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.cache.tiers import Tiers
from dsjax.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, override_all
from dsjax.engine import Engine
from dsjax.request import MAX_LOGPROBS, Request, SamplingParams, TokenEvent
from dsjax.runner.padding import Padding
from dsjax.runner.sampling import Logprobs
from dsjax.scheduler.plan import RowPlan, ShardPlan, StepPlan
from dsjax.scheduler.scheduler import Scheduler
from dsjax.serving_config import TierConfig
from tests.cache.device_model import DeviceModel, prefix_names
from tests.cache.specs import model_config

VOCAB = 256
EOS = 0  # what follows 255
SMALL_CACHE = {"block_size": 8, "prefix_unit_tokens": 8, "snapshot_interval_tokens": 16, "num_snapshots": 16}


class ByteTokenizer:
    """One token a byte."""

    vocab_size = VOCAB
    bos_token_id = None
    eos_token_ids = (EOS,)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return False


class Sent(NamedTuple):
    """One row of a step: what a test compares with."""

    request_id: str
    start: int
    num_new: int
    samples: bool
    shard: int = 0


class FakeOutput(NamedTuple):
    """A step's results. `order` shows that steps are read in the order they were sent."""

    order: int
    tokens: np.ndarray
    logprobs: Logprobs
    prompt_logprobs: Logprobs


class FakeRunner:
    """Stands in for `Runner`. `sent` lists the rows of every step; `fail` makes the next dispatch raise, once."""

    def __init__(self, spec: CacheSpec, max_tokens: int = 1 << 30, num_shards: int = 1):
        self.spec, self.max_tokens, self.num_shards = spec, max_tokens, num_shards
        # of each shard; a DeviceModel wants a spec, and `request` in each step
        self.devices = [DeviceModel(self) for _ in range(num_shards)]  # type: ignore[arg-type]
        self.last_token = np.full((num_shards, spec.num_slots), -1)
        self.sent: list[list[Sent]] = []
        self.num_read = 0
        self.fail: Exception | None = None
        self.padding = Padding()  # it has no buckets: nothing is padded
        self._rows: dict[str, RequestCache] = {}
        self._ends: dict[int, int] = {}  # by the identity of a stay's RequestCache
        self.host_bytes_per_s = 0.0
        self._downloaded: list[tuple[BlobKey, Arrays]] = []
        self._stays: list[RequestCache] = []  # keeps them alive, so that identities are not used again

    def warm_up(self, progress: bool = False) -> None:
        pass

    def request(self, request_id: str) -> RequestCache:
        return self._rows[request_id]

    def dispatch(self, plan: StepPlan) -> FakeOutput:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        assert plan.rows and len(plan.shards) == self.num_shards
        assert len(self.sent) - self.num_read < 2, "more than one step is waiting to be read"
        assert len({row.request.request_id for row in plan.rows}) == len(plan.rows)
        tokens = [token for index, part in enumerate(plan.shards) for token in self._dispatch(index, part)]
        self.sent.append(
            [
                Sent(row.request.request_id, row.start, row.num_new, row.samples, index)
                for index, part in enumerate(plan.shards)
                for row in part.rows
            ]
        )
        return FakeOutput(len(self.sent), np.array(tokens), _no_logprobs(len(tokens)), _no_logprobs(plan.num_tokens))

    def _dispatch(self, index: int, plan: ShardPlan) -> list[int]:
        """Checks and runs one shard's part; returns the token after each row."""
        assert plan.num_tokens <= self.max_tokens
        for row in plan.rows:
            assert row.request.shard == index
            self._check(row)
        self._check_apart(plan.rows)
        self._move(index, plan)
        device, last_token = self.devices[index], self.last_token[index]
        rows, tokens = [], []
        for row in plan.rows:
            known = [*row.request.token_ids, *[int(last_token[row.cache.slot])] * row.request.num_pending]
            assert row.samples == (row.end == len(known)), "a row samples when it reaches its last token"
            rows.append((row.request.request_id, prefix_names(row.request.cache_salt, known), row.start, row.end))
            tokens.append((known[row.end - 1] + 1) % VOCAB)
        device.step(self, rows)  # type: ignore[arg-type]
        for row, token in zip(plan.rows, tokens, strict=True):
            if row.samples:
                last_token[row.cache.slot] = token
        return tokens

    def move(self, plan: StepPlan) -> None:
        for index, part in enumerate(plan.shards):
            self._move(index, part)

    def _move(self, index: int, plan: ShardPlan) -> None:
        self._check_copies(plan)
        self._downloaded += self.devices[index].move(Moves(plan.downloads, plan.copies, plan.uploads))

    def downloaded(self, wait: bool = False) -> list[tuple[BlobKey, Arrays]]:
        arrived, self._downloaded = self._downloaded, []
        return arrived

    def read(self, output: FakeOutput) -> FakeOutput:
        self.num_read += 1
        assert output.order == self.num_read
        return output

    def _check(self, row: RowPlan) -> None:
        cache, request = row.cache, row.request
        assert request.slot == cache.slot and 0 <= cache.slot < self.spec.num_slots
        assert 1 <= row.num_new <= self.spec.max_chunk_tokens
        assert row.end <= request.num_tokens <= request.max_total_tokens
        assert request.num_pending in (0, 1) and row.end - len(request.token_ids) <= request.num_pending
        assert row.first_of_stay == (id(cache) not in self._ends)
        if row.first_of_stay:
            self._stays.append(cache)
        assert row.start == self._ends.get(id(cache), cache.num_cached), "positions of a stay follow one another"
        self._ends[id(cache)] = row.end
        self._rows[request.request_id] = cache

    def _check_apart(self, rows: list[RowPlan]) -> None:
        """No two rows write to one page, and each has a slot of its own."""
        assert len({row.cache.slot for row in rows}) == len(rows)
        written: set[tuple[EntryKind, int]] = set()
        for row in rows:
            pages: set[tuple[EntryKind, int]] = set()
            for kind in self.spec.pool_kinds:
                spec = self.spec.kinds[kind]
                first = row.start if spec.window is not None else max(row.start, row.cache.num_shared)
                for entry in range(spec.num_entries(first), spec.num_entries(row.end)):
                    pages.add((kind, int(row.cache.tables[kind][entry // spec.entries_per_page % spec.table_width])))
            assert not pages & written
            written |= pages

    def _check_copies(self, plan: ShardPlan) -> None:
        for copy in plan.copies:
            is_state = copy.kind is EntryKind.STATE
            limit = self.spec.num_state_slots if is_state else self.spec.kinds[copy.kind].num_pages
            assert 0 <= copy.src < limit and 0 <= copy.dst < limit and copy.src != copy.dst


def _no_logprobs(rows: int) -> Logprobs:
    zeros: Any = np.zeros((rows, MAX_LOGPROBS))
    return Logprobs(zeros[:, 0], zeros[:, 0], zeros, zeros)


def small_spec(
    model: ModelConfig, config: EngineConfig, max_model_len: int, num_pages: dict[EntryKind, int] | None = None
) -> CacheSpec:
    """The cache of an engine in tests; `num_pages` shrinks single pools, to make requests fight for pages."""
    spec = CacheSpec.of(model, config.cache, config.scheduler, max_model_len)
    kinds = dict(spec.kinds)
    for kind, num in (num_pages or {}).items():
        kinds[kind] = dataclasses.replace(kinds[kind], num_pages=num)
        if kind is EntryKind.CSA:
            kinds[EntryKind.INDEX_KEY] = dataclasses.replace(kinds[EntryKind.INDEX_KEY], num_pages=num)
    most = [k.num_pages * k.entries_per_page * k.ratio + k.ratio - 1 for k in kinds.values() if k.window is None]
    return dataclasses.replace(spec, kinds=kinds, max_request_tokens=min(spec.max_request_tokens, *most))


def default_parallel() -> ParallelConfig:
    """The engine tests' mesh: one device, or for a run of the same tests on many what the environment says, such as
    DSJAX_TEST_MESH="mesh=data:2,model:4 kv_parallel=2"."""
    settings = (setting.partition("=") for setting in os.environ.get("DSJAX_TEST_MESH", "").split())
    return override_all(ParallelConfig(), [(name, value) for name, _, value in settings])


def fake_engine(
    *,
    num_shards: int | None = None,
    max_model_len: int = 128,
    num_pages: dict[EntryKind, int] | None = None,
    cache: dict[str, Any] | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = (EOS,),
    clock: Callable[[], float] = time.monotonic,
    config: dict[str, Any] | None = None,
    tiers: Tiers | None = None,
    **scheduler: Any,
) -> Engine:
    """An engine on a FakeRunner (`engine.runner`), by default of as many data shards as the engine tests' mesh has;
    keywords are SchedulerConfig's, `config` has other fields of EngineConfig."""
    engine_config = EngineConfig(
        model="fake",
        cache=CacheConfig(**{**SMALL_CACHE, **(cache or {})}),
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, **scheduler}),
        tiers=TierConfig(host_cache_bytes=tiers.host_bytes if tiers else 0),
        seed=seed,
        **(config or {}),
    )
    model = dataclasses.replace(model_config(), vocab_size=VOCAB, eos_token_ids=eos_token_ids)
    runner: Any = FakeRunner(
        small_spec(model, engine_config, max_model_len, num_pages),
        engine_config.scheduler.max_num_batched_tokens,
        num_shards or default_parallel().data_parallel_size,
    )
    return Engine(
        config=engine_config,
        model_config=model,
        runner=runner,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        clock=clock,
        tiers=tiers,
    )


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    salt: str = "",
    deadline_s: float | None = None,
    priority: int = 0,
    tenant: str = "",
    session_id: str = "",
    **params: Any,
):
    """A greedy request, unless `params` say otherwise."""
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        cache_salt=salt,
        deadline_s=deadline_s,
        priority=priority,
        tenant=tenant,
        session_id=session_id,
    )


def drain(engine: Engine, max_steps: int = 2000, check: bool = True) -> dict[str, list[TokenEvent]]:
    """Steps until nothing is left; events by request id. Fails instead of hanging."""
    events: dict[str, list[TokenEvent]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return events
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        if check:
            check_caches(engine)
    raise AssertionError(f"still at work after {max_steps} steps")


def find_running(engine: Engine, name: str) -> Request | None:
    """The running sequence of a request."""
    return next((r for r in engine.scheduler.running if r.parent_id == name), None)


def preempt(scheduler: Scheduler, request: Request) -> None:
    """What `schedule` does to a running request where pages are missing."""
    scheduler.shards[request.shard].preempt(request)
    scheduler._requeue(request)


def tokens_of(events: Sequence[TokenEvent], index: int = 0) -> list[int]:
    """All output ids of one sequence."""
    return [token for event in events if event.index == index for token in event.token_ids]


def assert_idle(engine: Engine) -> None:
    """Nothing is held: pages, slots and gauges."""
    stats = engine.stats()
    assert not engine.has_work()
    assert (stats.num_waiting, stats.num_running, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_pages_free + stats.num_pages_cached == stats.num_pages_total
    assert [cache.num_free_slots for cache in engine.caches] == [engine.runner.spec.num_slots] * len(engine.caches)
    check_caches(engine)


def check_caches(engine: Engine) -> None:
    """Every page and slot of every data shard is accounted for once."""
    for cache in engine.caches:
        cache.check()
    if engine.tiers.tiers is not None:
        engine.tiers.tiers.check()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now_s: float = 0.0):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
