"""The two quantised weight formats of released DeepSeek-V4 checkpoints, decoded and encoded on the host.  [no jax]

FP8: F8_E4M3 `[N, K]` with one scale per 128x128 tile, `[ceil(N/128), ceil(K/128)]`, E8M0 (powers of two) or float32.
FP4: two E2M1 codes per byte, `[N, K/2]` int8, the even column in the low nibble, with one E8M0 scale per row and
32 columns, `[N, ceil(K/32)]`. In both the scale multiplies.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8_BLOCK = 128
FP4_BLOCK = 32
FP8_MAX = 448.0
FP4_MAX = 6.0

_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_FP4_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Row b: the even and the odd column of byte b.
_FP4_PAIRS = np.stack([_FP4_CODES[np.arange(256) & 15], _FP4_CODES[np.arange(256) >> 4]], axis=-1)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def fp8_scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of an FP8 weight of `shape` [N, K]."""
    return ceil_div(shape[0], FP8_BLOCK), ceil_div(shape[1], FP8_BLOCK)


def fp4_scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the scales of an FP4 weight of unpacked `shape` [N, K]."""
    return shape[0], ceil_div(shape[1], FP4_BLOCK)


def dequantize_fp8(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """weight F8_E4M3 [N, K], scale E8M0 or float32 [ceil(N/128), ceil(K/128)] -> float32 [N, K]."""
    k = weight.shape[1]
    if scale.shape != fp8_scale_shape(weight.shape):
        raise ValueError(f"scale {scale.shape} does not fit an FP8 weight {weight.shape}")
    columns = np.repeat(scale_values(scale), FP8_BLOCK, axis=1)[:, :k]
    out = _FP8_VALUES[weight.view(np.uint8)]
    for block in range(len(columns)):
        out[block * FP8_BLOCK : (block + 1) * FP8_BLOCK] *= columns[block]
    return out


def dequantize_fp4(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """weight int8 [N, K/2], scale E8M0 or float32 [N, ceil(K/32)] -> float32 [N, K]."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    if scale.shape != fp4_scale_shape((n, k)):
        raise ValueError(f"scale {scale.shape} does not fit a packed FP4 weight {weight.shape}")
    out = _FP4_PAIRS[weight.view(np.uint8)].reshape(n, k)
    out *= np.repeat(scale_values(scale), FP4_BLOCK, axis=1)[:, :k]
    return out


def quantize_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [N, K] -> (F8_E4M3 [N, K], E8M0 [ceil(N/128), ceil(K/128)]).

    The scale of a tile is the least power of two under which its largest magnitude is at most 448, so values that
    came from an FP8 weight with power-of-two scales survive exactly.
    """
    n, k = weight.shape
    rows, cols = fp8_scale_shape(weight.shape)
    padded = np.zeros((rows * FP8_BLOCK, cols * FP8_BLOCK), np.float32)
    padded[:n, :k] = weight
    tiles = padded.reshape(rows, FP8_BLOCK, cols, FP8_BLOCK)
    exponent = _scale_exponent(np.abs(tiles).max(axis=(1, 3)), FP8_MAX)
    scaled = np.ldexp(tiles, -exponent[:, None, :, None]).reshape(padded.shape)[:n, :k]
    return scaled.astype(ml_dtypes.float8_e4m3fn), _to_e8m0(exponent)


def quantize_fp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [N, K], K even -> (int8 [N, K/2], E8M0 [N, ceil(K/32)]); exact for values that came from FP4."""
    n, k = weight.shape
    if k % 2:
        raise ValueError(f"an FP4 weight needs an even number of columns, got {weight.shape}")
    _, cols = fp4_scale_shape(weight.shape)
    padded = np.zeros((n, cols * FP4_BLOCK), np.float32)
    padded[:, :k] = weight
    groups = padded.reshape(n, cols, FP4_BLOCK)
    exponent = _scale_exponent(np.abs(groups).max(axis=2), FP4_MAX)
    scaled = np.ldexp(groups, -exponent[:, :, None]).reshape(padded.shape)[:, :k]
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(np.int8), _to_e8m0(exponent)


def scale_values(scale: np.ndarray) -> np.ndarray:
    """E8M0 or float scales as float32."""
    if scale.dtype == ml_dtypes.float8_e8m0fnu:
        return _E8M0_VALUES[scale.view(np.uint8)]
    return scale.astype(np.float32)


def _scale_exponent(largest: np.ndarray, limit: float) -> np.ndarray:
    """Least e with largest / 2**e <= limit, as int32; 0 where `largest` is 0."""
    mantissa, exponent = np.frexp(largest.astype(np.float64) / limit)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.clip(np.where(largest == 0, 0, exponent), -127, 127).astype(np.int32)


def _to_e8m0(exponent: np.ndarray) -> np.ndarray:
    return (exponent + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
