"""The few shapes a step can have; all are compiled at warm-up.  [no jax]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.config import SchedulerConfig

BLOCK_QUERIES = 16  # queries of a row that share a read of its keys; 16 wastes little on a chunk's ragged end


@dataclass(frozen=True, order=True)
class Bucket:
    """A padded step: `num_tokens` tokens of at most `num_rows` rows; `block` queries share a block (1: decode)."""

    num_tokens: int
    num_rows: int
    block: int

    @property
    def is_decode(self) -> bool:
        """One token a row, so token r is row r."""
        return self.block == 1

    @property
    def num_blocks(self) -> int:
        """Enough for any split of the tokens over the rows: every row ends with one partly filled block."""
        if self.is_decode:
            return self.num_rows
        return min(self.num_tokens, self.num_tokens // self.block + self.num_rows)

    def num_pieces(self, ratio: int) -> int:
        """Enough parts of compression windows: a row begins and ends inside one."""
        if self.is_decode:
            return self.num_rows
        return min(self.num_tokens, self.num_tokens // ratio + 2 * self.num_rows)


class Buckets:
    """The grid: decode steps by their rows, other steps by tokens and, where there can be many rows, by few or many.

    Each bucket is a program that takes seconds to compile, so the grid is coarse: a step's work follows its tokens
    where it matters (experts, attention), and padding costs the rest little.
    """

    def __init__(self, config: SchedulerConfig, min_rows: int = 1):
        """`min_rows` > 1 where a one-row matmul is slow: bfloat16 on XLA's CPU takes a scalar path."""
        self.decode = [Bucket(rows, rows, 1) for rows in ladder(min_rows, max(config.max_num_seqs, min_rows), 2)]
        self.mixed = sorted(
            Bucket(tokens, rows, min(BLOCK_QUERIES, tokens))
            for tokens in ladder(min(16, config.max_num_batched_tokens), config.max_num_batched_tokens, 4)
            for rows in {min(rows, tokens) for rows in _few_or_many(config.max_num_seqs)}
        )

    def __iter__(self):
        return iter([*self.decode, *self.mixed])

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed)

    def choose(self, sizes: Sequence[tuple[int, int]]) -> Bucket:
        """The smallest bucket that holds each of the batches (one of every data shard and micro-batch), of so many rows
        and new tokens: a row has one or more."""
        rows = max(rows for rows, _ in sizes)
        if all(rows == tokens for rows, tokens in sizes):
            return next(b for b in self.decode if b.num_rows >= rows)
        most = max(tokens for _, tokens in sizes)
        return next(b for b in self.mixed if b.num_tokens >= most and b.num_rows >= rows)


def _few_or_many(max_num_seqs: int) -> tuple[int, ...]:
    """A step of one long prompt should not pay for a head over many padded rows."""
    return (8, max_num_seqs) if max_num_seqs > 16 else (max_num_seqs,)


def ladder(low: int, high: int, factor: int) -> list[int]:
    """low, low * factor, ... and high."""
    steps = []
    while low < high:
        steps.append(low)
        low *= factor
    return [*steps, high]
