"""Codes of numbers by integer arithmetic, element by element: what `pool.encode` does, in operations every core has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def bits(x: jax.Array) -> jax.Array:
    """Of float32, as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def bfloat16(x: jax.Array) -> jax.Array:
    """The nearest bfloat16 of finite float32, as uint32 below 2**16."""
    word = bits(x)
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16


def e4m3(x: jax.Array) -> jax.Array:
    """The nearest E4M3 of float32 of at most 448, as uint32 below 2**8."""
    word = bits(x)
    size = word & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # A float32 above 2**14 has steps of 2**-9, as E4M3 has below 2**-6.
    small = bits(jnp.abs(x) + 2.0**14) & 15
    return jnp.where(jnp.abs(x) < 2.0**-6, small, normal) | ((word >> 24) & 0x80)


def e2m1(x: jax.Array) -> jax.Array:
    """The nearest E2M1 of float32 of at most 6, as uint32 below 2**4."""
    word = bits(x)
    size = word & 0x7FFFFFFF
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - (126 << 1)
    small = bits(jnp.abs(x) + 2.0**22) & 3  # steps of one half
    return jnp.where(jnp.abs(x) < 1, small, normal) | ((word >> 28) & 8)


def int8(x: jax.Array) -> jax.Array:
    """The nearest integer of float32 within -127 .. 127, in two's complement, as uint32 below 2**8."""
    return (bits(x + 1.5 * 2.0**23)) & 0xFF  # there a float32 has steps of one
