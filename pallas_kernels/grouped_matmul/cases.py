"""Shapes of the grouped matmul: Flash's and Pro's experts, as one of 16 devices has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case, array
from pallas_kernels.grouped_matmul.api import Tiles, grouped_matmul
from pallas_kernels.target import Target

# experts here, K, N of the two matmuls
SHAPES = {"flash w13": (16, 4096, 4096), "flash w2": (16, 2048, 4096), "pro w13": (24, 7168, 6144)}
SMALL = {"small w13": (4, 512, 512)}  # for a CPU
TILES = {"decode": (64, 16), "prefill": (112, 128)}  # tiles, rows of each


def cases(form: str, shapes: dict[str, tuple[int, int, int]] = SHAPES) -> list[Case]:
    """Of weights in bf16, fp8 or fp4."""
    return [_case(form, shape, sizes, step) for shape, sizes in shapes.items() for step in TILES]


def _case(form: str, shape: str, sizes: tuple[int, int, int], step: str) -> Case:
    (experts, k, n), (num_tiles, rows) = sizes, TILES[step]
    padded = np.arange(num_tiles * rows, dtype=np.int32)
    arrays: dict[str, Any] = {
        "x": array(jnp.bfloat16, num_tiles * rows, k),
        "tiles": (
            padded,
            padded,
            np.arange(num_tiles, dtype=np.int32) * experts // num_tiles,
            np.array(num_tiles, np.int32),
        ),
    }
    if form == "bf16":
        arrays["weights"] = array(jnp.bfloat16, experts, k, n)
    elif form == "fp8":
        arrays |= {
            "weights": array(jnp.float8_e4m3fn, experts, k, n),
            "scale": array(jnp.float32, experts, k // 128, n // 128),
        }
    else:
        arrays |= {"weights": array(jnp.int8, experts, k // 2, n), "scale": array(jnp.uint8, experts, k // 32, n)}

    def call(
        target: Target,
        x: jax.Array,
        tiles: tuple[jax.Array, ...],
        weights: jax.Array,
        scale: jax.Array | None = None,
    ) -> jax.Array:
        return grouped_matmul(x, weights, Tiles(*tiles), scale, target)

    return Case(name=f"grouped_matmul {shape} {step} {form}", call=call, arrays=arrays)
