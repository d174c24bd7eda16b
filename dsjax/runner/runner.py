"""Owns the device arrays; compiles the step for every bucket and dispatches plans."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from dsjax.cache.spec import CacheSpec, Copy, EntryKind
from dsjax.cache.state import CacheState
from dsjax.config import ModelConfig, SchedulerConfig
from dsjax.model import paged
from dsjax.runner import sampling
from dsjax.runner.batch import HostBatch, Layout, pack, unpack
from dsjax.runner.buckets import Bucket, Buckets
from dsjax.runner.compiles import COMPILES
from dsjax.runner.sampling import Logprobs, SlotTables
from dsjax.scheduler.plan import StepPlan
from pallas_kernels.cache_write import NOWHERE

log = logging.getLogger("dsjax")

_SET_SLOT = "set a slot's sampling tables"
_Program = Bucket | int | str  # a step's bucket, a number of pages to copy, or _SET_SLOT


class StepOutput(NamedTuple):
    """A step's results, on the device until `Runner.read`. Rows are in the plan's order, then padding."""

    tokens: jax.Array  # [R] int32, meaningful where the row samples
    logprobs: Logprobs  # [R]
    prompt_logprobs: Logprobs  # [T]
    logits: jax.Array | None  # [T, V] float32 with all_logits
    draft_logits: jax.Array | None  # [T, V] float32 with all_logits, of a model loaded with its MTP block


class Runner:
    """One device's share of the engine.

    `all_logits` makes every step return the logits of all its tokens (for verification, not for serving).
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        graph: nnx.GraphDef,
        params: nnx.State,
        spec: CacheSpec,
        scheduler: SchedulerConfig,
        dtype: jnp.dtype,
        cache_dtype: jnp.dtype | None = None,
        all_logits: bool = False,
        fail_on_recompile: bool = False,
        fill: float = 0.0,
    ):
        self.config, self.spec, self.graph, self.params = config, spec, graph, params
        self.num_shards = 1  # data shards
        self.all_logits, self.fail_on_recompile = all_logits, fail_on_recompile
        # One bfloat16 row takes a scalar path in XLA's CPU matmul, 10 times slower than two rows.
        self.buckets = Buckets(scheduler, min_rows=2 if dtype == jnp.bfloat16 else 1)
        self.num_pages = {kind: kind_spec.num_pages for kind, kind_spec in spec.kinds.items()}
        self.cache = CacheState.create(spec, config, cache_dtype or dtype, fill)
        self.slots = SlotTables.create(spec.num_slots, config.vocab_size)
        self._layouts = {bucket: Layout(bucket, spec) for bucket in self.buckets}
        self._programs: dict[_Program, jax.stages.Compiled] = {}
        self._warm = False

    # --- compiling -----------------------------------------------------------------------------

    @property
    def copy_sizes(self) -> tuple[int, int]:
        """Copies of a kind that one call does: few in most plans; never more than three a row slot."""
        return 4, max(8, 3 * self.spec.num_slots)

    def warm_up(self, progress: bool = False) -> None:
        """Compiles everything a step can need, one program a core at a time; nothing compiles later."""
        start = time.monotonic()
        keys: list[_Program] = [*self.buckets, *self.copy_sizes, _SET_SLOT]
        with (
            tqdm(total=len(keys), desc="compiling", unit="program", disable=not progress) as bar,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            compiling = {pool.submit(self._lower(key).compile): key for key in keys if key not in self._programs}
            bar.update(len(keys) - len(compiling))
            for done in as_completed(compiling):
                self._programs[compiling[done]] = done.result()
                bar.update()
        self._warm = True
        COMPILES.mark_warm()
        log.info("warm after %.1f s: %d step shapes", time.monotonic() - start, len(self.buckets))

    def _program(self, key: _Program) -> jax.stages.Compiled:
        if key not in self._programs:
            if self._warm and self.fail_on_recompile:
                raise RuntimeError(f"fail_on_recompile: {key} is not among the programs compiled at warm-up")
            self._programs[key] = self._lower(key).compile()
        return self._programs[key]

    def _lower(self, key: _Program) -> jax.stages.Lowered:
        pages = tuple(self.num_pages.items())
        if isinstance(key, Bucket):
            layout = self._layouts[key]
            function = functools.partial(_step, self.graph, self.config, layout, pages, self.all_logits)
            ints = jax.ShapeDtypeStruct((layout.num_ints,), jnp.int32)
            floats = jax.ShapeDtypeStruct((layout.num_floats,), jnp.float32)
            return jax.jit(function, donate_argnums=(1, 2)).lower(self.params, self.cache, self.slots, ints, floats)
        if isinstance(key, int):
            kinds = (*self.spec.pool_kinds, EntryKind.STATE)
            pairs = {kind: jax.ShapeDtypeStruct((2, key), jnp.int32) for kind in kinds}
            function = functools.partial(_copy_pages, pages, self.spec.num_state_slots)
            return jax.jit(function, donate_argnums=(0,)).lower(self.cache, pairs)
        vocab = self.config.vocab_size
        return jax.jit(_write_slot, donate_argnums=(0,)).lower(
            self.slots,
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((vocab,), jnp.int32),
            jax.ShapeDtypeStruct((vocab,), jnp.float32),
        )

    # --- running -------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> StepOutput:
        """Sends a plan to the device and returns at once; results are read later."""
        self._run_copies(plan.shards[0].copies)
        for row in plan.rows:
            self._prepare_slot(row)
        bucket = self.buckets.choose([row.num_new for row in plan.rows])
        host: HostBatch = pack(self._layouts[bucket], plan)
        self.cache, self.slots, output = self._program(bucket)(
            self.params, self.cache, self.slots, host.ints, host.floats
        )
        return output

    def read(self, output: StepOutput) -> StepOutput:
        """Waits for a step's results and brings them to the host as numpy arrays."""
        return jax.tree.map(np.asarray, output)

    def _run_copies(self, copies: Sequence[Copy]) -> None:
        if not copies:
            return
        by_kind: dict[EntryKind, list[Copy]] = {kind: [] for kind in (*self.spec.pool_kinds, EntryKind.STATE)}
        for copy in copies:
            by_kind[copy.kind].append(copy)
        most = max(map(len, by_kind.values()))
        size = next(size for size in self.copy_sizes if size >= most)
        pairs = {kind: np.full((2, size), NOWHERE, np.int32) for kind in by_kind}
        for kind, some in by_kind.items():
            pairs[kind][:, : len(some)] = [[c.src for c in some], [c.dst for c in some]]
        self.cache = self._program(size)(self.cache, pairs)

    def _prepare_slot(self, row) -> None:
        """Uploads a request's token counts and logit bias when it takes a slot, or when its min_tokens are reached."""
        request, params = row.request, row.request.params
        penalties, bias = sampling.has_penalties(params), sampling.has_bias(params)
        # Output tokens before the one drawn next: a stay begins with all that are known, in one chunk or several.
        drawn = request.num_output_tokens if row.first_of_stay else row.end - request.num_prompt_tokens
        released = row.samples and params.min_tokens > 0 and drawn == params.min_tokens
        if not ((row.first_of_stay and (penalties or bias)) or released):
            return
        vocab = self.config.vocab_size
        if row.first_of_stay:
            counts = np.bincount(request.token_ids[request.num_prompt_tokens :], minlength=vocab).astype(np.int32)
            counts[np.unique(request.prompt_token_ids)] |= sampling.PROMPT_BIT
        else:
            counts = np.full(vocab, KEEP, np.int32)
        values = np.zeros(vocab, np.float32)
        for token, value in params.logit_bias.items():
            values[token] = value
        if drawn < params.min_tokens:
            values[list(request.stop_ids)] = -np.inf
        self.slots = self._program(_SET_SLOT)(self.slots, np.int32(row.cache.slot), counts, values)


KEEP = -1  # in uploaded counts: leave the device's count, which is ahead of the host's


@jax.default_matmul_precision("highest")  # see model/param.py
def _step(
    graph: nnx.GraphDef,
    config: ModelConfig,
    layout: Layout,
    num_pages: tuple[tuple[EntryKind, int], ...],
    all_logits: bool,
    params: nnx.State,
    cache: CacheState,
    slots: SlotTables,
    ints: jax.Array,
    floats: jax.Array,
) -> tuple[CacheState, SlotTables, StepOutput]:
    """The compiled step: unpack, run the network, sample."""
    model = nnx.merge(graph, params)
    # The barrier makes the arrays once; else every fusion that reads one cuts it out of the vector again.
    batch, sampler = jax.lax.optimization_barrier(unpack(layout, ints, floats, slots.last_token))
    streams, cache = paged.forward(model, batch, cache, dict(num_pages))
    with jax.named_scope("sample"):
        logits = model.logits(jnp.take(streams, batch.row_last, axis=1, mode="clip"))
        tokens, logprobs, slots = sampling.sample(logits, sampler, slots)
        prompt = sampling.prompt_logprobs(streams, sampler, model.logits, config.vocab_size)
    every = drafts = None
    if all_logits:
        every = model.logits(streams)
        if hasattr(model, "mtp"):
            drawn = sampler.token_is_last & sampler.samples[sampler.token_row]
            following = jnp.where(drawn, tokens[sampler.token_row], sampler.next_token)
            drafts, cache = paged.draft(model, streams, following, batch, cache, dict(num_pages))
    return cache, slots, StepOutput(tokens, logprobs, prompt, every, drafts)


def _copy_pages(
    num_pages: tuple[tuple[EntryKind, int], ...],
    num_state_slots: int,
    cache: CacheState,
    pairs: dict[EntryKind, jax.Array],  # [2, n]: sources, destinations; NOWHERE for none
) -> CacheState:
    """Copies pages and STATE slots of every layer; all sources are read before any destination is written."""

    def copy(array: jax.Array, per_layer: int, pair: jax.Array) -> jax.Array:
        offset = jnp.arange(array.shape[0] // per_layer)[:, None] * per_layer
        moved = jnp.take(array, jnp.minimum(pair[0], per_layer - 1) + offset, axis=0)
        return array.at[pair[1] + offset].set(moved, mode="drop")

    pages = dict(num_pages)
    pools = {
        kind: copy(pool, pages[kind], pairs[EntryKind.CSA if kind is EntryKind.INDEX_KEY else kind])
        for kind, pool in cache.pools.items()
    }
    states = {kind: copy(state, num_state_slots, pairs[EntryKind.STATE]) for kind, state in cache.states.items()}
    return CacheState(pools, states)


def _write_slot(slots: SlotTables, slot: jax.Array, counts: jax.Array, bias: jax.Array) -> SlotTables:
    counts = jnp.where(counts == KEEP, slots.counts[slot], counts)
    return slots._replace(counts=slots.counts.at[slot].set(counts), bias=slots.bias.at[slot].set(bias))
