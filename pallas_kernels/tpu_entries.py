"""Tiled quantised latents as a TPU kernel decodes them in fast memory. Their layout is in `entry_format`.

Words and side words are one row of 128 lanes an entry. A word's bytes are channels W/4 apart, so that each of the four
planes of bytes is a run of channels in its lanes. Bytes are turned into numbers by arithmetic on 32-bit lanes, which
every generation has, unlike conversions of 8-bit floats.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.entry_format import FP8_GROUP, LANES, EntryFormat


def decode(words: jax.Array, side: jax.Array, form: EntryFormat, dtype: Any) -> jax.Array:
    """words [K, W / 4] and side [K, 128], an entry's words from lane 0 on, both uint32 -> entries [K, W]."""
    words, side = (lax.bitcast_convert_type(x, jnp.int32) for x in (words, side))
    lanes, low_words = words.shape[1], form.rope // 4
    lane = lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
    planes = []
    for b in range(4):
        codes = _byte(words, 8 * b)
        if form.name == "int8":
            scale = lax.bitcast_convert_type(side[:, low_words : low_words + 1], jnp.float32)
            planes.append(((codes ^ 128) - 128).astype(jnp.float32) * scale)
        else:
            # Groups of 64 channels, a byte each: those of up to 256 channels are in one word.
            first = b * lanes // FP8_GROUP
            word = side[:, low_words + first // 4 : low_words + first // 4 + 1]
            exponent = _byte(word, (first % 4 + lane // FP8_GROUP) * 8 & 24)
            planes.append(_e4m3(codes) * lax.bitcast_convert_type(exponent << 23, jnp.float32))
    low = _repeat_lanes(side, low_words, 4, lanes - form.rope)[:, :lanes]
    low = _byte(low, jnp.maximum(lane - (lanes - form.rope), 0) // low_words * 8)
    rotary = lax.bitcast_convert_type((_byte(words, 24) << 24) | (low << 16), jnp.float32)
    planes[3] = jnp.where(lane >= lanes - form.rope, rotary, planes[3])
    return jnp.concatenate(planes, axis=1).astype(dtype)


def _byte(words: jax.Array, shift: Any) -> jax.Array:
    """The byte from bit `shift` on, at most 24: 0..255."""
    return (words >> shift) & 255


def _e4m3(codes: jax.Array) -> jax.Array:
    """The numbers of E4M3 codes 0..255; NaN's codes give 480."""
    size = codes & 127
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    number = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(codes < 128, number, -number)


def _repeat_lanes(x: jax.Array, n: int, times: int, start: int) -> jax.Array:
    """x [K, 128] with its first n lanes `times` times in a row from lane `start` on, zeros elsewhere."""
    first = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < n, x, 0)
    parts = [pltpu.roll(first, start + i * n, 1) for i in range(times)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def shift_to_front(side: jax.Array, lane: int) -> jax.Array:
    """side [K, 128] with lanes `lane`.. from lane 0 on."""
    return pltpu.roll(side, LANES - lane, 1) if lane else side
