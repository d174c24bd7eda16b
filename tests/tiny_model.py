"""A random model of a few thousand weights on a real runner, shared by all tests of a session: compiling is what costs.

Pools are filled with NaN for every engine, so that a read of something unwritten shows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.models import MODELS
from dsjax.cache.moves import Arrays, BlobKey
from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.cache.state import CacheState
from dsjax.cache.tiers import Tiers
from dsjax.config import CacheConfig, EngineConfig, LayerKind, ModelConfig, ParallelConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.load import make_runner
from dsjax.model.build import abstract, assemble
from dsjax.runner.batch import Layout
from dsjax.runner.buckets import Bucket
from dsjax.runner.output import Sent, StepOutput
from dsjax.runner.padding import Padding
from dsjax.runner.runner import Runner
from dsjax.runner.sampling import SlotTables
from dsjax.runner.transfers import Transfers
from dsjax.scheduler.plan import StepPlan
from dsjax.serving_config import TierConfig
from dsjax.sharding import by_shard
from tests.fakes import SMALL_CACHE, default_parallel, drain, request, small_spec, tokens_of

MAX_MODEL_LEN, MAX_SEQS, MAX_TOKENS = 128, 64, 64
# Fewer shapes than the grid, so that little is compiled; rows are padded by none to 62 all the same.
DECODE = [Bucket(1, 1, 1), Bucket(8, 8, 1), Bucket(64, 64, 1)]
MIXED = [Bucket(64, 64, 16)]


@functools.cache
def tiny_config() -> ModelConfig:
    """A layer of each kind; window 8, CSA 4, HCA 8, top-k 2."""
    kinds = (LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA)
    return dataclasses.replace(MODELS["tiny-mixed"](), layer_kinds=kinds, num_nextn_predict_layers=0)


@functools.cache
def tiny_params() -> dict[str, np.ndarray]:
    """Random weights that spread the logits: greedy answers differ between prompts and do not repeat one token."""
    config, rng = tiny_config(), np.random.default_rng(0)
    _, shapes = abstract(config, jnp.dtype("float32"), with_mtp=False)
    params: dict[str, np.ndarray] = {}
    for path, leaf in nnx.to_flat_state(shapes):
        name, shape = ".".join(map(str, path)), leaf.shape
        if name.endswith("tid2eid"):
            params[name] = rng.permuted(np.tile(np.arange(config.n_routed_experts), (shape[0], 1)), axis=1)[
                :, : shape[1]
            ]
        elif name.endswith("norm.scale"):
            params[name] = rng.uniform(0.5, 1.5, shape)
        else:
            fan_in = shape[-2] if len(shape) > 1 and "embedding" not in name else 1
            params[name] = rng.normal(0, 2 / math.sqrt(fan_in), shape)
    return params


def tiny_weights() -> tuple[nnx.GraphDef, nnx.State]:
    """The model on one device, for its whole-sequence forward."""
    return assemble(tiny_config(), tiny_params(), jnp.dtype("float32"), with_mtp=False)


def new_runner(parallel: ParallelConfig | None = None, dtype: str = "float32", **options: Any) -> Runner:
    """A runner with nothing compiled, by default on the mesh that DSJAX_TEST_MESH names."""
    parallel = parallel or default_parallel()
    block_size = SMALL_CACHE["block_size"] // parallel.kv_parallel
    runner, _ = make_runner(
        tiny_config(),
        lambda *_: tiny_params(),
        cache=CacheConfig(**{**SMALL_CACHE, "num_snapshots": 64, "block_size": block_size}),
        scheduler=SchedulerConfig(
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_MODEL_LEN
        ),
        parallel=parallel,
        dtype=dtype,
        all_logits=True,
        fail_on_recompile=True,
        fill=math.nan,
        **options,
    )
    runner.buckets.decode, runner.buckets.mixed = DECODE, MIXED
    runner._layouts = {bucket: Layout(bucket, runner.spec) for bucket in runner.buckets}
    return runner


@functools.cache
def tiny_runner() -> Runner:
    """The one runner, warm."""
    runner = new_runner()
    runner.warm_up()
    return runner


@functools.cache
def tiny_transfers(host_cache_dtype: str) -> tuple[Transfers, dict[str, jax.stages.Compiled]]:
    """What the shared runner would have with tiers, and its programs."""
    runner = tiny_runner()
    transfers = Transfers(runner.spec, runner.mesh, host_cache_dtype)
    return transfers, {name: transfers.lower(name, runner.cache).compile() for name in transfers.programs}


class TinyRunner:
    """The shared runner with a cache of its own size. `logits` keeps those of every request by position."""

    def __init__(self, spec: CacheSpec, host_cache_dtype: str = ""):
        self.runner, self.spec = tiny_runner(), spec
        self.transfers, self.programs = tiny_transfers(host_cache_dtype) if host_cache_dtype else (None, {})
        self.host_bytes_per_s = 1e9
        self._arrived: list[tuple[BlobKey, Arrays]] = []
        self.num_shards, self.padding = self.runner.num_shards, Padding()
        whole = self.runner.spec
        assert spec.num_state_slots <= whole.num_state_slots
        for kind, k in spec.kinds.items():
            assert (k.table_width, k.entries_per_page) == (
                whole.kinds[kind].table_width,
                whole.kinds[kind].entries_per_page,
            )
            assert k.num_pages <= whole.kinds[kind].num_pages
        mesh = self.runner.mesh
        self.cache = CacheState.create(whole, self.runner.config, math.nan, mesh)
        num_slots = self.num_shards * whole.num_slots
        shapes = SlotTables.create(num_slots, self.runner.config.vocab_size, by_shard(mesh))
        self.slots = jax.tree.map(lambda x: jnp.full_like(x, 77), shapes)  # another's leftovers
        self.logits: dict[str, dict[int, np.ndarray]] = {}
        self.num_steps = 0

    def warm_up(self, progress: bool = False) -> None:
        pass

    def dispatch(self, plan: StepPlan) -> tuple[list[tuple[str, int, int]], Sent]:
        self.num_steps += 1
        rows = [(row.request.request_id, row.start, row.num_new) for row in plan.rows]
        return rows, self._run(lambda runner: runner.dispatch(plan))

    def _run(self, use: Callable[[Runner], Any]) -> Any:
        runner = self.runner  # other engines use it in between
        runner.cache, runner.slots, runner.transfers = self.cache, self.slots, self.transfers
        runner._programs.update(self.programs)
        result = use(runner)
        self.cache, self.slots = runner.cache, runner.slots
        self._arrived += runner.downloaded(wait=True)
        return result

    def move(self, plan: StepPlan) -> None:
        self._run(lambda runner: runner.move(plan))

    def downloaded(self, wait: bool = False) -> list[tuple[BlobKey, Arrays]]:
        """All that were sent: tests do not depend on time."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def read(self, sent: tuple[list[tuple[str, int, int]], Sent]) -> StepOutput:
        rows, output = sent
        output = self.runner.read(output)
        assert output.logits is not None
        token = 0
        for request_id, start, num_new in rows:
            part = np.array(output.logits[token : token + num_new])
            assert np.isfinite(part).all(), f"{request_id}: positions {start}.. read something unwritten"
            self.logits.setdefault(request_id, {}).update(enumerate(part, start))
            token += num_new
        return output


