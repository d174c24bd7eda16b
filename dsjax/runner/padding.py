"""How much of the steps' buckets is padding.  [no jax]"""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.runner.buckets import Bucket


@dataclass(frozen=True, kw_only=True)
class PaddingStats:
    """Tokens of all buckets run since the start, those of them that were padding, and the share; by kind of step.

    A decode step has one token a row; any other step, with chunks of prompts in it, is mixed.
    """

    num_decode_bucket_tokens: int
    num_decode_padded_tokens: int
    decode_padded_share: float  # in [0, 1]; 0 before the first step
    num_mixed_bucket_tokens: int
    num_mixed_padded_tokens: int
    mixed_padded_share: float


class Padding:
    """Told of every step that is sent."""

    def __init__(self):
        self._num_tokens = {True: 0, False: 0}  # of decode steps, and of mixed ones
        self._num_padded = {True: 0, False: 0}

    def add(self, bucket: Bucket, num_batches: int, num_tokens: int) -> None:
        """A step of `num_tokens` tokens in all of its data shards and micro-batches, each padded to `bucket`."""
        self._num_tokens[bucket.is_decode] += num_batches * bucket.num_tokens
        self._num_padded[bucket.is_decode] += num_batches * bucket.num_tokens - num_tokens

    def stats(self) -> PaddingStats:
        num, padded = self._num_tokens, self._num_padded
        return PaddingStats(
            num_decode_bucket_tokens=num[True],
            num_decode_padded_tokens=padded[True],
            decode_padded_share=padded[True] / max(1, num[True]),
            num_mixed_bucket_tokens=num[False],
            num_mixed_padded_tokens=padded[False],
            mixed_padded_share=padded[False] / max(1, num[False]),
        )
