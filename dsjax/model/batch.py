"""What one packed, ragged step works on. The runner fills it in numpy; the model only reads it.

T tokens of R rows lie one row after the other; padding tokens come last. Every row adds one or more new tokens,
whether they are a prompt, a chunk of it or the one token of a decode step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from dsjax.cache.spec import EntryKind
from pallas_kernels.blocks import QueryBlocks
from pallas_kernels.compress import Pieces


class ForwardBatch(NamedTuple):
    """Arrays are int32 unless said otherwise. NOWHERE marks a slot that is not to be written."""

    token_ids: jax.Array  # [T]
    positions: jax.Array  # [T] 0 for padding
    num_tokens: jax.Array  # [] tokens that are not padding
    row_slot: jax.Array  # [R] STATE slot of each row; NOWHERE for padding rows
    row_position: jax.Array  # [R] position of the row's first token
    row_last: jax.Array  # [R] packed index of the row's last token; 0 for padding rows
    blocks: QueryBlocks  # of packed tokens
    window_slot: jax.Array  # [T] where the token's window row goes
    tables: dict[EntryKind, jax.Array]  # [R, P] page ids, by kind
    pieces: dict[EntryKind, Pieces]  # of the compressed kinds the model has
