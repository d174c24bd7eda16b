"""The meaning, in jnp; also the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from pallas_kernels.compress.api import Pieces

_EMPTY = -1e30  # the maximum of no logits: finite, so that empty minus empty is 0 and not NaN


class _Sum(NamedTuple):
    """A softmax-weighted sum in progress; every array [..., channels]."""

    maximum: jax.Array
    denominator: jax.Array
    total: jax.Array


def _merge(a: _Sum, b: _Sum) -> _Sum:
    maximum = jnp.maximum(a.maximum, b.maximum)
    scale_a, scale_b = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return _Sum(maximum, a.denominator * scale_a + b.denominator * scale_b, a.total * scale_a + b.total * scale_b)


def _where(keep: jax.Array, a: jax.Array) -> _Sum:
    """`a` [NP, 3, channels] where keep [NP], else an empty sum."""
    keep = keep[:, None]
    return _Sum(jnp.where(keep, a[:, 0], _EMPTY), jnp.where(keep, a[:, 1], 0), jnp.where(keep, a[:, 2], 0))


def _choose(which: jax.Array, a: _Sum, b: _Sum) -> _Sum:
    return _Sum(*(jnp.where(which[:, None], x, y) for x, y in zip(a, b, strict=True)))


def _columns(a: _Sum, start: int, stop: int) -> _Sum:
    return _Sum(*(x[:, start:stop] for x in a))


def compress(
    values: jax.Array,
    logits: jax.Array,
    pieces: Pieces,
    state: jax.Array,
    row_position: jax.Array,
    *,
    ratio: int,
    overlap: bool,
) -> tuple[jax.Array, jax.Array]:
    channels = values.shape[1]
    decode = pieces.of_token is None  # then piece i is row i
    if not decode:
        state = _take_rows(state, pieces.row)
        row_position = jnp.take(row_position, pieces.row, mode="clip")
    open_before = pieces.first & (jax.lax.rem(row_position, ratio) != 0)
    here = _merge(_where(open_before, state[:, :, :channels]), _sum_pieces(values, logits, pieces))
    if not overlap:
        now = jnp.stack(here, axis=1)
        return here.total / here.denominator, _last(now, pieces, decode)

    width = channels // 2
    series_a = _columns(here, 0, width)
    kept = _where(row_position >= ratio, state[:, :, channels:])
    if decode:
        previous = kept
    else:
        previous = _choose(pieces.first, kept, _Sum(*(jnp.concatenate([x[:1], x[:-1]]) for x in series_a)))
    entry = _merge(previous, _columns(here, width, channels))
    overlap_now = _choose(pieces.complete, series_a, previous)
    now = jnp.concatenate([jnp.stack(here, axis=1), jnp.stack(overlap_now, axis=1)], axis=2)
    return entry.total / entry.denominator, _last(now, pieces, decode)


def _last(state: jax.Array, pieces: Pieces, decode: bool) -> jax.Array:
    """The state after each row's last piece, of the states [NP, 3, ...] after each piece."""
    return state if decode else _take_rows(state, pieces.last_of_row)


def _take_rows(states: jax.Array, index: jax.Array) -> jax.Array:
    """states [N, 3, ...] at index [M], as flat rows: XLA's gather of [3, channels] tiles overflows VMEM on tpu7x."""
    flat = states.reshape(states.shape[0], -1)
    return jnp.take(flat, index, axis=0, mode="clip").reshape(-1, *states.shape[1:])


def _sum_pieces(values: jax.Array, logits: jax.Array, pieces: Pieces) -> _Sum:
    """Softmax-weighted sums of this step's tokens, piece by piece: [NP, channels]."""
    num = pieces.row.shape[0]
    if pieces.of_token is None:
        return _Sum(logits, jnp.ones_like(logits), values)
    sorted_sum = {"num_segments": num, "indices_are_sorted": True}
    maximum = jax.ops.segment_max(logits, pieces.of_token, **sorted_sum)
    maximum = jnp.maximum(maximum, _EMPTY)
    weights = jnp.exp(logits - jnp.take(maximum, pieces.of_token, axis=0, mode="clip"))
    return _Sum(
        maximum,
        jax.ops.segment_sum(weights, pieces.of_token, **sorted_sum),
        jax.ops.segment_sum(weights * values, pieces.of_token, **sorted_sum),
    )
