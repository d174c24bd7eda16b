"""Root-mean-square normalisation: by formula, and the native form in every company of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import native, rms_norm
from pallas_kernels.target import CPU, HOST, Target, traced_for

NATIVE = Target("cpu", HOST)
EPS = 1e-2


def inputs(shape: tuple[int, ...], dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    x = 0.1 * jax.random.normal(jax.random.key(0), shape)  # so small that epsilon counts
    return x.astype(dtype), jnp.linspace(-2, 2, shape[-1])


def normalised(target: Target, x: jax.Array, scale: jax.Array) -> np.ndarray:
    def run(x, scale):
        with traced_for(target):
            return rms_norm(x, scale, EPS)

    y = jax.jit(run)(x, scale)
    assert y.dtype == x.dtype and y.shape == x.shape
    return np.asarray(y)


def by_formula(x: jax.Array, scale: jax.Array) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return np.asarray(scale, np.float64) * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)


@pytest.mark.parametrize("target", [CPU, NATIVE], ids=["xla", "native"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 16), (1, 4096), (3, 512), (4, 5, 48), (300, 1024), (64,), (0, 32)], ids=str)
def test_equals_the_formula(shape, dtype, target):
    x, scale = inputs(shape, dtype)
    assert native.supports(x)
    # a float's rounding some times; a bfloat16's once, which is half of its last bit
    rtol = 1e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(normalised(target, x, scale).astype(np.float64), by_formula(x, scale), rtol=rtol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_row_is_the_same_in_any_company(dtype):
    x, scale = inputs((300, 1024), dtype)  # of several items
    together = normalised(NATIVE, x, scale)
    for first, stop in [(0, 1), (7, 8), (100, 231), (299, 300)]:
        np.testing.assert_array_equal(normalised(NATIVE, x[first:stop], scale), together[first:stop])


@pytest.mark.parametrize("width", [1, 24, 40])
def test_a_width_without_whole_vectors_is_left_to_xla(width):
    x, scale = inputs((3, width), jnp.float32)
    assert not native.supports(x) and not native.supports(x.astype(int))
    np.testing.assert_allclose(normalised(NATIVE, x, scale), by_formula(x, scale), rtol=1e-6)


def test_outside_of_what_is_traced_for_a_cpu_it_has_a_gradient():
    x, scale = inputs((3, 32), jnp.float32)
    got = jax.grad(lambda x: rms_norm(x, scale, EPS).sum())(x)
    step = np.zeros_like(x)
    step[1, 5] = 1e-4
    plus, minus = (by_formula(x + sign * step, scale).sum() for sign in (1, -1))
    np.testing.assert_allclose(got[1, 5], (plus - minus) / 2e-4, rtol=1e-3)
