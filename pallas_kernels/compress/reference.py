"""The meaning, in jnp; also the GPU's path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.compress.sums import EMPTY, Sum, merge, where
from pallas_kernels.rotary import normalise_and_rotate
from pallas_kernels.target import Target

if TYPE_CHECKING:
    from pallas_kernels.compress.api import Finish, Pieces


def compress(
    values: jax.Array,
    logits: jax.Array,
    pieces: Pieces,
    states: jax.Array,
    row_slot: jax.Array,
    row_position: jax.Array,
    finish_with: Finish,
    *,
    ratio: int,
    overlap: bool,
    dtype: jnp.dtype,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    held = states.at[row_slot].get(mode="clip")
    entries, held = pool(values, logits, pieces, held, row_position, ratio=ratio, overlap=overlap)
    return finish(entries, finish_with, dtype), states.at[row_slot].set(held, mode="drop")


def finish(pooled: jax.Array, how: Finish, dtype: jnp.dtype) -> jax.Array:
    """Pooled entries [..., width] float32 -> normalised, rotated, in `dtype`."""
    return normalise_and_rotate(pooled, how.cos, how.sin, how.eps, how.scale, dtype)


def pool(
    values: jax.Array,
    logits: jax.Array,
    pieces: Pieces,
    held: jax.Array,  # [R, 3 * channels] the rows' states
    row_position: jax.Array,
    *,
    ratio: int,
    overlap: bool,
) -> tuple[jax.Array, jax.Array]:
    """Pooled entries [NP, width] float32 and the rows' states after the step."""
    channels = values.shape[1]
    decode = pieces.of_token is None  # then piece i is row i
    if not decode:
        held = jnp.take(held, pieces.row, axis=0, mode="clip")
        row_position = jnp.take(row_position, pieces.row, mode="clip")
    midst = pieces.first & (jax.lax.rem(row_position, ratio) != 0)  # the window began before the step
    before = Sum(*jnp.split(held, 3, axis=1))
    here = _sum_pieces(values, logits, pieces)
    if overlap:
        width = channels // 2
        a, b, a_before, e_before = here.lanes(0, width), here.lanes(width), before.lanes(0, width), before.lanes(width)
        a = merge(a, where(midst, a_before))
        last_a = where(pieces.first & (row_position >= ratio), a_before)  # series a of the window before
        if not decode:
            last_a = where(pieces.first, last_a, Sum(*(jnp.concatenate([x[:1], x[:-1]]) for x in a)))
        e = merge(b, where(midst, e_before, last_a))
        here = Sum(*(jnp.concatenate(x, axis=1) for x in zip(a, e, strict=True)))
    else:
        width = channels
        e = here = merge(here, where(midst, before))
    after = jnp.concatenate(here, axis=1)
    if not decode:
        after = jnp.take(after, pieces.last_of_row, axis=0, mode="clip")
    return e.total / e.denominator, after


def _sum_pieces(values: jax.Array, logits: jax.Array, pieces: Pieces) -> Sum:
    """Of this step's tokens, piece by piece: [NP, channels]."""
    num = pieces.row.shape[0]
    if pieces.of_token is None:
        return Sum(logits, jnp.ones_like(logits), values)
    sorted_sum = {"num_segments": num, "indices_are_sorted": True}
    maximum = jax.ops.segment_max(logits, pieces.of_token, **sorted_sum)
    maximum = jnp.maximum(maximum, EMPTY)
    weights = jnp.exp(logits - jnp.take(maximum, pieces.of_token, axis=0, mode="clip"))
    return Sum(
        maximum,
        jax.ops.segment_sum(weights, pieces.of_token, **sorted_sum),
        jax.ops.segment_sum(weights * values, pieces.of_token, **sorted_sum),
    )
