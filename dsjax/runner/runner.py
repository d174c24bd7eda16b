"""Owns the device arrays; compiles the step for every bucket and dispatches plans."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from tqdm import tqdm

from dsjax import sharding
from dsjax.axes import DATA
from dsjax.cache.moves import Arrays, BlobKey
from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.cache.state import CacheState
from dsjax.config import ModelConfig, SchedulerConfig
from dsjax.runner import sampling, step
from dsjax.runner.batch import Layout, pack
from dsjax.runner.buckets import Bucket, Buckets, ladder
from dsjax.runner.compiles import COMPILES
from dsjax.runner.output import DeviceOutput, Sent, StepOutput
from dsjax.runner.padding import Padding
from dsjax.runner.program_cache import ProgramCache
from dsjax.runner.sampling import SlotParams, SlotTables
from dsjax.runner.transfers import DOWNLOAD, Arriving, Transfers, parse
from dsjax.scheduler.plan import RowPlan, Rows, StepPlan
from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.target import Target

log = logging.getLogger("dsjax")

SET_SLOT = "set a slot's sampling tables"
Program = Bucket | int | str  # a step's bucket, a number of pages to copy, SET_SLOT, or one of `transfers.py`


class Runner:
    """The device side of the engine, on a mesh of any size.

    `params` lie on the mesh (`sharding.Placement`); `config` is the model of one pipeline stage, `active` says
    which of its layers each stage has. `all_logits` makes every step return the logits of all its tokens (for
    verification, not for serving). `target` says whose kernels the programs use, by default those of the mesh's
    devices. `host_cache_dtype` is that of the cache's tiers; "" is for an engine without them. `program_dir` keeps the
    compiled programs of an engine with one process. `on_launch` is called with every program and its host arrays just
    before it is run here, `on_read` with a step's results before they are waited for. An `abstract` runner has shapes
    instead of arrays: it lowers programs and runs none.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        graph: nnx.GraphDef,
        params: nnx.State,
        spec: CacheSpec,
        scheduler: SchedulerConfig,
        mesh: Mesh,
        dtype: jnp.dtype,
        active: tuple[tuple[bool, ...], ...] = (),
        num_microbatches: int = 1,
        all_logits: bool = False,
        fail_on_recompile: bool = False,
        fill: float = 0.0,
        abstract: bool = False,
        target: Target | None = None,
        host_cache_dtype: str = "",
        program_dir: Path | None = None,
        on_launch: Callable[[Program, Sequence[np.ndarray]], None] | None = None,
        on_read: Callable[[DeviceOutput], None] | None = None,
    ):
        self.config, self.spec, self.params, self.mesh = config, spec, params, mesh
        self.active, self.num_microbatches = active, num_microbatches
        self.all_logits, self.fail_on_recompile = all_logits, fail_on_recompile
        self.on_launch, self.on_read = on_launch, on_read
        self.target = target or Target.of(mesh.devices.flat[0])
        # One bfloat16 row takes a scalar path in XLA's CPU matmul, 10 times slower than two rows; native code does not.
        self.buckets = Buckets(scheduler, min_rows=1 + (dtype == jnp.bfloat16 and not self.target.has_native_kernels))
        self.num_pages = {kind: kind_spec.num_pages for kind, kind_spec in spec.kinds.items()}
        self._by_shard = sharding.by_shard(mesh)
        tables = self.num_shards * spec.num_slots, config.vocab_size, self._by_shard
        if abstract:
            self.cache, self.slots = CacheState.abstract(spec, config, mesh), SlotTables.abstract(*tables)
        else:
            self.cache = CacheState.create(spec, config, fill, mesh)
            self.slots = SlotTables.create(*tables)
        self.padding = Padding()
        self.transfers = Transfers(spec, mesh, host_cache_dtype) if host_cache_dtype else None
        self._arriving = Arriving()
        self._slot_params = [SlotParams(spec.num_slots) for _ in range(self.num_shards)]
        self._graph = graph
        # A step gets them as a flat list: JAX asks every variable of a state for its parts, at every call.
        self._weights, self._tree = jax.tree.flatten(params)
        self._layouts = {bucket: Layout(bucket, spec) for bucket in self.buckets}
        self._programs: dict[Program, jax.stages.Compiled] = {}
        facts = config, spec, active, num_microbatches, all_logits, self.target, dict(mesh.shape), host_cache_dtype
        self._kept = ProgramCache(program_dir, list(mesh.devices.flat), facts) if program_dir else None
        self._warm = False

    @functools.cached_property
    def num_shards(self) -> int:
        return self.mesh.shape[DATA]

    # --- compiling -----------------------------------------------------------------------------

    @functools.cached_property
    def copy_sizes(self) -> list[int]:
        """Copies of a kind that one call does, never more than three a row slot. A call moves as many pages as it has
        places for, so the sizes are close."""
        return ladder(4, max(8, 3 * self.spec.num_slots), 4)

    @property
    def copy_kinds(self) -> tuple[EntryKind, ...]:
        return (*self.spec.pool_kinds, EntryKind.STATE)

    def warm_up(self, progress: bool = False) -> None:
        """Loads or compiles everything a step can need, one program a core at a time; nothing compiles later."""
        start = time.monotonic()
        keys: list[Program] = [*self.buckets, *self.copy_sizes, SET_SLOT]
        keys += self.transfers.programs if self.transfers else []
        keys = [key for key in keys if key not in self._programs]
        with (
            tqdm(total=len(keys), desc="compiling", unit="program", disable=not progress) as bar,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            for key, program in zip(keys, pool.map(self._load, keys), strict=True):
                if program is not None:
                    self._programs[key] = program
                    bar.update()
            missing = [key for key in keys if key not in self._programs]
            compiling = {pool.submit(self._compile, key, self.lower(key)): key for key in missing}
            for done in as_completed(compiling):
                self._programs[compiling[done]] = done.result()
                bar.update()
        if self._kept:
            self._kept.trim()
        self._warm = True
        COMPILES.mark_warm()
        took, loaded = time.monotonic() - start, len(keys) - len(missing)
        log.info("warm after %.1f s: %d step shapes, %d programs loaded", took, len(self.buckets), loaded)

    def _program(self, key: Program) -> jax.stages.Compiled:
        if key not in self._programs:
            if self._warm and self.fail_on_recompile:
                raise RuntimeError(f"fail_on_recompile: {key} is not among the programs compiled at warm-up")
            self._programs[key] = self._load(key) or self._compile(key, self.lower(key))
        return self._programs[key]

    def _path(self, kept: ProgramCache, key: Program) -> Path:
        facts: list[object] = [key]
        if isinstance(key, Bucket):
            facts += [self._graph, self._tree, [(x.shape, x.dtype, x.sharding) for x in self._weights]]
        return kept.path(facts)

    def _load(self, key: Program) -> jax.stages.Compiled | None:
        return self._kept.load(self._path(self._kept, key)) if self._kept else None

    def _compile(self, key: Program, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        before = COMPILES.num_loaded_here
        program = lowered.compile()
        # A program that JAX's own cache had, where that is turned on, XLA's CPU writes without some of its functions.
        if self._kept and COMPILES.num_loaded_here == before:
            self._kept.save(self._path(self._kept, key), program)
        return program

    def program_text(self, key: Program) -> str:
        """The compiled program, as XLA prints it."""
        return self._program(key).as_text() or ""

    def lower(self, key: Program) -> jax.stages.Lowered:
        """A program as JAX lowered it; arrays need only be abstract."""
        pages = tuple(self.num_pages.items())
        if isinstance(key, Bucket):
            layout, m = self._layouts[key], self.num_microbatches
            static = step.StepConfig(self._graph, self._tree, layout, pages, self.active, self.all_logits, self.target)
            function = functools.partial(step.step, static)
            sent = self._sent(jnp.int32, m, layout.num_ints), self._sent(jnp.float32, m, layout.num_floats)
            return self._lower(function, (self._weights,), (self.cache, self.slots), sent, with_output=True)
        if isinstance(key, int):
            kinds = self.copy_kinds
            function = functools.partial(step.copy_pages, pages, self.spec.num_state_slots, kinds=kinds)
            return self._lower(function, (), (self.cache,), (self._sent(jnp.int32, len(kinds), 2, key),))
        if self.transfers and key != SET_SLOT:
            return self.transfers.lower(key, self.cache)
        vocab = self.config.vocab_size
        sent = self._sent(jnp.int32), self._sent(jnp.int32, vocab), self._sent(jnp.float32, vocab)
        return self._lower(step.write_slot, (), (self.slots,), sent)

    def _sent(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        """What the host sends: a part for each data shard."""
        return jax.ShapeDtypeStruct((self.num_shards, *shape), dtype, sharding=self._by_shard)

    def _lower(self, function, kept: tuple, donated: tuple, sent: tuple, with_output: bool = False):
        """Lowers function(*kept, *donated, *sent) -> donated, updated (and replicated output)."""
        args = (*kept, *donated, *sent)
        specs = jax.tree.map(lambda x: x.sharding.spec, args)
        updated = specs[len(kept) : len(kept) + len(donated)]
        out_specs = (*updated, PartitionSpec()) if with_output else updated[0]
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        numbers = tuple(range(len(kept), len(kept) + len(donated)))
        return jax.jit(mapped, donate_argnums=numbers).lower(*args)

    # --- running -------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> Sent:
        """Sends a plan to the devices and returns at once; results are read later."""
        self.move(plan)
        for shard, (part, slots) in enumerate(zip(plan.shards, self._slot_params, strict=True)):
            for r in slots.begin(part.rows):
                self._prepare_slot(shard, part.rows[r])
        batches = [self._microbatches(part.rows) for part in plan.shards]
        sizes = tuple(tuple((len(rows), rows.num_tokens) for rows in shard) for shard in batches)
        bucket = self.buckets.choose([size for shard in sizes for size in shard])
        self.padding.add(bucket, self.num_shards * self.num_microbatches, plan.num_tokens)
        layout = self._layouts[bucket]
        by_shard = zip(batches, self._slot_params, strict=True)
        host = [[pack(layout, rows, slots) for rows in shard] for shard, slots in by_shard]
        ints = _stack([[batch.ints for batch in shard] for shard in host])
        floats = _stack([[batch.floats for batch in shard] for shard in host])
        if len(host) * self.num_microbatches > 1:
            flags = layout.flags(ints)
            flags[...] = flags.max(axis=(0, 1))  # all devices take the same branches, some of which hold collectives
        output = self.launch(bucket, (ints, floats))
        assert isinstance(output, DeviceOutput)
        return Sent(output, bucket, self.config.vocab_size, sizes)

    def _microbatches(self, rows: Rows) -> list[Rows]:
        """A shard's rows in `num_microbatches` runs of about as many tokens, some perhaps empty."""
        if self.num_microbatches == 1:
            return [rows]
        middle = np.cumsum(rows.num_new) - rows.num_new / 2
        batch = (middle * self.num_microbatches / max(rows.num_tokens, 1)).astype(int)
        cuts = np.searchsorted(batch, range(self.num_microbatches + 1))
        return [rows[begin:end] for begin, end in pairwise(cuts.tolist())]

    def move(self, plan: StepPlan) -> None:
        """Sends a plan's moves (`cache/moves.py`) alone; `dispatch` does so first."""
        if any(part.downloads for part in plan.shards):
            assert self.transfers is not None
            for name, index, tickets in self.transfers.download_calls([part.downloads for part in plan.shards]):
                self._arriving.add(self.launch(name, (index,)), tickets)  # type: ignore[arg-type]
        self._run_copies(plan)
        if any(part.uploads for part in plan.shards):
            assert self.transfers is not None
            for name, arrays in self.transfers.upload_calls([part.uploads for part in plan.shards], self.cache):
                self.launch(name, arrays)

    def downloaded(self, wait: bool = False) -> list[tuple[BlobKey, Arrays]]:
        """The downloads that have arrived since the last call, in order; with `wait` all that were sent."""
        return self._arriving.take(wait)

    @property
    def host_bytes_per_s(self) -> float:
        """How fast the latest download came; 0 before the first."""
        return self._arriving.bytes_per_s

    def launch(self, key: Program, arrays: Sequence[np.ndarray]) -> DeviceOutput | tuple[jax.Array, ...] | None:
        """Runs a program on host arrays; the device arrays it updates stay here. All device work goes through this,
        in one order, so that other processes can do the same."""
        if self.on_launch is not None:
            self.on_launch(key, arrays)
        program = self._program(key)
        if self.transfers and isinstance(key, str) and key != SET_SLOT:
            direction, kind = parse(key)
            kept = self.transfers.kept(self.cache, kind)
            sent = jax.device_put(list(arrays), self.transfers.shardings(key, self.cache))
            if direction == DOWNLOAD:
                return program(kept, *sent)
            self.cache = self.transfers.replaced(self.cache, kind, program(kept, *sent))
            return None
        sent = self._to_devices(arrays)
        with jax.transfer_guard_host_to_device("allow"):  # of what is sent
            if isinstance(key, Bucket):
                self.cache, self.slots, output = program(self._weights, self.cache, self.slots, *sent)
                return output
            if isinstance(key, int):
                self.cache = program(self.cache, *sent)
            else:
                self.slots = program(self.slots, *sent)
        return None

    def _to_devices(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray | jax.Array]:
        """What a program takes. Of one process it takes the host's arrays, and sends them itself: in half the time."""
        if jax.process_count() == 1:
            return arrays
        return [jax.make_array_from_callback(x.shape, self._by_shard, lambda index, x=x: x[index]) for x in arrays]

    def read(self, sent: Sent) -> StepOutput:
        """Waits for a step's results and brings them to the host: rows and tokens in the order of the plan."""
        if self.on_read is not None:
            self.on_read(sent.output)
        return StepOutput(sent)

    def _run_copies(self, plan: StepPlan) -> None:
        if not any(part.copies for part in plan.shards):
            return
        columns: dict[tuple[int, EntryKind], list[tuple[int, int]]] = {}
        for shard, part in enumerate(plan.shards):
            for copy in part.copies:
                columns.setdefault((shard, copy.kind), []).append((copy.src, copy.dst))
        most = max(map(len, columns.values()))
        size = next(size for size in self.copy_sizes if size >= most)
        pairs = np.full((self.num_shards, len(self.copy_kinds), 2, size), NOWHERE, np.int32)
        for (shard, kind), some in columns.items():
            pairs[shard, self.copy_kinds.index(kind), :, : len(some)] = np.transpose(some)
        self.launch(size, (pairs,))

    def _prepare_slot(self, shard: int, row: RowPlan) -> None:
        """Uploads a request's token counts and logit bias when it takes a slot, or when its min_tokens are reached."""
        request, params = row.request, row.request.params
        # Output tokens before the one drawn next: a stay begins with all that are known, in one chunk or several.
        drawn = request.num_output_tokens if row.first_of_stay else row.end - request.num_prompt_tokens
        released = row.samples and params.min_tokens > 0 and drawn == params.min_tokens
        if not ((row.first_of_stay and (sampling.has_penalties(params) or sampling.has_bias(params))) or released):
            return
        vocab = self.config.vocab_size
        if row.first_of_stay:
            counts = np.bincount(request.token_ids[request.num_prompt_tokens :], minlength=vocab).astype(np.int32)
            counts[np.unique(request.prompt_token_ids)] |= sampling.PROMPT_BIT
        else:
            counts = np.full(vocab, step.KEEP, np.int32)
        values = np.zeros(vocab, np.float32)
        for token, value in params.logit_bias.items():
            values[token] = value
        if drawn < params.min_tokens:
            values[list(request.stop_ids)] = -np.inf
        slot = np.full(self.num_shards, NOWHERE, np.int32)
        slot[shard] = row.cache.slot
        parts = (self.num_shards, vocab)
        self.launch(SET_SLOT, (slot, np.broadcast_to(counts, parts), np.broadcast_to(values, parts)))


def _stack(arrays: list[list[np.ndarray]]) -> np.ndarray:
    """[data shards, micro-batches, n]; not a copy where there is one."""
    if len(arrays) == len(arrays[0]) == 1:
        return arrays[0][0][None, None]
    return np.stack([np.stack(shard) for shard in arrays])
