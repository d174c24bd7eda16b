"""What comes back from a step: on the device one vector a data shard and micro-batch, on the host arrays by row.

One vector means one transfer, and one collective where shards or stages have to be brought together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.request import MAX_LOGPROBS
from dsjax.runner.buckets import Bucket
from dsjax.runner.sampling import Logprobs


class StepOutput(NamedTuple):
    """A step's results on the host, in the order of the plan's rows and of their tokens, without padding."""

    tokens: np.ndarray  # [rows] int32, meaningful where the row samples
    logprobs: Logprobs  # [rows]
    prompt_logprobs: Logprobs  # [tokens]
    logits: np.ndarray | None  # [tokens, V] float32 with all_logits
    draft_logits: np.ndarray | None  # [tokens, V] float32 with all_logits, of a model loaded with its MTP block


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
    num_new: tuple[tuple[tuple[int, ...], ...], ...]  # new tokens of each row of each micro-batch of each shard


def pack(tokens: jax.Array, logprobs: Logprobs, prompt_logprobs: Logprobs) -> jax.Array:
    """[n] int32: all arrays one after the other, floats by their bits."""
    arrays = [tokens, *logprobs, *prompt_logprobs]
    flat = [x if x.dtype == jnp.int32 else jax.lax.bitcast_convert_type(x, jnp.int32) for x in arrays]
    return jnp.concatenate([x.reshape(-1) for x in flat])


def _unpack(vector: np.ndarray, bucket: Bucket, vocab_size: int) -> tuple[np.ndarray, Logprobs, Logprobs]:
    width = min(MAX_LOGPROBS, vocab_size)
    offset = 0

    def take(dtype: type, *shape: int) -> np.ndarray:
        nonlocal offset
        size = math.prod(shape)
        offset += size
        return vector[offset - size : offset].view(dtype).reshape(shape)

    def logprobs(num: int) -> Logprobs:
        fields = take(np.float32, num), take(np.int32, num), take(np.int32, num, width), take(np.float32, num, width)
        return Logprobs(*fields)  # type: ignore[arg-type]

    tokens = take(np.int32, bucket.num_rows)
    return tokens, logprobs(bucket.num_rows), logprobs(bucket.num_tokens)


def collect(sent: Sent) -> StepOutput:
    """Waits for the results and brings them to the host, padding left out."""
    packed = np.asarray(sent.output.packed)
    tokens, rows, prompts = [], [], []
    used: list[tuple[int, int, int]] = []
    for shard, batches in enumerate(sent.num_new):
        for m, num_new in enumerate(batches):
            num_rows, num_tokens = len(num_new), sum(num_new)
            drawn, logprobs, prompt = _unpack(packed[shard, m], sent.bucket, sent.vocab_size)
            tokens.append(drawn[:num_rows])
            rows.append(Logprobs(*(x[:num_rows] for x in logprobs)))
            prompts.append(Logprobs(*(x[:num_tokens] for x in prompt)))
            used.append((shard, m, num_tokens))

    def logits(array: jax.Array | None) -> np.ndarray | None:
        if array is None:
            return None
        host = jax.device_get(array)
        return np.concatenate([host[shard, m, :num] for shard, m, num in used])

    return StepOutput(
        tokens=np.concatenate(tokens),
        logprobs=_join(rows),
        prompt_logprobs=_join(prompts),
        logits=logits(sent.output.logits),
        draft_logits=logits(sent.output.draft_logits),
    )


def _join(parts: Sequence[Logprobs]) -> Logprobs:
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))  # type: ignore[arg-type]
