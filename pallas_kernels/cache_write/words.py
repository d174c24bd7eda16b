"""Entries as 32-bit words on a TPU, in vectors of 128 lanes: the bytes are those of `pool.encode`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import scales
from pallas_kernels.cache_write import codes
from pallas_kernels.entry_format import FP4_GROUP, FP8_GROUP, LANES, EntryFormat

Blocks = list[jax.Array]  # [T, 128] each, one after the other along an entry


def encode(entries: jax.Array, form: EntryFormat) -> tuple[Blocks, jax.Array | None]:
    """entries [T, width] -> uint32 codes of its values, one a lane, and its side words from lane 0 on [T, 128]."""
    x = entries.astype(jnp.float32)
    blocks = [x[:, i : i + LANES] for i in range(0, form.width, LANES)]
    if form.name == "float32":
        return [codes.bits(b) for b in blocks], None
    if form.name == "bfloat16":
        return [codes.bfloat16(b) for b in blocks], None
    if form.name == "fp4":
        return _encode_fp4(blocks[0])
    lane = lax.broadcasted_iota(jnp.int32, blocks[0].shape, 1)
    first_rotary = LANES - form.rope  # in the last block
    numbers = [jnp.abs(b) for b in blocks]
    if form.rope:
        numbers[-1] = jnp.where(lane < first_rotary, numbers[-1], 0.0)
    if form.name == "int8":
        scale = scales.int8_scale(functools.reduce(jnp.maximum, [_most(n) for n in numbers]))
        values, words = [codes.int8(b / scale) for b in blocks], [codes.bits(scale)]
    elif not form.rope:
        byte = scales.scale_byte(_most(numbers[0]), scales.FP8)
        values, words = [codes.e4m3(blocks[0] * scales.inverse(byte))], [byte << 23]
    else:
        values, scale_bytes = [], []
        for b, size in zip(blocks, numbers, strict=True):
            inverses = jnp.zeros_like(b)
            for group in range(LANES // FP8_GROUP):
                here = lane // FP8_GROUP == group
                byte = scales.scale_byte(_most(jnp.where(here, size, 0.0)), scales.FP8)
                inverses = jnp.where(here, scales.inverse(byte), inverses)
                scale_bytes.append(byte)
            values.append(codes.e4m3(b * inverses))
        words = _join(scale_bytes[: form.num_groups])
    if not form.rope:
        return values, jnp.broadcast_to(words[0], blocks[0].shape)
    rotary = codes.bfloat16(blocks[-1])
    values[-1] = jnp.where(lane < first_rotary, values[-1], rotary >> 8)
    fours = form.rope // 4
    side = functools.reduce(
        jnp.bitwise_or, [pltpu.roll(rotary & 0xFF, form.rope - fours * k, axis=1) << (8 * k) for k in range(4)]
    )
    side = jnp.where(lane < fours, side, jnp.uint32(0))
    for i, word in enumerate(words):
        side = jnp.where(lane == fours + i, word, side)
    return values, side


def _encode_fp4(x: jax.Array) -> tuple[Blocks, jax.Array]:
    group = lax.broadcasted_iota(jnp.int32, x.shape, 1) // FP4_GROUP
    inverses, scale_bytes = jnp.zeros_like(x), []
    for g in range(LANES // FP4_GROUP):
        most = _most(jnp.where(group == g, jnp.abs(x), 0.0))
        byte = scales.scale_byte(most, scales.FP4)
        inverses = jnp.where(group == g, scales.inverse(byte), inverses)
        scale_bytes.append(byte)
    code = codes.e2m1(x * inverses)
    low = group < LANES // 2 // FP4_GROUP
    other = pltpu.roll(code, LANES // 2, axis=1)
    # Either half of the lanes has all bytes: an entry is in one of them.
    return [jnp.where(low, code | (other << 4), other | (code << 4))], jnp.broadcast_to(_join(scale_bytes)[0], x.shape)


def _most(sizes: jax.Array) -> jax.Array:
    return jnp.max(sizes, axis=1, keepdims=True)


def _join(scale_bytes: Blocks) -> Blocks:
    """Bytes [T, 1] -> words [T, 1], the low byte first."""
    fours = [scale_bytes[i : i + 4] for i in range(0, len(scale_bytes), 4)]
    return [functools.reduce(jnp.bitwise_or, [byte << (8 * k) for k, byte in enumerate(four)]) for four in fours]


def repeat(side: jax.Array, words: int, width: int) -> jax.Array:
    """side [T, 128] of `words` words, again in every group of so many lanes [T, width]."""
    if words == 1:  # in all lanes as it is
        return side if width == LANES else jnp.broadcast_to(side[:, :1], (side.shape[0], width))
    groups = [pltpu.roll(side, words * g, axis=1) if g else side for g in range(LANES // words)]
    return functools.reduce(jnp.bitwise_or, groups)


def store_values(values: Blocks, out: Any, own: tuple[int, ...]) -> None:
    """Puts codes where they are copied from: out [T, width], or joined to the words an entry has, out [T, *own]."""
    if not own:
        for i, block in enumerate(values):
            out[:, i * LANES : (i + 1) * LANES] = block
        return
    count = own[0] * own[1] // LANES
    size = len(values) // count  # codes of a word
    for i in range(count):
        # Rows of floats are packed row by row, bytes in four planes.
        parts = values[i * size : (i + 1) * size] if own[0] > 1 else values[i::count]
        word = functools.reduce(jnp.bitwise_or, [part << (32 // size * k) for k, part in enumerate(parts)])
        if own[0] > 1:
            out[:, i] = word
        else:
            out[:, 0, i * LANES : (i + 1) * LANES] = word
