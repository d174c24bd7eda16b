"""Rotary embedding: what XLA makes of its tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.model.rope import CosSin, cos_sin, rotate

FREQ = np.float32([1.0, 0.1, 0.01, 0.001])


def two_rotated(x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of x [T, heads, d], all heads and the first."""
    cos, sin = cos_sin(FREQ, positions)
    heads: CosSin = cos[:, None], sin[:, None]
    return rotate(x, heads), rotate(x[:, 0], (cos, sin))


def test_angles_are_computed_once() -> None:
    shapes = jax.ShapeDtypeStruct((16, 4, 24), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)
    text = jax.jit(two_rotated).lower(*shapes).compile().as_text() or ""
    assert (text.count(" cosine("), text.count(" sine(")) == (1, 1)


def test_pairs_turn_by_their_angle() -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 10)).astype(np.float32)
    positions = np.array([0, 5, 900])
    heads, first = two_rotated(jnp.asarray(x), jnp.asarray(positions))
    turned = (x[..., 2::2] + 1j * x[..., 3::2]) * np.exp(1j * positions[:, None, None] * FREQ.astype(np.float64))
    expected = np.concatenate([x[..., :2], np.stack([turned.real, turned.imag], -1).reshape(3, 2, 8)], axis=-1)
    np.testing.assert_allclose(heads, expected, atol=2e-4)  # float32 angles of 900 radians
    np.testing.assert_array_equal(first, heads[:, 0])
