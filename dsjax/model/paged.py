"""The engine's way through the network: a packed, ragged step over the paged cache.

Every layer writes its new entries first and then reads the updated pool: reading a slice of a pool before writing
it makes XLA copy the pool.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from dsjax.axes import KV
from dsjax.cache.spec import EntryKind
from dsjax.cache.state import CacheState
from dsjax.config import LayerKind
from dsjax.model.attention import Attention
from dsjax.model.batch import ForwardBatch
from dsjax.model.compressor import Compressor
from dsjax.model.rope import CosSin
from dsjax.model.transformer import Block, Tap, Transformer
from pallas_kernels import collectives
from pallas_kernels.blocks import Pages
from pallas_kernels.cache_write import NOWHERE, cache_write
from pallas_kernels.compress import compress
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import CPU, Target

Carry = tuple[jax.Array, CacheState]  # streams and cache, from layer to layer

ENTRY_KIND = {LayerKind.CSA: EntryKind.CSA, LayerKind.HCA: EntryKind.HCA}


def forward(
    model: Transformer,
    batch: ForwardBatch,
    streams: jax.Array,  # [S, T, D] of the batch's tokens
    cache: CacheState,
    num_pages: dict[EntryKind, int],
    tap: Tap | None = None,
    active: jax.Array | None = None,
    target: Target = CPU,
) -> tuple[jax.Array, CacheState]:
    """Runs the new tokens of every row through the layers. `num_pages` is the pages a layer of each kind has.

    `active` [layers] bool says which layers there are on this pipeline stage; the others change nothing that counts.
    Layers that the model holds stacked run in a loop with the cache in its carry, and cannot be tapped.

    Inside `shard_map` everything is this device's part, and the tokens are those of its data shard.
    Returns the last streams [S, T, D] (meaningless at padding) and the updated cache.
    """
    tables = model.tables(batch.positions)
    repeat, config = model.repeat, model.config
    if tap is not None and repeat.count:
        raise ValueError("inner tensors can be had from a model built with scanned=False")

    def before(layer: int, kind: LayerKind) -> int:
        return config.layer_kinds[:layer].count(kind)

    def run(block: Block, layer: int | jax.Array, nth: int | jax.Array, carry: Carry) -> Carry:
        """Layer `layer` of all and `nth` of its kind."""
        streams, cache = carry
        inner = None if tap is None else lambda name, value, tap=tap: tap(f"L{layer}.{name}", value)
        step = _LayerStep(batch, cache, num_pages, layer, nth, inner, target)
        attend = functools.partial(step.attend, block.attn, table=tables[block.kind])
        after = block(streams, batch.token_ids, attend, batch.num_tokens, inner, target)
        return after if active is None else jnp.where(active[layer], after, streams), step.cache

    def one_round(carry: Carry, i: jax.Array) -> tuple[Carry, None]:
        for k, block in enumerate(model.round(i)):
            first = repeat.first + k
            nth = before(first, block.kind)
            in_round = before(first + repeat.period, block.kind) - nth
            with jax.named_scope(f"repeated{k}"):
                carry = run(block, first + i * repeat.period, nth + i * in_round, carry)
        return carry, None

    alone = iter(model.blocks())

    def run_alone(layers: range, carry: Carry) -> Carry:
        for layer, block in zip(layers, alone, strict=False):
            with jax.named_scope(f"layer{layer}"):
                carry = run(block, layer, before(layer, block.kind), carry)
        return carry

    carry = run_alone(range(repeat.first), (streams, cache))
    if repeat.count:
        carry, _ = jax.lax.scan(one_round, carry, jnp.arange(repeat.count))
    return run_alone(range(repeat.end, config.num_hidden_layers), carry)


def draft(
    model: Transformer,
    streams: jax.Array,  # [S, T, D] as `forward` returns them
    following: jax.Array,  # [T] the token after each token
    batch: ForwardBatch,
    cache: CacheState,
    num_pages: dict[EntryKind, int],
    target: Target = CPU,
) -> tuple[jax.Array, CacheState]:
    """Runs the MTP block on the same tokens: logits [T, V] of the token after the following one.

    The block is one more sliding layer: its window rows are the WINDOW pool's last layer.
    """
    table = model.tables(batch.positions)[LayerKind.SLIDING]
    step = _LayerStep(batch, cache, num_pages, model.config.num_hidden_layers, 0, None, target)
    block = model.mtp.block
    x = model.mtp.inputs(streams, model.embed(following))
    attend = functools.partial(step.attend, block.attn, table=table)
    x = block(x, following, attend, batch.num_tokens, None, target)
    return model.unembed(model.mtp.outputs(x)), step.cache


class _LayerStep:
    """One layer's reads and writes of the cache."""

    def __init__(
        self,
        batch: ForwardBatch,
        cache: CacheState,
        num_pages: dict[EntryKind, int],
        layer: int | jax.Array,  # among all layers
        nth: int | jax.Array,  # among the layers of its kind
        tap: Tap | None,
        target: Target,
    ):
        self.batch, self.cache, self.num_pages, self.target = batch, cache, num_pages, target
        self.layer, self.nth, self.tap = layer, nth, tap

    def attend(self, attn: Attention, x: jax.Array, table: CosSin) -> jax.Array:
        """x [T, D] normed -> [T, D]."""
        batch, config = self.batch, attn.config
        with jax.named_scope("projections"):
            c_q, q, kv = attn.project(x, table)
        self._write(EntryKind.WINDOW, batch.window_slot, kv, self.layer)
        window = self._pages(EntryKind.WINDOW, self.layer)
        if KV in attn.axes:  # the cache is split, so each part is asked by the heads of all its devices
            q = collectives.all_gather(q, KV, axis=1)
        common = {"window": config.sliding_window, "scale": config.head_dim**-0.5, "target": self.target}
        if attn.kind is LayerKind.SLIDING:
            o = swa_attention(q, batch.blocks, window, attn.sink[...], **common)
            return attn.output(o.astype(x.dtype), table)

        kind, ratio = ENTRY_KIND[attn.kind], attn.compressor.ratio
        self._compress(attn.compressor, kind, x)
        entries = self._pages(kind, self.nth)
        if attn.kind is LayerKind.HCA:
            o = hca_attention(q, batch.blocks, window, entries, attn.sink[...], ratio=ratio, **common)
        else:
            self._compress(attn.indexer.compressor, EntryKind.INDEX_KEY, x)
            with jax.named_scope("indexer"):
                index_q, weights = attn.indexer.queries(x, c_q, table)
                chosen = indexer_topk(
                    index_q,
                    weights,
                    batch.blocks,
                    self._pages(EntryKind.INDEX_KEY, self.nth),
                    ratio=ratio,
                    k=config.index_topk,
                    target=self.target,
                )
            if self.tap is not None:
                self.tap("index_mask", chosen)
            o = csa_attention(q, batch.blocks, window, entries, chosen, attn.sink[...], ratio=ratio, **common)
        return attn.output(o.astype(x.dtype), table)

    def _compress(self, compressor: Compressor, kind: EntryKind, x: jax.Array) -> None:
        """Stores the entries of the windows that close in this step, and each row's state after it."""
        batch = self.batch
        table_kind = EntryKind.CSA if kind is EntryKind.INDEX_KEY else kind
        pieces = batch.pieces[table_kind]
        states = self.cache.states[kind]
        num_slots = states.shape[0] // self._num_layers(kind)
        with jax.named_scope("compressor"):
            values, logits = compressor.project(x, batch.positions)
            entries, states = compress(
                values,
                logits,
                pieces,
                states,
                batch.row_slot + self.nth * num_slots,
                batch.row_position,
                compressor.finishing(pieces.window),
                ratio=compressor.ratio,
                overlap=compressor.overlap,
                dtype=x.dtype,
                target=self.target,
            )
        self.cache = self.cache._replace(states={**self.cache.states, kind: states})
        self._write(kind, pieces.entry_slot, entries, self.nth)
        if self.tap is not None and kind is not EntryKind.INDEX_KEY:
            self.tap("compressed_kv", entries)

    def _num_layers(self, kind: EntryKind) -> int:
        return self.cache.pools[kind].num_pages // self.num_pages[kind]

    def _write(self, kind: EntryKind, slots: jax.Array, entries: jax.Array, layer: int | jax.Array) -> None:
        parts = collectives.size(KV)
        if parts > 1:  # entries are dealt out one by one, see pallas_kernels.blocks
            slots = jnp.where(slots % parts == collectives.index(KV), slots // parts, NOWHERE)
        pool = cache_write(
            self.cache.pools[kind], slots, entries, layer=layer, num_pages=self.num_pages[kind], target=self.target
        )
        self.cache = self.cache._replace(pools={**self.cache.pools, kind: pool})

    def _pages(self, kind: EntryKind, layer: int | jax.Array) -> Pages:
        table = self.batch.tables[EntryKind.CSA if kind is EntryKind.INDEX_KEY else kind]
        return Pages(self.cache.pools[kind], table, layer, self.num_pages[kind], KV)
