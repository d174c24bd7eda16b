"""The grouped matmul on a TPU: each tile of rows times its group's matrix, FP8 and FP4 widened in fast memory.

A grid step multiplies one tile of rows by one slice of columns. Tiles are the inner axis, so a group's slice stays in
fast memory while its tiles pass; which slice comes next is read ahead from the tile plan. Tiles past the ones in use
name the last group and are skipped, so they move no weights. At decode the weights are what is read, once each; FP4
reads a quarter of bfloat16's bytes, and its two nibbles (even and odd rows of K) are multiplied by the even and the odd
columns of x, which saves interleaving them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dequantize import FP4_BLOCK, FP8_BLOCK
from pallas_kernels.target import Target, dot_precision

_COLUMNS = 256  # of a slice; a multiple of the FP8 tile


def grouped_matmul(
    x: jax.Array,  # [P, K]
    weights: jax.Array,  # [G, K, N], or packed FP4 [G, K / 2, N]
    group: jax.Array,  # [P / tile_rows]
    num_tiles: jax.Array,  # []
    scale: jax.Array | None,
    *,
    target: Target,
) -> jax.Array:
    """[P, N] float32; rows of unused tiles are zero."""
    num_rows, k = x.shape
    n = weights.shape[2]
    max_tiles = group.shape[0]
    tile_rows = num_rows // max_tiles
    columns = _COLUMNS if n % _COLUMNS == 0 else n
    packed = weights.dtype == jnp.int8
    rows = pl.BlockSpec((tile_rows, k // 2 if packed else k), lambda c, i, *_: (i, 0))
    inputs, specs = ([x[:, 0::2], x[:, 1::2]], [rows, rows]) if packed else ([x], [rows])
    inputs.append(weights)
    specs.append(pl.BlockSpec((1, weights.shape[1], columns), lambda c, i, group, _: (group[i], 0, c)))
    kernel = functools.partial(_dense, dtype=x.dtype)
    if packed:
        assert scale is not None
        kernel = functools.partial(_fp4, dtype=x.dtype)
        inputs.append(scale)
        specs.append(pl.BlockSpec((1, scale.shape[1], columns), lambda c, i, group, _: (group[i], 0, c)))
    elif scale is not None:
        # A scale a tile of 128 x 128, repeated along N: a slice's scales are then one aligned block.
        wide = jnp.repeat(scale, FP8_BLOCK, axis=2)[:, :, :n]
        kernel = functools.partial(_fp8, dtype=x.dtype)
        inputs.append(wide)
        specs.append(pl.BlockSpec((1, wide.shape[1], columns), lambda c, i, group, _: (group[i], 0, c)))
    return pl.pallas_call(
        functools.partial(_tile, kernel),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n // columns, max_tiles),
            in_specs=specs,
            out_specs=pl.BlockSpec((tile_rows, columns), lambda c, i, *_: (i, c)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, n), jnp.float32),
        compiler_params=None if target.interpret else pltpu.CompilerParams(vmem_limit_bytes=60 << 20),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * k * n,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in inputs) + num_rows * n * 4,
            transcendentals=0,
        ),
        interpret=target.interpret,
        name="grouped_matmul",
    )(group, num_tiles.reshape(1), *inputs)


def _tile(multiply, group, num_tiles, *refs):
    *inputs, out = refs
    used = pl.program_id(1) < num_tiles[0]

    @pl.when(used)
    def _() -> None:
        out[...] = multiply(*inputs)

    @pl.when(jnp.logical_not(used))
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)


def _dense(x, weights, *, dtype):
    return _dot(x[...], weights[0].astype(dtype))


def _dot(x, weights):
    return jnp.dot(x, weights, precision=dot_precision(x.dtype), preferred_element_type=jnp.float32)


def _fp8(x, codes, scale, *, dtype):
    k, columns = codes.shape[1:]
    values = codes[0].astype(jnp.float32)
    parts = jnp.broadcast_to(scale[0][:, None], (scale.shape[1], FP8_BLOCK, columns)).reshape(-1, columns)[:k]
    return _dot(x[...], (values * parts).astype(dtype))


def _fp4(even, odd, codes, scale, *, dtype):
    pairs = codes[0].astype(jnp.int32)
    half, columns = pairs.shape
    # 2 ** (b - 127) by its bits; half a group's rows are in each nibble
    bits = scale[0].astype(jnp.int32) << 23
    parts = lax.bitcast_convert_type(bits, jnp.float32)
    parts = jnp.broadcast_to(parts[:, None], (parts.shape[0], FP4_BLOCK // 2, columns)).reshape(-1, columns)[:half]

    def product(x, nibble):
        return _dot(x[...], (_e2m1(nibble) * parts).astype(dtype))

    return product(even, pairs & 15) + product(odd, (pairs >> 4) & 15)


def _e2m1(code):
    """int32 codes 0..15 -> float32: sign, two bits of exponent with bias 1, one of mantissa; 1 is the subnormal 0.5."""
    size = code & 7
    normal = ((size >> 1) + 126) << 23 | (size & 1) << 22
    bits = jnp.where(size >= 2, normal, jnp.where(size == 1, 126 << 23, 0))
    return lax.bitcast_convert_type(bits | (code & 8) << 28, jnp.float32)