def tiny_engine(
    *,
    num_pages: dict[EntryKind, int] | None = None,
    cache: dict[str, Any] | None = None,
    tokenizer: Any = None,
    eos_token_ids: tuple[int, ...] = (),
    tiers: Tiers | None = None,
    host_cache_dtype: str = "auto",
    **scheduler: Any,
) -> Engine:
    """An engine with an empty cache on the shared runner (`engine.runner`); keywords are SchedulerConfig's."""
    config = EngineConfig(
        model="tiny",
        cache=CacheConfig(**{**SMALL_CACHE, "num_snapshots": 32, **(cache or {})}),
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler}),
        tiers=TierConfig(host_cache_bytes=tiers.host_bytes if tiers else 0),
    )
    model = dataclasses.replace(tiny_config(), eos_token_ids=eos_token_ids)
    spec = small_spec(model, config, MAX_MODEL_LEN, num_pages)
    whole = tiny_runner().spec
    kinds = {
        kind: dataclasses.replace(
            k,
            table_width=whole.kinds[kind].table_width,
            num_pages=min(k.num_pages, whole.kinds[kind].num_pages),
        )
        for kind, k in spec.kinds.items()
    }
    # Snapshots' STATE slots come after the row slots: as many as the shared arrays have.
    runner: Any = TinyRunner(dataclasses.replace(spec, kinds=kinds), host_cache_dtype if tiers else "")
    return Engine(
        config=config,
        model_config=model,
        runner=runner,
        tokenizer=tokenizer,
        max_model_len=MAX_MODEL_LEN,
        tiers=tiers,
    )


def solo(prompt: list[int], num_tokens: int, **params: Any) -> list[int]:
    """The tokens of a request that is alone in a fresh engine, its prompt in one chunk."""
    return list(_solo(tuple(prompt), num_tokens, tuple(sorted(params.items()))))


@functools.cache
def _solo(prompt: tuple[int, ...], num_tokens: int, params: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    engine = tiny_engine(max_num_seqs=1, cache={"enable_prefix_caching": False})
    engine.add(request("solo", prompt, max_tokens=num_tokens, **dict(params)))
    return tuple(tokens_of(drain(engine)["solo"]))


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng([seed, length]).integers(1, tiny_config().vocab_size, length).tolist()
