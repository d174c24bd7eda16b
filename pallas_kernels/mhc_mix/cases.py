"""Shapes of hyper-connections: four streams as wide as Flash and Pro, a decode step and a prompt's chunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, array
from pallas_kernels.mhc_mix.api import MixConfig, mhc_read, mhc_write
from pallas_kernels.target import Target

CONFIG = MixConfig(sinkhorn_iters=20, eps=1e-6, norm_eps=1e-6)
WIDTHS = {"flash": 4096, "pro": 7168}
SMALL = {"small": 512}  # for a CPU
TOKENS = {"decode": 64, "prefill": 2048}


def cases(widths: dict[str, int] = WIDTHS) -> list[Case]:
    return [_case(model, width, step) for model, width in widths.items() for step in TOKENS]


def _case(model: str, width: int, step: str) -> Case:
    tokens = TOKENS[step]
    arrays = {
        "streams": array(jnp.bfloat16, 4, tokens, width),
        "out": array(jnp.bfloat16, tokens, width),
        "fn": array(jnp.float32, 24, 4 * width),
        "base": array(jnp.float32, 24),
        "scale": array(jnp.float32, 3),
    }

    def call(
        target: Target, streams: jax.Array, out: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, post, comb = mhc_read(streams, fn, base, scale, CONFIG, target)
        return x, mhc_write(streams, out, post, comb, target)

    return Case(name=f"mhc_mix {model} {step}", call=call, arrays=arrays)
