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
    return _Sum(
        maximum, a.denominator * scale_a + b.denominator * scale_b, a.total * scale_a + b.total * scale_b
    )


def _where(keep: jax.Array, a: _Sum) -> _Sum:
    """`a` where keep [...], else an empty sum."""
    keep = keep[:, None]
    return _Sum(
        jnp.where(keep, a.maximum, _EMPTY), jnp.where(keep, a.denominator, 0), jnp.where(keep, a.total, 0)
    )


def _choose(which: jax.Array, a: _Sum, b: _Sum) -> _Sum:
    return _Sum(*(jnp.where(which[:, None], x, y) for x, y in zip(a, b, strict=True)))


def _take(a: _Sum, index: jax.Array) -> _Sum:
    return _Sum(*(jnp.take(x, index, axis=0, mode="clip") for x in a))


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
    before = _Sum(state[:, 0], state[:, 1], state[:, 2])  # of each row
    partial = _where(row_position % ratio != 0, _columns(before, 0, channels))
    start = _where(pieces.first, _take(partial, pieces.row))
    here = _merge(start, _sum_pieces(values, logits, pieces))
    last = pieces.last_of_row
    if not overlap:
        now = _take(here, last)
        return here.total / here.denominator, jnp.stack(now, axis=1)

    width = channels // 2
    series_a = _columns(here, 0, width)
    kept = _where(row_position >= ratio, _columns(before, channels, channels + width))
    previous = _choose(pieces.first, _take(kept, pieces.row), _take(series_a, jnp.arange(-1, here[0].shape[0] - 1)))
    entry = _merge(previous, _columns(here, width, channels))
    closed = jnp.take(pieces.complete, last, mode="clip")
    overlap_now = _choose(closed, _take(series_a, last), _take(previous, last))
    now = [jnp.concatenate([c, o], axis=1) for c, o in zip(_take(here, last), overlap_now, strict=True)]
    return entry.total / entry.denominator, jnp.stack(now, axis=1)


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
