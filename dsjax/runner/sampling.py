"""Choosing the next token, inside the step: penalties, filters, one draw a row, log-probabilities.

What no row of a step asks for is skipped at run time (lax.cond), so that greedy steps pay for an argmax only.
The vocabulary is never sorted: thresholds are found by bisection over the bits of a float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dsjax.cache.spec import EntryKind
from dsjax.request import MAX_LOGPROBS, SamplingParams
from dsjax.runner.buckets import Bucket
from dsjax.scheduler.plan import RowPlan, Rows

PROMPT_BIT = 1 << 30  # in SlotTables.counts: the token occurs in the prompt; the bits below count outputs
_PROMPT_ROWS = 16  # prompt positions whose logits exist at a time


FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "use_bias")
FLAGS = ("random", "filter", "penalties", "bias", "logprobs", "prompt_logprobs")
_UINT64 = (1 << 64) - 1
MIN_TEMPERATURE = 1e-6  # below it the draw is greedy: only logits that float32 hardly tells apart could be drawn
_TINY = float(np.finfo(np.float32).tiny)  # as top_p it keeps the most likely token, which 0 would not


class SlotTables(NamedTuple):
    """Per row slot, on the device for as long as a request runs. On a mesh the data shards' tables are joined."""

    last_token: jax.Array  # [num_slots] int32
    counts: jax.Array  # [num_slots, V] int32, see PROMPT_BIT; meaningful for requests with penalties
    bias: jax.Array  # [num_slots, V] float32; meaningful for requests with logit_bias or min_tokens

    @classmethod
    def abstract(cls, num_slots: int, vocab_size: int, sharding: NamedSharding | None = None) -> SlotTables:
        """The tables' shapes, without allocating any."""

        def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

        table = num_slots, vocab_size
        shapes = shape(jnp.int32, num_slots), shape(jnp.int32, *table), shape(jnp.float32, *table)
        return cls(*shapes)  # type: ignore[arg-type]  # shapes in place of arrays

    @classmethod
    def create(cls, num_slots: int, vocab_size: int, sharding: NamedSharding | None = None) -> SlotTables:
        """Tables of zeros."""
        shapes = cls.abstract(num_slots, vocab_size, sharding)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


class SamplingBatch(NamedTuple):
    """Sampling parameters of a step's rows [R], and which features any row needs."""

    slot: jax.Array
    samples: jax.Array  # bool
    position: jax.Array  # of the token to be drawn: the random counter
    seed: jax.Array  # [R, 2] uint32
    temperature: jax.Array
    top_k: jax.Array  # 0: all
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    use_bias: jax.Array  # 1 where the slot's bias row counts
    next_token: jax.Array  # [T] the token that follows each token, where the host knows it
    token_row: jax.Array  # [T] row of each token
    token_is_last: jax.Array  # [T] bool: the last token of its row
    flags: dict[str, jax.Array]  # bool scalars

    @classmethod
    def unpack(cls, a: dict[str, jax.Array], f: dict[str, jax.Array]) -> SamplingBatch:
        return cls(
            slot=a["row_slot"],
            samples=a["samples"] != 0,
            position=a["positions"][a["row_last"]] + 1,
            seed=jax.lax.bitcast_convert_type(a["seed"], jnp.uint32),
            top_k=a["top_k"],
            next_token=a["next_token"],
            token_row=a["token_row"],
            token_is_last=a["row_last"][a["token_row"]] == jnp.arange(a["token_row"].shape[0]),
            flags={name: a["flags"][i] != 0 for i, name in enumerate(FLAGS)},
            **{name: f[name] for name in FLOATS},
        )


class DecodeStep(NamedTuple):
    """A decode step's packed vectors as far as the slots of its rows say them. Others begin from it: never changed."""

    bucket: Bucket
    slot: np.ndarray
    ints: np.ndarray
    floats: np.ndarray
    tables: list[tuple[EntryKind, int, int]]  # each kind's page table: where it begins in `ints`, and its columns
    table_begin: np.ndarray  # [kinds, rows] where each row's begins
    first_new: np.ndarray  # [kinds, rows] int32, the first entry of the row that is not stored already


