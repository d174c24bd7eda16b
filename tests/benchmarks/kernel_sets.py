"""Sets of cases for benchmarks.kernels that compile in no time: one that is accepted and one that is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.case import Case, array
from pallas_kernels.target import Target


def double(target: Target, x: jax.Array) -> jax.Array:
    """A kernel on a TPU, the jnp path elsewhere."""

    def kernel(x, out):
        out[...] = x[...] * 2

    if not target.has_tpu_kernels:
        return x * 2
    cost = pl.CostEstimate(flops=x.size, bytes_accessed=2 * x.size * x.dtype.itemsize, transcendentals=0)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, cost_estimate=cost, name="double")(x)


def cases() -> list[Case]:
    """The second needs more fast memory than there is."""
    return [
        Case(name="double small", call=double, arrays={"x": array(jnp.float32, 256, 128)}),
        Case(name="double big", call=double, arrays={"x": array(jnp.float32, 1 << 14, 1 << 12)}),
    ]
