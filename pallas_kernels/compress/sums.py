"""Softmax-weighted sums in progress, as arrays of rows and channels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

EMPTY = -1e30  # the maximum of no logits: finite, so that empty minus empty is 0 and not NaN


class Sum(NamedTuple):
    """Arrays [rows, channels]."""

    maximum: jax.Array
    denominator: jax.Array
    total: jax.Array

    def lanes(self, start: int, stop: int | None = None) -> Sum:
        return Sum(*(x[:, start:stop] for x in self))


def merge(a: Sum, b: Sum) -> Sum:
    maximum = jnp.maximum(a.maximum, b.maximum)
    scale_a, scale_b = jnp.exp(a.maximum - maximum), jnp.exp(b.maximum - maximum)
    return Sum(maximum, a.denominator * scale_a + b.denominator * scale_b, a.total * scale_a + b.total * scale_b)


def where(which: jax.Array, a: Sum, b: Sum | None = None) -> Sum:
    """`a` in the rows which [rows] or [rows, 1], else `b`, or an empty sum."""
    which = which.reshape(-1, 1)
    others = b or (EMPTY, 0.0, 0.0)
    return Sum(*(jnp.where(which, x, y) for x, y in zip(a, others, strict=True)))
