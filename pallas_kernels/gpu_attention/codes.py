"""Chunks of int8 and fp8 entries made keys, as `entry_format` says what their bytes mean."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.entry_format import FP8_GROUP, EntryFormat

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

_ROPE = 64  # rotary channels, whose layout in registers is written out
_QUARTER = _ROPE // 4  # of them have their low bytes at the same bits of the side words


def supports(form: EntryFormat) -> bool:
    return form.name in ("int8", "fp8") and form.rope == _ROPE and form.num_codes % FP8_GROUP == 0


def decode(values, side, keys, name: str) -> None:
    """Of values [K, H] uint8 and side words [K, S] of format `name` makes keys [K, H]; K a multiple of 16."""
    codes, rotary = _layouts()
    last = keys.shape[1] - _ROPE

    def body(group, carry):  # in a loop, so that few of them are in registers
        columns = pl.ds(group * FP8_GROUP, FP8_GROUP)
        x = plgpu.load(values.at[:, columns], layout=codes, optimized=False)
        word = _QUARTER + (lax.div(group, 4) if name == "fp8" else 0)
        scale = plgpu.load(side.at[:, word], layout=codes.reduce(1), optimized=False)
        if name == "fp8":
            x = lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
            scale = ((scale >> (8 * lax.rem(group, 4)).astype(jnp.uint32)) & 0xFF) << 23
        else:
            x = lax.bitcast_convert_type(x, jnp.int8)
        scale = lax.bitcast_convert_type(scale, jnp.float32)
        x = x.astype(jnp.float32) * plgpu.layout_cast(lax.broadcast_in_dim(scale, x.shape, [0]), codes)
        plgpu.store(keys.at[:, columns], x.astype(keys.dtype), optimized=False)
        return carry

    lax.fori_loop(0, last // FP8_GROUP, body, 0)
    columns = pl.ds(last, _ROPE)
    high = plgpu.load(values.at[:, columns], layout=rotary, optimized=False).astype(jnp.uint32)
    words = plgpu.load(side.at[:, pl.ds(0, _QUARTER)], layout=rotary, optimized=False)
    low = jnp.concatenate([(words >> (8 * i)) & 0xFF for i in range(4)], axis=1)
    x = lax.bitcast_convert_type((high << 24) | (low << 16), jnp.float32)
    plgpu.store(keys.at[:, columns], x.astype(keys.dtype), optimized=False)


def _layouts() -> tuple[Any, Any]:
    """Of [16 k, 64]: a thread has eight neighbours; and for the rotary channels two, at the same place of quarters."""
    codes = plgpu.Layout.TILED(plgpu.Tiling(((16, 64), (4, 64), (8,))), (-5,), (-3, -2), -1)
    rotary = plgpu.Layout.TILED(plgpu.Tiling(((16, _QUARTER), (8, 8), (2,))), (-5, -4), (-3, -2), -1)
    return codes, rotary
