"""Scales of quantised entries, by operations that a kernel has too: the one place of their limits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_INT8_FLOOR = 1e-30  # below it an entry counts as zero


class PowersOfTwo(NamedTuple):
    """Scales as an E8M0 byte b, 2**(b - 127): the least that brings a group's numbers to at most `limit`."""

    floor: float  # the least magnitude that is told from zero
    exponent: int  # of the limit
    mantissa: int  # the bits of its mantissa


FP8 = PowersOfTwo(1e-4, 8, 0x600000)  # 448; the floor is the release's, so that a scale is never less than 2**-22
FP4 = PowersOfTwo(6 * 2.0**-126, 2, 0x400000)  # 6


def scale_byte(most: jax.Array, kind: PowersOfTwo) -> jax.Array:
    """Of numbers whose largest magnitude is `most`, float32 and finite: uint32 below 2**8."""
    word = lax.bitcast_convert_type(jnp.maximum(most, kind.floor), jnp.uint32)
    return ((word + (0x7FFFFF - kind.mantissa)) >> 23) - kind.exponent


def value(byte: jax.Array) -> jax.Array:
    """An E8M0 scale, float32; infinite for byte 255."""
    return lax.bitcast_convert_type(byte << 23, jnp.float32)


def inverse(byte: jax.Array) -> jax.Array:
    """One over an E8M0 scale, float32."""
    return lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)


def int8_scale(most: jax.Array) -> jax.Array:
    """Of an entry whose largest magnitude is `most`, float32; 1 for one of zeros."""
    return jnp.where(most < _INT8_FLOOR, 1.0, most / 127)
