"""Rotation of pairs of channels: by formula, and the native form against plain JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotary import native, normalise_and_rotate, rotate
from pallas_kernels.target import CPU, HOST, Target, traced_for

NATIVE = Target("cpu", HOST)


def table(tokens: int, half: int) -> tuple[jax.Array, jax.Array]:
    angle = jax.random.uniform(jax.random.key(1), (tokens, half), maxval=6.0)
    return jnp.cos(angle), jnp.sin(angle)


def run_for(target: Target, function: Callable[..., jax.Array], *args) -> jax.Array:
    def run(*args):
        with traced_for(target):
            return function(*args)

    return jax.jit(run)(*args)


def test_a_pair_is_a_complex_number():
    x = np.random.default_rng(0).normal(size=(5, 3, 32)).astype(np.float32)
    cos, sin = table(5, 8)
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    np.testing.assert_array_equal(got[..., :16], x[..., :16])
    want = (x[..., 16::2] + 1j * x[..., 17::2]) * (np.asarray(cos) + 1j * np.asarray(sin))[:, None]
    np.testing.assert_allclose(got[..., 16::2] + 1j * got[..., 17::2], want, atol=1e-6)


@pytest.mark.parametrize("target", [CPU, NATIVE], ids=["xla", "native"])
@pytest.mark.parametrize("has_scale", [True, False], ids=["scale", "plain"])
def test_what_is_rotated_is_normalised_before(has_scale, target):
    x, scale = 0.1 * jax.random.normal(jax.random.key(0), (5, 3, 48)), jnp.linspace(-2, 2, 48)
    cos, sin = table(5, 8)
    got = run_for(
        target, lambda x, cos, sin: normalise_and_rotate(x, cos, sin, 1e-2, scale if has_scale else None), x, cos, sin
    )
    wide = np.asarray(x, np.float64)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-2) * (np.asarray(scale) if has_scale else 1)
    np.testing.assert_allclose(got, rotate(jnp.asarray(wide, jnp.float32), cos, sin), rtol=1e-5, atol=1e-6)


SHAPES = [((1, 32), 8), ((7, 32), 8), ((3, 4, 16), 8), ((70, 8, 128), 32), ((9, 2, 3, 48), 16), ((700, 512), 32)]


@pytest.mark.parametrize("normalises", [False, True], ids=["plain", "normalised"])
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize(("shape", "half"), SHAPES, ids=str)
def test_native_code_equals_plain_jax(shape, half, dtype, rtol, normalises):
    x = (0.1 * jax.random.normal(jax.random.key(0), shape)).astype(dtype)
    assert native.supports(x, half)
    norm = (1e-2, jnp.linspace(0.5, 2, shape[-1]))

    def function(*args) -> jax.Array:
        return normalise_and_rotate(*args, *norm) if normalises else rotate(*args)

    args = x, *table(shape[0], half)
    got, want = run_for(NATIVE, function, *args), run_for(CPU, function, *args)
    assert got.dtype == dtype and got.shape == shape
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("target", [CPU, NATIVE], ids=["xla", "native"])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_floats_are_rounded_to_bfloat16_once(rows, target):
    x, scale = jax.random.normal(jax.random.key(0), (rows, 128)), jnp.linspace(0.5, 2, 128)
    args = x, *table(rows, 32)
    floats = run_for(target, lambda *args: normalise_and_rotate(*args, 1e-6, scale), *args)
    got = run_for(target, lambda *args: normalise_and_rotate(*args, 1e-6, scale, jnp.bfloat16), *args)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (got, floats.astype(jnp.bfloat16))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_row_is_the_same_in_any_company(dtype):
    x, scale = jax.random.normal(jax.random.key(0), (700, 512)).astype(dtype), jnp.linspace(0.5, 2, 512)
    args = x, *table(700, 32)  # of several items

    def run(*args) -> np.ndarray:
        return np.asarray(run_for(NATIVE, lambda *args: normalise_and_rotate(*args, 1e-6, scale), *args))

    together = run(*args)
    for first, stop in [(0, 1), (131, 132), (200, 463), (699, 700)]:
        np.testing.assert_array_equal(run(*(a[first:stop] for a in args)), together[first:stop])


def test_what_native_code_takes():
    x = jnp.zeros((2, 32))
    assert not native.supports(x, 4) and not native.supports(x[:, :24], 8) and not native.supports(x.astype(int), 8)
    bfloat16 = jnp.dtype(jnp.bfloat16)
    assert native.supports(x, 8, bfloat16) and not native.supports(x.astype(bfloat16), 8, x.dtype)