class SlotParams:
    """What requests' parameters say to a step, by row slot, for as long as a request holds it: a step gathers it."""

    def __init__(self, num_slots: int):
        self.floats = np.zeros((num_slots, len(FLOATS)), np.float32)
        self.features = np.zeros((num_slots, len(FLAGS)), bool)
        self.top_k = np.zeros(num_slots, np.int32)
        self.seed = np.zeros((num_slots, 2), np.int32)
        self.num_shared = np.zeros(num_slots, np.int32)  # tokens whose entries are stored already
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.free_at = np.zeros(num_slots, np.int32)  # tokens with which it has its min_tokens; 0 if it has none
        self._any_free_at = False
        self.decode_step: DecodeStep | None = None  # the latest; these parameters are in it

    def begin(self, rows: Rows) -> list[int]:
        """Takes down the requests whose stay begins. Returns the rows whose tables on the device may change now: those
        of these requests, and those that have just their min_tokens."""
        first = [r for r, is_first in enumerate(rows.first_of_stay) if is_first] if any(rows.first_of_stay) else []
        for r in first:
            self._set(rows[r])
        if not self._any_free_at:
            return first
        return sorted({*first, *np.flatnonzero(rows.end == self.free_at[rows.slot]).tolist()})

    def _set(self, row: RowPlan) -> None:
        p, slot, random = row.request.params, row.cache.slot, row.request.params.temperature >= MIN_TEMPERATURE
        filters = (p.temperature, max(p.top_p, _TINY), p.min_p) if random else (0.0, 1.0, 0.0)
        self.floats[slot] = *filters, p.presence_penalty, p.frequency_penalty, p.repetition_penalty, has_bias(p)
        excludes = random and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        asks = p.logprobs is not None, p.prompt_logprobs is not None
        self.features[slot] = random, excludes, has_penalties(p), has_bias(p), *asks
        self.top_k[slot] = max(p.top_k, 0) if random else 0
        self.seed[slot] = np.array([row.request.seed & _UINT64 if random else 0], "<u8").view("<i4")  # low half first
        self.num_shared[slot], self.num_prompt[slot] = row.cache.num_shared, row.request.num_prompt_tokens
        self.free_at[slot] = row.request.num_prompt_tokens + p.min_tokens if p.min_tokens else 0
        self._any_free_at = bool(self.free_at.any())
        self.decode_step = None

    def pack(self, a: dict[str, np.ndarray], f: dict[str, np.ndarray], rows: Rows) -> None:
        """Fills a step's arrays, which hold padding, for these rows."""
        samples, slot = np.array(rows.samples), rows.slot
        at, drawing = np.flatnonzero(samples), slot[samples]
        a["samples"][: slot.size] = samples
        for name, values in zip(FLOATS, self.floats[drawing].T, strict=True):
            f[name][at] = values
        a["top_k"][at] = self.top_k[drawing]
        a["seed"][at] = self.seed[drawing]
        a["flags"][:-1] = self.features[drawing, :-1].any(axis=0)
        a["flags"][-1] = self.asks_of_prompts(rows)

    def asks_of_prompts(self, rows: Rows) -> bool:
        """Whether a row computes some of a prompt whose log-probabilities are asked for."""
        slot = rows.slot
        return bool((self.features[slot, -1] & (rows.start < self.num_prompt[slot])).any())


def has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def has_bias(params: SamplingParams) -> bool:
    """Whether the request reads its slot's bias row: for logit_bias, or to hold back stop tokens until min_tokens."""
    return bool(params.logit_bias) or params.min_tokens > 0


class Logprobs(NamedTuple):
    """Natural-log probabilities of the model itself, before penalties and temperature. Leading axis [R] or [T]."""

    chosen: jax.Array  # float32
    rank: jax.Array  # int32, 1 = most likely
    top_ids: jax.Array  # [..., MAX_LOGPROBS] int32
    top: jax.Array  # [..., MAX_LOGPROBS] float32


def sample(
    logits: jax.Array,
    batch: SamplingBatch,
    slots: SlotTables,
    agree: Callable[[jax.Array], jax.Array] = lambda tokens: tokens,
) -> tuple[jax.Array, Logprobs, SlotTables]:
    """logits [R, V] -> next tokens [R], their log-probabilities (zero unless asked for), the updated tables.

    `agree` maps the tokens of a device whose logits may mean nothing (an earlier pipeline stage) to the real ones.
    """
    num_slots = slots.last_token.shape[0]
    flags = batch.flags
    row = jnp.minimum(batch.slot, num_slots - 1)  # padding rows read some slot and write none
    adjusted = jax.lax.cond(
        flags["bias"],
        lambda x: x + jnp.where(batch.use_bias[:, None] > 0, slots.bias[row], 0),
        lambda x: x,
        logits,
    )
    adjusted = jax.lax.cond(flags["penalties"], lambda x: _penalise(x, slots.counts[row], batch), lambda x: x, adjusted)
    greedy = _argmax(adjusted)
    tokens = jax.lax.cond(
        flags["random"],
        lambda x: jnp.where(batch.temperature > 0, _draw(x, batch), greedy),
        lambda x: greedy,
        adjusted,
    )
    tokens = agree(tokens)
    logprobs = jax.lax.cond(
        flags["logprobs"], lambda x: _logprobs(x, tokens), lambda x: _no_logprobs(x.shape[0], x.shape[1]), logits
    )
    write = jnp.where(batch.samples, batch.slot, num_slots)
    slots = slots._replace(
        last_token=slots.last_token.at[write].set(tokens, mode="drop"),
        counts=slots.counts.at[write, tokens].add(1, mode="drop"),
    )
    return tokens, logprobs, slots


