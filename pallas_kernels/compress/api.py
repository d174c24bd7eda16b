"""Public function of the operation, and the layout of its inputs.

A piece is the part of one window of one row that is in this step: a run of at most `ratio` consecutive tokens.
A window's entry is a softmax-weighted sum, so a partly filled window is a running (maximum, denominator,
weighted sum) per channel; that is all the state a row needs, whatever the ratio. An overlapping compressor also
keeps the same three for series a of the last full window.

State of a row, float32: [3, channels] without overlap; with overlap [3, 2 * width + width], the current window's
series a and b, then the previous window's series a. Which part of it is meaningful follows from the row's position
alone, never from its values: what was never written may be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.compress import reference


class Pieces(NamedTuple):
    """NP pieces; padding pieces come last and have row R (out of range)."""

    of_token: jax.Array | None  # [T] piece of each token, ascending; NP for padding. None: token i is piece i (decode)
    row: jax.Array  # [NP]
    window: jax.Array  # [NP] which window of its row
    first: jax.Array  # [NP] bool: the row's first piece in this step
    complete: jax.Array  # [NP] bool: the window's last token is in this step
    entry_slot: jax.Array  # [NP] where the entry goes; NOWHERE if incomplete or already stored
    last_of_row: jax.Array  # [R] each row's last piece; NP for a row without tokens


def compress(
    values: jax.Array,  # [T, channels] float32
    logits: jax.Array,  # [T, channels] float32
    pieces: Pieces,
    state: jax.Array,  # [R, 3, channels (+ width)] each row's state before the step
    row_position: jax.Array,  # [R] each row's first position in this step
    *,
    ratio: int,
    overlap: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns pooled entries [NP, width] (meaningful where complete) and the rows' new state [R, 3, ...].

    Raises ValueError for shapes that do not fit.
    """
    channels = values.shape[1]
    expected = channels + channels // 2 if overlap else channels
    if values.shape != logits.shape or state.shape[1:] != (3, expected):
        raise ValueError(f"compress: values {values.shape}, logits {logits.shape}, state {state.shape} do not fit")
    return reference.compress(values, logits, pieces, state, row_position, ratio=ratio, overlap=overlap)
