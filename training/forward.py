"""The batched forward of training: dsjax's layers, rearranged so that the CPU trains them several times faster.

Same weights and results as `dsjax.model.transformer.Transformer` (a test compares them). What differs:
- the batch is one long token axis wherever tokens do not meet, and the residual streams are a tuple of arrays: XLA's
  gradient of an indexed array writes the whole array once per index;
- a query block attends only to the two window blocks it can reach;
- experts get at most `capacity` times their fair share of tokens (None: exact), moved by gathers in both directions;
- the router's loads and the indexer's loss come out, and head and loss are one operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from dsjax.config import LayerKind
from dsjax.model.attention import Attention
from dsjax.model.compressor import num_visible
from dsjax.model.indexer import Indexer
from dsjax.model.mhc import HyperConnection, HyperHead
from dsjax.model.moe import MoE, clamped_swiglu
from dsjax.model.mtp import MTP
from dsjax.model.rope import CosSin
from dsjax.model.transformer import Transformer
from pallas_kernels.mhc_mix import sinkhorn

Streams = tuple[jax.Array, ...]  # S arrays [B * T, D]

_INDEX_LOSS_EVERY = 4  # queries; the indexer learns from one in so many
_NEVER = -1e30  # finite, so that a row without any entry has a gradient of 0 and not NaN


@dataclass(kw_only=True)
class Run:
    """How to run a forward, and what training wants besides its result; made anew for each."""

    capacity: float | None = None
    loads: dict[str, jax.Array] = field(default_factory=dict)  # layer -> share of token slots by expert [E]
    index_losses: list[jax.Array] = field(default_factory=list)


def streams(model: Transformer, ids: jax.Array, run: Run) -> Streams:
    """ids [B, T], each row from position 0 -> last streams."""
    tables = model.tables(jnp.arange(ids.shape[1]))
    flat = ids.reshape(-1)
    x = (model.embed(flat),) * model.config.hc_mult
    for i, block in enumerate(model.layers):
        x = _block(block, x, flat, ids.shape, tables[block.kind], f"layers.{i}", run)
    return x


def hidden(model: Transformer, last: Streams) -> jax.Array:
    """Last streams -> [B * T, D], which the head turns into logits of token i + 1."""
    return model.norm(_hyper_head(model.hc_head, last))


def mtp_hidden(model: Transformer, last: Streams, following: jax.Array, run: Run) -> jax.Array:
    """Last streams at i and tokens i + 1 [B, T] -> [B * T, D], which the head turns into logits of token i + 2."""
    flat = following.reshape(-1)
    mtp: MTP = model.mtp
    embedded = mtp.e_proj(mtp.enorm(model.embed(flat)))
    x = tuple(embedded + mtp.h_proj(mtp.hnorm(stream)) for stream in last)
    table = model.tables(jnp.arange(following.shape[1]))[LayerKind.SLIDING]
    x = _block(mtp.block, x, flat, following.shape, table, "mtp.block", run)
    return mtp.norm(_hyper_head(mtp.hc_head, x))


def _block(
    block: Any, x: Streams, flat: jax.Array, shape: tuple[int, ...], table: CosSin, name: str, run: Run
) -> Streams:
    h, post, comb = _read(block.hc_attn, x)
    h = block.attn_norm(h).reshape(*shape, -1)
    out, loss = jax.vmap(lambda row: _attention(block.attn, row, table))(h)
    if block.kind is LayerKind.CSA:
        run.index_losses.append(jnp.mean(loss))
    x = _write(x, out.reshape(flat.shape[0], -1), post, comb)
    h, post, comb = _read(block.hc_ffn, x)
    out, run.loads[name] = _moe(block.ffn, block.ffn_norm(h), flat, run.capacity)
    return _write(x, out, post, comb)


# --- hyper-connections -----------------------------------------------------------------------------------------------


def _coefficients(fn: jax.Array, x: Streams, eps: float) -> jax.Array:
    """fn [n, S * D] -> [n, tokens]."""
    parts = jnp.split(fn, len(x), axis=1)
    squares = sum(jnp.sum(s * s, axis=1) for s in x)
    z = sum(jnp.einsum("nd,td->nt", part, s) for part, s in zip(parts, x, strict=True))
    return z * jax.lax.rsqrt(squares / fn.shape[1] + eps)


def _read(hc: HyperConnection, x: Streams) -> tuple[jax.Array, jax.Array, jax.Array]:
    s, config = len(x), hc.config
    z = _coefficients(hc.fn[...], x, config.rms_norm_eps)
    base, scale = hc.base[...][:, None], hc.scale[...]
    pre = jax.nn.sigmoid(scale[0] * z[:s] + base[:s]) + config.hc_eps
    post = 2 * jax.nn.sigmoid(scale[1] * z[s : 2 * s] + base[s : 2 * s])
    comb = (scale[2] * z[2 * s :] + base[2 * s :]).reshape(s, s, -1)
    return _weighted_sum(pre, x), post, _doubly_stochastic(comb, config.hc_sinkhorn_iters, config.hc_eps)


def _write(x: Streams, out: jax.Array, post: jax.Array, comb: jax.Array) -> Streams:
    return tuple(post[k][:, None] * out + _weighted_sum(comb[:, k], x) for k in range(len(x)))


def _hyper_head(head: HyperHead, x: Streams) -> jax.Array:
    z = _coefficients(head.fn[...], x, head.config.rms_norm_eps)
    return _weighted_sum(jax.nn.sigmoid(head.scale[...] * z + head.base[...][:, None]) + head.config.hc_eps, x)


def _weighted_sum(weights: jax.Array, x: Streams) -> jax.Array:
    return sum((weights[i][:, None] * s for i, s in enumerate(x[1:], start=1)), weights[0][:, None] * x[0])


@jax.custom_vjp
def _doubly_stochastic_vjp(logits, iters, eps):
    return sinkhorn(jax.nn.softmax(logits, axis=1) + eps, iters, eps)


def _doubly_stochastic(logits: jax.Array, iters: int, eps: float) -> jax.Array:
    """[S, S, tokens] -> the same, mixing weights. Its gradient is that of the limit, so it stores no iteration."""
    return _doubly_stochastic_vjp(logits, iters, eps)


def _doubly_stochastic_forward(logits, iters, eps):
    p = _doubly_stochastic_vjp(logits, iters, eps)
    return p, p


def _doubly_stochastic_backward(p, g):
    # P = diag(u) exp(logits) diag(v) with fixed row and column sums, so d logits = P * (G - a - b) where a (rows) and
    # b (columns) make its sums vanish; they are found as Sinkhorn finds u and v.
    pg = p * g
    rows, columns = jnp.sum(pg, axis=1), jnp.sum(pg, axis=0)

    def body(_, b):
        a = rows - jnp.sum(p * b[None], axis=1)
        return columns - jnp.sum(p * a[:, None], axis=0)

    b = jax.lax.fori_loop(0, 12, body, jnp.zeros_like(columns))
    a = rows - jnp.sum(p * b[None], axis=1)
    return pg - p * (a[:, None] + b[None]), None, None


_doubly_stochastic_vjp.defvjp(_doubly_stochastic_forward, _doubly_stochastic_backward)

# --- attention -------------------------------------------------------------------------------------------------------


def _attention(attn: Attention, x: jax.Array, table: CosSin) -> tuple[jax.Array, jax.Array]:
    """x [T, D], T a multiple of the sliding window (or shorter) -> ([T, D], the indexer's loss)."""
    config, length = attn.config, x.shape[0]
    heads, window = config.num_attention_heads, min(config.sliding_window, length)
    num_blocks = length // window
    if num_blocks * window != length:
        raise ValueError(f"sequences of {length} tokens must be a multiple of sliding_window={window}")
    c_q, q, kv = attn.project(x, table)
    q = q * config.head_dim**-0.5
    blocks = kv.reshape(num_blocks, window, -1)
    keys = jnp.concatenate([jnp.pad(blocks[:-1], ((1, 0), (0, 0), (0, 0))), blocks], axis=1)  # [G, 2W, H]
    # A row is a (token, head): no axis is ever transposed.
    logits = jnp.einsum("gmh,gkh->gmk", q.reshape(num_blocks, window * heads, -1), keys)
    offset = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)[None, :]
    reach = (offset >= 0) & (offset < config.sliding_window)
    reach = reach & ((jnp.arange(num_blocks) > 0)[:, None, None] | (jnp.arange(2 * window) >= window))  # [G, W, 2W]
    logits = jnp.where(jnp.repeat(reach, heads, axis=1), logits, _NEVER).reshape(length * heads, -1)
    sink = jnp.tile(attn.sink[...], length)[:, None]
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink)
    loss = jnp.zeros(())
    raw = entries = None
    if attn.kind is not LayerKind.SLIDING and length >= attn.compressor.ratio:
        entries = attn.compressor.full(x)  # [C, H]
        chosen = jnp.arange(entries.shape[0]) < num_visible(jnp.arange(length), attn.compressor.ratio)[:, None]
        raw = jnp.einsum("mh,ch->mc", q.reshape(length * heads, -1), entries)
        if attn.kind is LayerKind.CSA:
            scores = _index_scores(attn.indexer, jax.lax.stop_gradient(x), jax.lax.stop_gradient(c_q), table)
            some = slice(3, None, _INDEX_LOSS_EVERY)
            seen = jax.lax.stop_gradient(raw).reshape(length, heads, -1)
            loss = _index_loss(scores[some], seen[some], chosen[some])
            chosen = _select(scores, chosen, config.index_topk)
        raw = jnp.where(jnp.repeat(chosen, heads, axis=0), raw, _NEVER)
        top = jnp.maximum(top, jnp.max(raw, axis=-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top)
    out = jnp.einsum("gmk,gkh->gmh", weights.reshape(num_blocks, window * heads, -1), keys).reshape(length * heads, -1)
    if raw is not None:
        extra = jnp.exp(raw - top)
        total += jnp.sum(extra, axis=-1, keepdims=True)
        out += jnp.einsum("mc,ch->mh", extra, entries)
    return attn.output((out / total).reshape(length, heads, -1), table), loss


def _index_scores(indexer: Indexer, x: jax.Array, c_q: jax.Array, table: CosSin) -> jax.Array:
    """[T, C], what `Indexer.full` ranks entries by."""
    keys = indexer.compressor.full(x)
    q, weights = indexer.queries(x, c_q, table)
    products = jnp.einsum("mh,ch->mc", q.reshape(-1, q.shape[-1]), keys).reshape(*q.shape[:2], -1)
    return jnp.sum(jax.nn.relu(products) * weights[..., None], axis=1)


def _select(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
    """The k largest visible scores of each row as a mask; of equal ones at the cut the first, as in `Indexer.full`.

    The cut is found bit by bit: counting is ten times faster than sorting here.
    """
    if scores.shape[1] <= k:
        return visible
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(scores) + 0.0, jnp.int32)  # + 0.0: no -0
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # orders as the floats do
    keys = jnp.where(visible, keys, jnp.iinfo(jnp.int32).min)

    def body(i, cut):
        trial = cut + (jnp.int32(1) << (31 - i))  # the first wraps from the least int to 0
        return jnp.where(jnp.sum(keys >= trial, axis=1, keepdims=True) >= k, trial, cut)

    cut = jax.lax.fori_loop(0, 32, body, jnp.full((keys.shape[0], 1), jnp.iinfo(jnp.int32).min, jnp.int32))
    above, equal = keys > cut, keys == cut
    room = k - jnp.sum(above, axis=1, keepdims=True)
    return visible & (above | (equal & (jnp.cumsum(equal, axis=1) <= room)))


def _index_loss(scores: jax.Array, attention_logits: jax.Array, visible: jax.Array) -> jax.Array:
    """KL from the heads' mean attention over visible entries [T, N, C] to the indexer's scores [T, C], mean over T."""
    target = jnp.mean(jax.nn.softmax(jnp.where(visible[:, None], attention_logits, _NEVER), axis=-1), axis=1)
    log_p = jax.nn.log_softmax(jnp.where(visible, scores, _NEVER), axis=-1)
    log_t = jnp.log(jnp.maximum(target, 1e-9))
    return jnp.mean(jnp.sum(jnp.where(visible, target * (log_t - log_p), 0.0), axis=-1))


# --- experts ---------------------------------------------------------------------------------------------------------


def _moe(ffn: MoE, x: jax.Array, ids: jax.Array, capacity: float | None) -> tuple[jax.Array, jax.Array]:
    """x [T, D] -> ([T, D], share of token slots by expert [E])."""
    config = ffn.gate.config
    experts, weights = ffn.gate(x, ids)
    num_tokens, k, e = *experts.shape, config.n_routed_experts
    one_hot = jax.nn.one_hot(experts.reshape(-1), e, dtype=jnp.float32)  # [T * k, E]
    loads = jnp.mean(one_hot, axis=0)
    size = num_tokens * k if capacity is None else min(math.ceil(capacity * num_tokens * k / e), num_tokens * k)
    rank = jnp.sum((jnp.cumsum(one_hot, axis=0) - 1) * one_hot, axis=1).astype(jnp.int32)
    slot = jnp.where(rank < size, experts.reshape(-1) * size + rank, e * size)  # past the end: dropped
    source = jnp.full(e * size, num_tokens, jnp.int32).at[slot].set(jnp.arange(num_tokens * k) // k, mode="drop")
    slot = slot.reshape(num_tokens, k)
    rows = _dispatch(x, source, slot).reshape(e, size, -1)
    hidden = clamped_swiglu(jnp.einsum("ecd,edf->ecf", rows, ffn.experts.w13[...]), config.swiglu_limit)
    out = jnp.einsum("ecf,efd->ecd", hidden, ffn.experts.w2[...]).reshape(e * size, -1)
    picked = _combine(out, source, slot)  # [T, k, D]
    return jnp.sum(picked * weights[..., None], axis=1) + ffn.shared_experts(x), loads


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _dispatch(x, source, slot):
    """x [T, D] -> rows by expert slot [P, D]. `source` [P] and `slot` [T, k] are each other's inverse, so that the
    gradient is a gather too: XLA's scatter-add is serial on the CPU."""
    return _rows(x, source)


def _dispatch_backward(slot, g):
    return jnp.sum(_rows(g, slot), axis=1), None, None


_dispatch.defvjp(lambda x, source, slot: (_rows(x, source), slot), _dispatch_backward)


@jax.custom_vjp
def _combine(rows, source, slot):
    """Rows by expert slot [P, D] -> [T, k, D]."""
    return _rows(rows, slot)


def _combine_forward(rows, source, slot):
    return _rows(rows, slot), (source, slot, rows.shape[0])


def _combine_backward(saved, g):
    source, slot, num_rows = saved
    num_tokens, k, width = g.shape
    # which of its token's k slots a row is
    which = jnp.zeros(num_rows, jnp.int32).at[slot.reshape(-1)].set(jnp.arange(num_tokens * k) % k, mode="drop")
    index = jnp.where(source < num_tokens, source * k + which, num_tokens * k)
    return _rows(g.reshape(num_tokens * k, width), index), None, None


_combine.defvjp(_combine_forward, _combine_backward)

# --- head and loss ---------------------------------------------------------------------------------------------------


@jax.custom_vjp
def cross_entropy(x: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
    """-mean log softmax(x @ kernel)[target]: x [T, D], kernel [D, V], targets [T].

    Chunk by chunk, gradients included, so that no [T, V] array leaves the cache.
    """
    return _cross_entropy_forward(x, kernel, targets)[0]


_CHUNK = 256


def _cross_entropy_forward(x, kernel, targets):
    num = x.shape[0]
    if num % _CHUNK:
        raise ValueError(f"{num} tokens must be a multiple of {_CHUNK}")

    def body(carry, chunk):
        loss, d_kernel = carry
        x, t = chunk
        logits = x @ kernel
        top = jnp.max(logits, axis=1, keepdims=True)
        p = jnp.exp(logits - top)
        total = jnp.sum(p, axis=1, keepdims=True)
        picked = jnp.take_along_axis(logits, t[:, None], axis=1)
        hot = jnp.arange(kernel.shape[1])[None] == t[:, None]
        d_logits = (p / total - hot) / num
        loss += jnp.sum(top + jnp.log(total) - picked) / num
        return (loss, d_kernel + x.T @ d_logits), d_logits @ kernel.T

    chunks = x.reshape(num // _CHUNK, _CHUNK, -1), targets.reshape(num // _CHUNK, _CHUNK)
    (loss, d_kernel), d_x = jax.lax.scan(body, (jnp.zeros(()), jnp.zeros_like(kernel)), chunks)
    return loss, (d_x.reshape(x.shape), d_kernel)


def _cross_entropy_backward(saved, g):
    d_x, d_kernel = saved
    return d_x * g, d_kernel * g, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
