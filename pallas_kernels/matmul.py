"""A row times a matrix: the product of every linear layer, in float32 sums.

For a CPU with native code (`target.traced_for`) products of few rows go through that, the others and those of other
devices through XLA. Microseconds of XLA and of native code on two cores, weights [1024, 512] out of 200 MB:

    rows              1    8    32    64
    float32 XLA      60  224   347   414
            native   62  114   234   484
    bfloat16 XLA     75*  67    80
             native  35   53   152         * as two rows: one takes a scalar path
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import native
from pallas_kernels.target import traced_target

_FEW = {"float32": 40, "bfloat16": 4}  # rows, by the weights' type


def matmul(x: jax.Array, weights: jax.Array, precision: jax.lax.Precision | None = None) -> jax.Array:
    """x [..., K] times weights [K, N], or x [G, T, K] times weights [G, K, N], of the same type -> [..., N] float32."""
    *groups, k, n = weights.shape
    num_rows = x.size // (k * math.prod(groups))
    few = x.dtype == weights.dtype and num_rows <= _FEW.get(weights.dtype.name, 0) and native.supports(weights)
    if not (few and traced_target().has_native_kernels):
        return jnp.matmul(x, weights, preferred_element_type=jnp.float32, precision=precision)
    starts = np.arange(0, x.size // k + 1, num_rows, dtype=np.int32)
    out = native.grouped_product(x.reshape(-1, k), weights.reshape(-1, k, n), starts)
    return out.reshape(*x.shape[:-1], n)
