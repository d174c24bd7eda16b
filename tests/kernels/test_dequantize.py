"""FP8 and FP4 weights widened inside a program: the same numbers as on the host, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsjax import quant
from pallas_kernels.dequantize import dequantize

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def widen(codes, scale, dtype=np.float32) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(dequantize, dtype=dtype))(codes, scale))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_fp4_code_under_every_scale_of_a_normal_number(dtype):
    # 0.5 times 2 ** (2 - 127) is the least normal float32; below it devices flush
    for byte in range(2, 249):
        codes = np.tile(np.arange(-128, 128, dtype=np.int8), (1, 1))  # [N = 1, K / 2]: every pair of codes
        scale = np.full((1, 16), byte, np.uint8)
        want = quant.dequantize_fp4(codes, scale.view(E8M0))
        np.testing.assert_array_equal(widen(codes.T, scale.T, dtype).T.astype(np.float32), want)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_fp8_value(dtype):
    values = np.arange(256, dtype=np.uint8).view(E4M3)
    codes = np.tile(values[np.isfinite(values.astype(np.float32))], (129, 1))  # [129, 254]: a tile and a bit
    scale = (2.0 ** np.array([[-20, 3], [0, 40]])).astype(np.float32)
    want = quant.dequantize_fp8(codes, scale)
    np.testing.assert_array_equal(widen(codes.T, scale.T, dtype).T.astype(np.float32), want)


def test_scales_that_are_no_powers_of_two_round_once():
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(3, 128, 256)).astype(E4M3)  # a stack
    scale = rng.uniform(0.1, 1, (3, 1, 2)).astype(np.float32)
    for i in range(3):
        want = quant.dequantize_fp8(codes[i], scale[i])
        np.testing.assert_array_equal(widen(codes, scale)[i], want)
        rounded = want.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(widen(codes, scale, ml_dtypes.bfloat16)[i], rounded)


def test_groups_of_fp4_that_are_cut():
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (5, 24)).astype(np.int8)  # K = 48: one and a half groups
    scale = rng.integers(100, 140, (5, 2)).astype(np.uint8)
    np.testing.assert_array_equal(widen(codes.T, scale.T).T, quant.dequantize_fp4(codes, scale.view(E8M0)))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="codes of float32 must be float8_e4m3fn"):
        dequantize(jnp.zeros((4, 4)), jnp.ones((1, 1)), jnp.float32)
    with pytest.raises(ValueError, match=r"scale \(1, 1\) float32 must be \(2, 1\) float32"):
        dequantize(jnp.zeros((129, 4), E4M3), jnp.ones((1, 1)), jnp.float32)
    with pytest.raises(ValueError, match=r"scale \(1, 4\) float32 must be \(1, 4\) uint8"):
        dequantize(jnp.zeros((16, 4), jnp.int8), jnp.ones((1, 4)), jnp.float32)
