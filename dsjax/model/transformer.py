"""The whole network: embedding, blocks around residual streams, head; and the whole-sequence way in."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.axes import SHARD
from dsjax.config import LayerKind, ModelConfig
from dsjax.model.attention import Attention
from dsjax.model.mhc import HyperConnection, HyperHead
from dsjax.model.moe import MoE
from dsjax.model.mtp import MTP
from dsjax.model.norm import RMSNorm
from dsjax.model.param import Linear, normal
from dsjax.model.repeat import Repeat
from dsjax.model.rope import CosSin, cos_sin, frequencies
from pallas_kernels import collectives
from pallas_kernels.target import CPU, Target

Tap = Callable[[str, jax.Array], None]  # called with (name, value) of inner tensors; for tests and research


class Block(nnx.Module):
    """Attention and mixture of experts, each behind its norm and hyper-connection."""

    def __init__(self, config: ModelConfig, kind: LayerKind, hashed: bool, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config, rngs)
        self.hc_ffn = HyperConnection(config, rngs)
        self.attn = Attention(config, kind, rngs, dtype)
        self.ffn = MoE(config, hashed, rngs, dtype)
        self.kind = kind

    def __call__(
        self,
        streams: jax.Array,  # [S, T, D]
        token_ids: jax.Array,  # [T]
        attend: Callable[[jax.Array], jax.Array],  # normed [T, D] -> [T, D]
        num_tokens: jax.Array | None = None,
        tap: Tap | None = None,
        target: Target = CPU,
    ) -> jax.Array:
        with jax.named_scope("mhc"):
            x, post, comb = self.hc_attn.read(streams, target)
        x = self.attn_norm(x)
        with jax.named_scope("attention"):
            out = attend(x)
        if tap is not None:
            tap("attn_in", x)
            tap("attn_out", out)
        with jax.named_scope("mhc"):
            streams = self.hc_attn.write(streams, out, post, comb, target)
            x, post, comb = self.hc_ffn.read(streams, target)
        x = self.ffn_norm(x)
        with jax.named_scope("experts"):
            out = self.ffn(x, token_ids, num_tokens, tap, target)
        if tap is not None:
            tap("ffn_in", x)
            tap("ffn_out", out)
        with jax.named_scope("mhc"):
            streams = self.hc_ffn.write(streams, out, post, comb, target)
        if tap is not None:
            tap("streams_out", streams.transpose(1, 0, 2))
        return streams


def _stacked(block: Block, count: int) -> Block:
    """The block with `count` copies of every parameter, along a new first axis."""

    def stack(leaf: nnx.Variable) -> nnx.Variable:
        value = jnp.broadcast_to(leaf[...], (count, *leaf.shape))
        return leaf.replace(value, logical_axes=("layer", *leaf.get_metadata("logical_axes")))

    graph, state = nnx.split(block)
    return nnx.merge(graph, jax.tree.map(stack, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))


def _of_round(block: Block, i: jax.Array) -> Block:
    """One of the layers in a stacked block.

    The routed experts stay stacked, and are told which are theirs: cut out, all experts of a layer would be copied
    before the few that are used are read.
    """

    def take(path: tuple, leaf: nnx.Variable) -> nnx.Variable:
        return leaf if path[:2] == ("ffn", "experts") else leaf.replace(leaf[...][i])

    graph, state = nnx.split(block)
    flat = {path: take(path, leaf) for path, leaf in nnx.to_flat_state(state)}
    block = nnx.merge(graph, nnx.from_flat_state(flat))
    block.ffn.experts.round = i
    return block


class Embed(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = normal(rngs, shape, ("vocab", "embed"), dtype, fan_in=1)
        self.streams = config.hc_mult

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        table = self.embedding[...]
        if collectives.size(SHARD) == 1:
            return table[token_ids]
        row = token_ids - collectives.index(SHARD) * table.shape[0]  # of this device's part of the vocabulary
        here = (row >= 0) & (row < table.shape[0])
        return collectives.psum(jnp.where(here[..., None], table.at[row].get(mode="clip"), 0), SHARD)

    def as_streams(self, token_ids: jax.Array) -> jax.Array:
        """[T] -> [S, T, D], every stream a copy.

        Behind a barrier: seeing that the streams are one array, XLA's CPU hands their sum of squares to YNNPACK in a
        form that adds in another order now and then, and last bits decide near-ties.
        """
        x = self(token_ids)
        return jax.lax.optimization_barrier(jnp.broadcast_to(x, (self.streams, *x.shape)))


class Transformer(nnx.Module):
    """DeepSeek-V4. `rngs` draws initial weights; `dtype` stores kernels and is the activations' type.

    With `stored`, the weights that a quantised checkpoint has in FP8 and FP4 stay so and are widened where used. With
    `scanned`, layers that repeat are held stacked in `repeated` (see `Repeat`), for the engine's step to loop over.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        dtype: jnp.dtype = jnp.float32,
        *,
        with_mtp: bool = False,
        stored: bool = False,
        scanned: bool = False,
    ):
        config = config if stored else config.widened()
        self.repeat = repeat = Repeat.of(config) if scanned else Repeat.none(config)

        def block(layer: int) -> Block:
            return Block(config, config.layer_kinds[layer], layer < config.num_hash_layers, rngs, dtype)

        self.embed = Embed(config, rngs, dtype)
        self.layers = nnx.List([block(i) for i in (*range(repeat.first), *range(repeat.end, config.num_hidden_layers))])
        self.repeated = nnx.List([_stacked(block(repeat.first + k), repeat.count) for k in range(repeat.period)])
        self.hc_head = HyperHead(config, rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(rngs, (config.hidden_size, config.vocab_size), ("embed", "vocab"), dtype)
        if with_mtp:
            self.mtp = MTP(config, Block(config, LayerKind.SLIDING, False, rngs, dtype), rngs, dtype)
        self.config = config

    def blocks(self) -> list[Block]:
        """The layers that are not in `repeated`, in order."""
        return cast(list[Block], list(self.layers))

    def round(self, i: jax.Array) -> list[Block]:
        """The repeated layers as they are in round i."""
        return [_of_round(block, i) for block in self.repeated]

    def tables(self, positions: jax.Array) -> dict[LayerKind, CosSin]:
        """cos/sin of the rotary embedding at positions [T], for each kind of layer the model has."""
        # The MTP block is a sliding layer. Not a set: its order would change from process to process, and with it the
        # program, which then would not be found in the persistent compile cache.
        kinds = dict.fromkeys((LayerKind.SLIDING, *self.config.layer_kinds))
        return {kind: cos_sin(frequencies(self.config, kind), positions) for kind in kinds}

    def logits(self, streams: jax.Array, tap: Tap | None = None) -> jax.Array:
        """Last streams [S, T, D] -> logits [T, V] float32."""
        y = self.hc_head(streams)
        x = self.norm(y)
        if tap is not None:
            tap("hc_head_out", y)
            tap("final_norm_out", x)
        return self.unembed(x)

    def unembed(self, x: jax.Array) -> jax.Array:
        """[T, D] -> logits [T, V] float32, whole on every device."""
        return collectives.all_gather(self.head(x, jnp.float32), SHARD, axis=1)

    def streams(self, token_ids: jax.Array, tap: Tap | None = None) -> jax.Array:
        """One whole sequence [S_len] from position 0 -> the last streams [S, S_len, D]. Not of a scanned model."""
        if self.repeat.count:
            raise ValueError("the whole-sequence forward takes a model built with scanned=False")
        tables = self.tables(jnp.arange(token_ids.shape[0]))
        x = self.embed.as_streams(token_ids)
        if tap is not None:
            tap("embed", x[0])
        for i, block in enumerate(self.blocks()):
            inner = None if tap is None else lambda name, value, i=i: tap(f"L{i}.{name}", value)
            table = tables[block.kind]
            x = block(x, token_ids, lambda h, b=block, t=table, p=inner: b.attn.full(h, t, p), None, inner)
        return x

    @jax.default_matmul_precision("highest")
    def __call__(self, token_ids: jax.Array, tap: Tap | None = None) -> jax.Array:
        """Whole-sequence, differentiable forward: [S_len] or [B, S_len] ids -> logits [..., V] float32."""
        if token_ids.ndim == 2:
            return jax.vmap(self)(token_ids)
        return self.logits(self.streams(token_ids, tap), tap)

    def mtp_logits(self, streams: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Draft logits [S_len - 1, V]: row j, from streams j and token j + 1, predicts token j + 2.

        streams [S, S_len, D] as `streams` returns them; token_ids [S_len].
        """
        following = token_ids[1:]
        x = self.mtp.inputs(streams[:, :-1], self.embed(following))
        table = self.tables(jnp.arange(following.shape[0]))[LayerKind.SLIDING]
        x = self.mtp.block(x, following, lambda h: self.mtp.block.attn.full(h, table))
        return self.unembed(self.mtp.outputs(x))
