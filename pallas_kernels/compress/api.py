"""Public function of the operation, and the layout of its inputs.

A piece is the part of one window of one row that is in this step: a run of at most `ratio` consecutive tokens.
A window's entry is a softmax-weighted sum, so a partly filled window is a running (maximum, denominator, weighted sum)
per channel; that is all the state a row needs, whatever the ratio. With overlap, entry w is made of series a of window
w - 1 and series b of window w.

State of a row, float32 [3 * channels]: maxima, denominators, weighted sums. With overlap the channels are series a of
the current window, then the entry in the making (series a of the window before and series b of this one, so far);
after a window's last token series a is what the next entry begins with. Which part of it is meaningful follows from the
row's position alone, never from its values: what was never written may be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.compress import native, reference, tpu
from pallas_kernels.target import CPU, Target


class Pieces(NamedTuple):
    """NP pieces; padding pieces come last and have row R (out of range)."""

    of_token: jax.Array | None  # [T] piece of each token, ascending; NP for padding. None: token i is piece i (decode)
    row: jax.Array  # [NP]
    window: jax.Array  # [NP] which window of its row
    first: jax.Array  # [NP] bool: the row's first piece in this step
    complete: jax.Array  # [NP] bool: the window's last token is in this step
    entry_slot: jax.Array  # [NP] where the entry goes; NOWHERE if incomplete or already stored
    last_token: jax.Array  # [NP] packed index of its last token; T for padding
    last_of_row: jax.Array  # [R] each row's last piece; any for a row without tokens


class Finish(NamedTuple):
    """What becomes of a pooled entry: RMS norm, then a rotation of its last channels."""

    scale: jax.Array  # [width] of the norm
    eps: float
    cos: jax.Array  # [NP, r / 2], of the angles at each piece's window
    sin: jax.Array


def compress(
    values: jax.Array,  # [T, channels] float32
    logits: jax.Array,  # [T, channels] float32
    pieces: Pieces,
    states: jax.Array,  # [slots, 3 * channels] float32
    row_slot: jax.Array,  # [R] each row's state; out of range for rows without tokens, which are the last
    row_position: jax.Array,  # [R] each row's first position in this step
    finish: Finish,
    *,
    ratio: int,
    overlap: bool,
    dtype: jnp.dtype,
    target: Target = CPU,
) -> tuple[jax.Array, jax.Array]:
    """Entries [NP, width] in `dtype` (meaningful where complete), and the states with the rows' updated.

    On a GPU it is the jnp path: XLA makes four launches of a decode step's and updates the states in place, so that a
    kernel would have little to save. Raises ValueError for shapes that do not fit.
    """
    channels = values.shape[1]
    width = channels // 2 if overlap else channels
    if values.shape != logits.shape or states.shape[1:] != (3 * channels,) or finish.scale.shape != (width,):
        raise ValueError(
            f"compress: values {values.shape}, logits {logits.shape}, states {states.shape}, scale "
            f"{finish.scale.shape} do not fit"
        )
    run = reference.compress
    if tpu.supports(width, finish, target):
        run = tpu.compress
    elif native.supports(width, target):
        run = native.compress
    return run(
        values,
        logits,
        pieces,
        states,
        row_slot,
        row_position,
        finish,
        ratio=ratio,
        overlap=overlap,
        dtype=dtype,
        target=target,
    )
