"""Rotation of pairs of channels: by formula, and the native form against plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotary import native, rotate
from pallas_kernels.target import CPU, HOST, Target, traced_for


def table(tokens: int, half: int) -> tuple[jax.Array, jax.Array]:
    angle = jax.random.uniform(jax.random.key(1), (tokens, half), maxval=6.0)
    return jnp.cos(angle), jnp.sin(angle)


def rotated(target: Target, *args) -> jax.Array:
    def run(*args):
        with traced_for(target):
            return rotate(*args)

    return jax.jit(run, static_argnums=3)(*args)


def test_a_pair_is_a_complex_number():
    x = np.random.default_rng(0).normal(size=(5, 3, 32)).astype(np.float32)
    cos, sin = table(5, 8)
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    np.testing.assert_array_equal(got[..., :16], x[..., :16])
    want = (x[..., 16::2] + 1j * x[..., 17::2]) * (np.asarray(cos) + 1j * np.asarray(sin))[:, None]
    np.testing.assert_allclose(got[..., 16::2] + 1j * got[..., 17::2], want, atol=1e-6)


@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "half"), [((7, 32), 8), ((3, 4, 16), 8), ((70, 8, 128), 32), ((9, 2, 3, 48), 16)], ids=str
)
def test_native_code_equals_plain_jax(shape, half, dtype, rtol, eps):
    x = (0.1 * jax.random.normal(jax.random.key(0), shape)).astype(dtype)
    assert native.supports(x, half)
    args = x, *table(shape[0], half), eps
    got, want = rotated(Target("cpu", HOST), *args), rotated(CPU, *args)
    assert got.dtype == dtype and got.shape == shape
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=rtol, atol=1e-6)


def test_what_native_code_takes():
    x = jnp.zeros((2, 32))
    assert not native.supports(x, 4) and not native.supports(x[:, :24], 8) and not native.supports(x.astype(int), 8)
