"""The attention of a layer: sliding window, plus compressed entries on CSA and HCA layers (spec 2.3).

`full` is the whole-sequence form, differentiable; `paged` (engine) reads and writes the paged cache.
Both share the projections, so weights mean the same in either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.axes import KV, MODEL
from dsjax.config import LayerKind, ModelConfig
from dsjax.model.compressor import Compressor, num_visible
from dsjax.model.indexer import Indexer
from dsjax.model.norm import RMSNorm
from dsjax.model.param import Linear, constant, weight, widen
from dsjax.model.rope import CosSin, frequencies, rotate
from pallas_kernels import collectives
from pallas_kernels.matmul import matmul
from pallas_kernels.rotary import normalise_and_rotate


class Attention(nnx.Module):
    """One latent of head_dim is key and value of every head; a sink logit per head; grouped output projection."""

    def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs, dtype: jnp.dtype):
        d, n, h, eps = config.hidden_size, config.num_attention_heads, config.head_dim, config.rms_norm_eps
        groups, rank = config.o_groups, config.o_lora_rank
        stored = config.quant_method
        self.sink = constant((n,), ("heads",), 0.0)
        self.wq_a = Linear(rngs, (d, config.q_lora_rank), ("embed", "q_lora"), dtype, stored)
        self.q_norm = RMSNorm(config.q_lora_rank, eps, axis="q_lora")
        self.wq_b = Linear(rngs, (config.q_lora_rank, n * h), ("q_lora", "heads"), dtype, stored)
        self.wkv = Linear(rngs, (d, h), ("embed", "kv"), dtype, stored)
        self.kv_norm = RMSNorm(h, eps, axis="kv")
        self.wo_a = GroupedLinear(rngs, (groups, n * h // groups, rank), dtype, stored)
        self.wo_b = Linear(rngs, (groups * rank, d), ("group", "embed"), dtype, stored)
        if kind is not LayerKind.SLIDING:
            self.compressor = Compressor(
                d, h, config.ratio(kind), kind is LayerKind.CSA, frequencies(config, kind), eps, rngs, dtype
            )
        if kind is LayerKind.CSA:
            self.indexer = Indexer(config, rngs, dtype)
        self.config, self.kind = config, kind

    def project(self, x: jax.Array, table: CosSin) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [T, D] -> c_q [T, q_lora], q [T, N, H], kv [T, H]; q and kv normalised, then rotated.

        N heads are those of this device, where several split them.
        """
        c_q = self.q_norm(self.wq_a(x))
        q = self.wq_b(c_q).reshape(x.shape[0], -1, self.config.head_dim)
        q = normalise_and_rotate(q, *table, self.config.rms_norm_eps)
        kv = normalise_and_rotate(self.wkv(x), *table, self.kv_norm.eps, self.kv_norm.scale[...])
        return c_q, q, kv

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the heads are split over: with the axis the cache is split over, or without it."""
        parts = self.config.num_attention_heads // self.sink.shape[0]
        return (MODEL, KV) if parts == collectives.size((MODEL, KV)) else (MODEL,)

    def output(self, o: jax.Array, table: CosSin) -> jax.Array:
        """o [T, N, H], in the keys' rotation -> [T, D]: undoes the query position's rotation, then projects."""
        num_groups = self.wo_a.kernel.shape[0]
        with jax.named_scope("projections"):
            o = rotate(o, table, inverse=True)
            out = self.wo_b(self.wo_a(o.reshape(o.shape[0], num_groups, -1)))
        return collectives.psum(out, self.axes)

    def full(self, x: jax.Array, table: CosSin, tap=None) -> jax.Array:
        """x [S, D], one whole sequence from position 0 -> [S, D]."""
        length = x.shape[0]
        c_q, q, kv = self.project(x, table)
        position = jnp.arange(length)
        offset = position[:, None] - position[None, :]
        mask = (offset >= 0) & (offset < self.config.sliding_window)
        if self.kind is not LayerKind.SLIDING and length >= self.compressor.ratio:
            entries = self.compressor.full(x)
            if self.kind is LayerKind.CSA:
                chosen = self.indexer.full(x, c_q, table, tap)
            else:
                chosen = jnp.arange(entries.shape[0]) < num_visible(position, self.compressor.ratio)[:, None]
            if tap is not None:
                tap("compressed_kv", entries)
                if self.kind is LayerKind.CSA:
                    tap("index_mask", chosen)
            kv, mask = jnp.concatenate([kv, entries]), jnp.concatenate([mask, chosen], axis=1)
        logits = jnp.einsum("tnh,kh->ntk", q, kv, preferred_element_type=jnp.float32) * self.config.head_dim**-0.5
        logits = jnp.where(mask, logits, -jnp.inf)
        sink = jnp.broadcast_to(self.sink[...][:, None, None], (*logits.shape[:2], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]
        # ntk,kh->nth, not ->tnh: the transposed bf16 form fails at run time on XLA's CPU
        o = jnp.einsum("ntk,kh->nth", weights.astype(x.dtype), kv, preferred_element_type=jnp.float32)
        return self.output(o.transpose(1, 0, 2).astype(x.dtype), table)


class GroupedLinear(nnx.Module):
    """Each group of heads times its own matrix: [T, G, in] -> [T, G * out]."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int, int], dtype: jnp.dtype, stored: str | None = None):
        # [G, in, out]
        self.kernel, self.scale = weight(rngs, shape, ("group", None, None), dtype, stored)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x.transpose(1, 0, 2), widen(self.kernel, self.scale, x.dtype))
        return y.transpose(1, 0, 2).reshape(x.shape[0], -1).astype(x.dtype)
