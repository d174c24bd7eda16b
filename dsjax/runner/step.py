"""The compiled programs: one engine step, copies of pages, a slot's sampling tables.

Each runs on every device of the mesh on that device's part of the arrays (`jax.shard_map`). What the host sends has the
data shard as its leading axis, of which a device sees one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.axes import DATA, STAGE
from dsjax.cache.spec import EntryKind
from dsjax.cache.state import CacheState
from dsjax.model import paged
from dsjax.model.batch import ForwardBatch
from dsjax.model.transformer import Transformer
from dsjax.runner import output, sampling
from dsjax.runner.batch import Layout, unpack
from dsjax.runner.output import DeviceOutput
from dsjax.runner.sampling import SamplingBatch, SlotTables
from pallas_kernels import collectives
from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.target import Target, traced_for

KEEP = -1  # in uploaded counts: leave the device's count, which is ahead of the host's


class StepConfig(NamedTuple):
    """What a step's program depends on besides shapes; all of it hashable."""

    graph: nnx.GraphDef
    tree: Any  # the structure (`jax.tree.structure`) of the model's state
    layout: Layout
    num_pages: tuple[tuple[EntryKind, int], ...]  # of a layer
    active: tuple[tuple[bool, ...], ...]  # which layers of the stages' common pattern each stage has
    all_logits: bool
    target: Target


@jax.default_matmul_precision("highest")  # see model/param.py
def step(
    config: StepConfig,
    weights: list[jax.Array],  # the leaves of the model's state
    cache: CacheState,
    slots: SlotTables,
    ints: jax.Array,  # [1, M, num_ints], M micro-batches
    floats: jax.Array,  # [1, M, num_floats]
) -> tuple[CacheState, SlotTables, DeviceOutput]:
    """Unpack, run the network, sample."""
    with traced_for(config.target):
        return _step(config, weights, cache, slots, ints, floats)


def _step(
    config: StepConfig,
    weights: list[jax.Array],
    cache: CacheState,
    slots: SlotTables,
    ints: jax.Array,
    floats: jax.Array,
) -> tuple[CacheState, SlotTables, DeviceOutput]:
    model = nnx.merge(config.graph, jax.tree.unflatten(config.tree, weights))
    num_batches = ints.shape[1]

    def batch(m: int | jax.Array, last_token: jax.Array) -> tuple[ForwardBatch, SamplingBatch]:
        # The barrier makes the arrays once; else every fusion that reads one cuts it out of the vector again.
        return jax.lax.optimization_barrier(unpack(config.layout, ints[0, m], floats[0, m], last_token))

    before = slots.last_token  # a micro-batch's rows draw nothing that another's need
    streams, cache = _pipeline(config, model, lambda m: batch(m, before)[0], num_batches, cache)
    packed, every, drafts = [], [], []
    for m in range(num_batches):
        forward, sampler = batch(m, before)
        with jax.named_scope("sample"):
            logits = model.logits(jnp.take(streams[m], forward.row_last, axis=1, mode="clip"))
            tokens, logprobs, slots = sampling.sample(logits, sampler, slots, _of_last_stage)
            prompt = sampling.prompt_logprobs(streams[m], sampler, model.logits, model.config.vocab_size)
            packed.append(output.pack(tokens, logprobs, prompt))
        if config.all_logits:
            every.append(model.logits(streams[m]))
            if hasattr(model, "mtp"):
                drawn = sampler.token_is_last & sampler.samples[sampler.token_row]
                following = jnp.where(drawn, tokens[sampler.token_row], sampler.next_token)
                pages = dict(config.num_pages)
                draft, cache = paged.draft(model, streams[m], following, forward, cache, pages, config.target)
                drafts.append(draft)
    logits, draft_logits = (_everywhere(some) if some else None for some in (every, drafts))
    return cache, slots, DeviceOutput(_everywhere(packed), logits, draft_logits)


