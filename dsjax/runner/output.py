"""What comes back from a step: on the device one vector a data shard and micro-batch, on the host arrays by row.

One vector means one transfer, and one collective where shards or stages have to be brought together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.request import MAX_LOGPROBS
from dsjax.runner.buckets import Bucket
from dsjax.runner.sampling import Logprobs


class DeviceOutput(NamedTuple):
    """The same on the device, for D data shards with M micro-batches each; every device has all of it."""

    packed: jax.Array  # [D, M, n] int32, see `pack`
    logits: jax.Array | None  # [D, M, T, V]
    draft_logits: jax.Array | None  # [D, M, T, V]


class Sent(NamedTuple):
    """A step on its way."""

    output: DeviceOutput
    bucket: Bucket
    vocab_size: int
    sizes: tuple[tuple[tuple[int, int], ...], ...]  # rows and tokens of each micro-batch of each shard


def pack(tokens: jax.Array, logprobs: Logprobs, prompt_logprobs: Logprobs) -> jax.Array:
    """[n] int32: all arrays one after the other, floats by their bits."""
    arrays = [tokens, *logprobs, *prompt_logprobs]
    flat = [x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays]
    return jnp.concatenate([x.reshape(-1) for x in flat])


def _take_logprobs(vector: np.ndarray, num: int, vocab_size: int) -> Logprobs:
    """Cuts the logprobs of `num` rows or tokens out of the beginning of what `pack` made."""
    width, offset = min(MAX_LOGPROBS, vocab_size), 0

    def take(dtype: type, *shape: int) -> np.ndarray:
        nonlocal offset
        size = math.prod(shape)
        offset += size
        return vector[offset - size : offset].view(dtype).reshape(shape)

    fields = take(np.float32, num), take(np.int32, num), take(np.int32, num, width), take(np.float32, num, width)
    return Logprobs(*fields)  # type: ignore[arg-type]


class StepOutput:
    """A step's results on the host, in the order of the plan's rows and of their tokens, without padding."""

    def __init__(self, sent: Sent):
        """Waits for them."""
        self._sent = sent
        self._packed = np.asarray(sent.output.packed)

    def _parts(self) -> Iterator[tuple[int, int, int, int]]:
        """(shard, micro-batch, rows, tokens)"""
        return ((d, m, *size) for d, sizes in enumerate(self._sent.sizes) for m, size in enumerate(sizes))

    @cached_property
    def tokens(self) -> np.ndarray:
        """[rows] int32, meaningful where the row samples."""
        return _join([self._packed[d, m, :rows] for d, m, rows, _ in self._parts()])

    @cached_property
    def logprobs(self) -> Logprobs:
        """[rows]"""
        num, parts = self._sent.bucket.num_rows, []
        for d, m, rows, _ in self._parts():
            found = _take_logprobs(self._packed[d, m, num:], num, self._sent.vocab_size)
            parts.append([x[:rows] for x in found])
        return Logprobs(*map(_join, zip(*parts, strict=True)))  # type: ignore[arg-type]

    @cached_property
    def prompt_logprobs(self) -> Logprobs:
        """[tokens]"""
        num, parts = self._sent.bucket.num_tokens, []
        for d, m, _, tokens in self._parts():
            vector = self._packed[d, m]  # these are its end
            begin = vector.size - num * (2 + 2 * min(MAX_LOGPROBS, self._sent.vocab_size))
            found = _take_logprobs(vector[begin:], num, self._sent.vocab_size)
            parts.append([x[:tokens] for x in found])
        return Logprobs(*map(_join, zip(*parts, strict=True)))  # type: ignore[arg-type]

    @cached_property
    def logits(self) -> np.ndarray | None:
        """[tokens, V] float32 with all_logits."""
        return self._of_tokens(self._sent.output.logits)

    @cached_property
    def draft_logits(self) -> np.ndarray | None:
        """[tokens, V] float32 with all_logits, of a model loaded with its MTP block."""
        return self._of_tokens(self._sent.output.draft_logits)

    def _of_tokens(self, array: jax.Array | None) -> np.ndarray | None:
        if array is None:
            return None
        host = jax.device_get(array)
        return _join([host[d, m, :tokens] for d, m, _, tokens in self._parts()])


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
