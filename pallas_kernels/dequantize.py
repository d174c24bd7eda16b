"""Weights in a checkpoint's own form become numbers, inside the program that uses them.

FP8: E4M3 [..., K, N] and float32 scales [..., ceil(K/128), ceil(N/128)], one a tile of 128 x 128.
FP4: int8 [..., K/2, N], two E2M1 codes a byte along K, the even one in the low nibble, and E8M0 scales as their bytes,
uint8 [..., ceil(K/32), N]: byte b is 2 ** (b - 127). K is what a matmul sums over.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FP8_BLOCK = 128
FP4_BLOCK = 32


def dequantize(codes: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The weight [..., K, N]. Exact in float32 and bfloat16 where scales are powers of two, else rounded once.

    Raises ValueError for another type of `codes`, or a scale that does not fit.
    """
    if codes.dtype == jnp.float8_e4m3fn:
        k, n = codes.shape[-2:]
        _check(codes, scale, (-(-k // FP8_BLOCK), -(-n // FP8_BLOCK)), jnp.float32)
        tiles = jnp.repeat(jnp.repeat(scale, FP8_BLOCK, axis=-2)[..., :k, :], FP8_BLOCK, axis=-1)[..., :n]
        return (codes.astype(jnp.float32) * tiles).astype(dtype)
    if codes.dtype == jnp.int8:
        k, n = 2 * codes.shape[-2], codes.shape[-1]
        _check(codes, scale, (-(-k // FP4_BLOCK), n), jnp.uint8)
        pair = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        values = jnp.stack([e2m1_sixty_fourth(pair & 15), e2m1_sixty_fourth(pair >> 4)], axis=-2)
        values = values.reshape(*codes.shape[:-2], k, n).astype(dtype)
        # 64 times 2 ** (b - 127): a normal number also for b = 0, whose own value devices flush to zero.
        bits = (scale.astype(jnp.uint32) + 6) << 23
        groups = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
        return values * jnp.repeat(groups, FP4_BLOCK, axis=-2)[..., :k, :]
    raise ValueError(f"dequantize: codes of {codes.dtype} must be float8_e4m3fn (FP8) or int8 (packed FP4)")


def e2m1_sixty_fourth(code: jax.Array) -> jax.Array:
    """E2M1 codes 0..15, uint8 -> E4M3: the same sign, exponent and mantissa bits there are the value / 64."""
    return jax.lax.bitcast_convert_type(((code & 8) << 4) | ((code & 7) << 2), jnp.float8_e4m3fn)


def _check(codes: jax.Array, scale: jax.Array, want: tuple[int, int], dtype) -> None:
    shape = (*codes.shape[:-2], *want)
    if scale.shape != shape or scale.dtype != dtype:
        raise ValueError(
            f"dequantize: scale {scale.shape} {scale.dtype} must be {shape} {jnp.dtype(dtype)} for codes {codes.shape} "
            f"{codes.dtype}"
        )