def _pipeline(config: StepConfig, model: Transformer, batch, num_batches: int, cache: CacheState):
    """Runs the layers: last streams [M][S, T, D] (right on the last stage only) and the cache.

    Stage s works on micro-batch m at tick m + s, and hands its streams on. With one stage a tick is the whole network.
    """
    stage, num_stages = collectives.index(STAGE), collectives.size(STAGE)
    pages = dict(config.num_pages)
    if num_stages == 1:
        out = []
        for m in range(num_batches):
            forward = batch(m)
            streams = model.embed.as_streams(forward.token_ids)
            streams, cache = paged.forward(model, forward, streams, cache, pages, target=config.target)
            out.append(streams)
        return out, cache

    active = jnp.asarray(config.active)[stage]

    def tick(t: jax.Array, carry):
        received, cache, done = carry
        m = jnp.clip(t - stage, 0, num_batches - 1)
        working = (t >= stage) & (t - stage < num_batches)
        forward = batch(m)
        streams = jnp.where(stage == 0, model.embed.as_streams(forward.token_ids), received)
        forward = _silence(forward, ~working)
        streams, cache = paged.forward(model, forward, streams, cache, pages, active=active, target=config.target)
        done = done.at[jnp.where(working, m, num_batches)].set(streams, mode="drop")
        return collectives.shift(streams, STAGE), cache, done

    shape = jax.eval_shape(lambda: model.embed.as_streams(batch(0).token_ids))
    nothing = jnp.zeros(shape.shape, shape.dtype)
    start = nothing, cache, jnp.broadcast_to(nothing, (num_batches, *nothing.shape))
    _, cache, done = jax.lax.fori_loop(0, num_batches + num_stages - 1, tick, start)
    return done, cache


def _silence(batch: ForwardBatch, quiet: jax.Array) -> ForwardBatch:
    """The batch, writing nothing and making no experts work while `quiet`: a stage waits for its first or after its
    last micro-batch."""

    def nowhere(slots: jax.Array) -> jax.Array:
        return jnp.where(quiet, NOWHERE, slots)

    return batch._replace(
        num_tokens=jnp.where(quiet, 0, batch.num_tokens),
        row_slot=nowhere(batch.row_slot),
        window_slot=nowhere(batch.window_slot),
        pieces={kind: p._replace(entry_slot=nowhere(p.entry_slot)) for kind, p in batch.pieces.items()},
    )


def _of_last_stage(x: jax.Array) -> jax.Array:
    """The last stage's `x`, on all stages."""
    if collectives.size(STAGE) == 1:
        return x
    last = collectives.index(STAGE) == collectives.size(STAGE) - 1
    return collectives.psum(jnp.where(last, x, jnp.zeros_like(x)), STAGE)


def _everywhere(parts: list[jax.Array]) -> jax.Array:
    """Results of this shard's micro-batches -> [D, M, ...] of all shards, as the last stage has them."""
    return collectives.all_gather(_of_last_stage(jnp.stack(parts))[None], DATA, axis=0)


def copy_pages(
    num_pages: tuple[tuple[EntryKind, int], ...],
    num_state_slots: int,
    cache: CacheState,
    pairs: jax.Array,  # [1, kinds, 2, n]: sources, destinations of each pool kind and STATE; NOWHERE for none
    *,
    kinds: tuple[EntryKind, ...],
) -> CacheState:
    """Copies pages and STATE slots of every layer; all sources are read before any destination is written."""
    of_kind = dict(zip(kinds, pairs[0], strict=True))

    def copy(array: jax.Array, per_layer: int, pair: jax.Array) -> jax.Array:
        offset = jnp.arange(array.shape[0] // per_layer)[:, None] * per_layer
        moved = jnp.take(array, jnp.minimum(pair[0], per_layer - 1) + offset, axis=0)
        return array.at[pair[1] + offset].set(moved, mode="drop")

    pages = dict(num_pages)
    pools = {}
    for kind, pool in cache.pools.items():
        pair = of_kind[EntryKind.CSA if kind is EntryKind.INDEX_KEY else kind]
        pools[kind] = jax.tree.map(functools.partial(copy, per_layer=pages[kind], pair=pair), pool)
    states = {kind: copy(state, num_state_slots, of_kind[EntryKind.STATE]) for kind, state in cache.states.items()}
    return CacheState(pools, states)


def write_slot(
    slots: SlotTables,
    slot: jax.Array,  # [1]; NOWHERE on the other data shards
    counts: jax.Array,  # [1, V]
    bias: jax.Array,  # [1, V]
) -> SlotTables:
    """Sets the token counts and the logit bias of a slot."""
    counts = jnp.where(counts == KEEP, slots.counts.at[slot].get(mode="clip"), counts)
    return slots._replace(
        counts=slots.counts.at[slot].set(counts, mode="drop"), bias=slots.bias.at[slot].set(bias, mode="drop")
    )