def prompt_logprobs(streams: jax.Array, batch: SamplingBatch, logits_of, vocab_size: int) -> Logprobs:
    """Log-probabilities of each token's successor in the prompt: leading axis [T], zero unless asked for.

    `logits_of` maps streams [S, t, D] to logits [t, V]; it is called on a few positions at a time.
    """
    num_tokens = streams.shape[1]
    step = min(_PROMPT_ROWS, num_tokens)
    padded = -(-num_tokens // step) * step

    def compute(x: jax.Array) -> Logprobs:
        x = jnp.pad(x, ((0, 0), (0, padded - num_tokens), (0, 0)))
        target = jnp.pad(batch.next_token, (0, padded - num_tokens))
        parts = jax.lax.map(
            lambda i: _logprobs(
                logits_of(jax.lax.dynamic_slice_in_dim(x, i * step, step, axis=1)),
                jax.lax.dynamic_slice_in_dim(target, i * step, step),
            ),
            jnp.arange(padded // step),
        )
        return Logprobs(*(part.reshape(padded, *part.shape[2:])[:num_tokens] for part in parts))

    return jax.lax.cond(
        batch.flags["prompt_logprobs"], compute, lambda x: _no_logprobs(num_tokens, vocab_size), streams
    )


def _penalise(logits: jax.Array, counts: jax.Array, batch: SamplingBatch) -> jax.Array:
    outputs = counts & (PROMPT_BIT - 1)
    repetition = batch.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    logits -= batch.frequency_penalty[:, None] * outputs
    return logits - batch.presence_penalty[:, None] * (outputs > 0)


def _argmax(x: jax.Array) -> jax.Array:
    """Lowest index of the maximum. Faster than jnp.argmax on XLA's CPU."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), index, x.shape[-1] - 1), axis=-1)


def _draw(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    """One token a row by inverse CDF: a single uniform number of (seed, position) a row."""
    temperature = jnp.where(batch.temperature > 0, batch.temperature, 1)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    weights = jnp.exp(scaled)
    weights = jax.lax.cond(batch.flags["filter"], lambda w: _filter(w, batch), lambda w: w, weights)

    def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

    cdf = jnp.cumsum(weights, axis=-1)
    target = jax.vmap(uniform)(batch.seed, batch.position)[:, None] * cdf[:, -1:]
    token = jnp.sum(cdf <= target, axis=-1).astype(jnp.int32)
    # rounding can put the target at the very end of the CDF
    return jnp.where(token < logits.shape[-1], token, _argmax(weights))


def _filter(weights: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Zeroes what min_p, then top_k, then top_p exclude; weights [R, V] are probabilities up to a factor, maximum 1."""
    weights = jnp.where(weights >= batch.min_p[:, None], weights, 0)
    k = jnp.where(batch.top_k > 0, batch.top_k, weights.shape[-1])[:, None]
    kth = _largest_threshold(weights, lambda keep: jnp.sum(keep, axis=-1, keepdims=True) >= k)
    weights = jnp.where(weights >= kth, weights, 0)
    # the fewest tokens that reach top_p: the largest threshold that keeps that much
    enough = batch.top_p[:, None] * jnp.sum(weights, axis=-1, keepdims=True)
    nucleus = _largest_threshold(
        weights, lambda keep: jnp.sum(jnp.where(keep, weights, 0), axis=-1, keepdims=True) >= enough
    )
    return jnp.where((weights >= nucleus) | (batch.top_p[:, None] >= 1), weights, 0)


def _largest_threshold(weights: jax.Array, enough) -> jax.Array:
    """The largest t [R, 1] with enough(weights >= t); weights are not negative, so their bits are ordered."""
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)

    def body(i: jax.Array, t: jax.Array) -> jax.Array:
        candidate = t | (jnp.int32(1) << (30 - i))
        return jnp.where(enough(bits >= candidate), candidate, t)

    found = jax.lax.fori_loop(0, 31, body, jnp.zeros((weights.shape[0], 1), jnp.int32))
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    normalised = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(normalised, tokens[:, None], axis=-1)
    top, ids = jax.lax.top_k(normalised, min(MAX_LOGPROBS, logits.shape[-1]))
    return Logprobs(chosen[:, 0], 1 + jnp.sum(normalised > chosen, axis=-1, dtype=jnp.int32), ids, top)


def _no_logprobs(rows: int, vocab_size: int) -> Logprobs:
    width = min(MAX_LOGPROBS, vocab_size)
    return Logprobs(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, width), jnp.int32),
        jnp.zeros((rows, width), jnp.float32),
    )
