"""A row times a matrix: the product of every linear layer, in float32 sums.

For a CPU with native code (`target.traced_for`) products of few rows go through that, the others and those of other
devices through XLA. Microseconds of XLA and of native code on two cores of a Zen 5, weights [1024, 512] out of
110 MB:

    rows              1    8    32    64   128   256   512
    float32 XLA      58   81   161   262   404   647  1204
            native   43   57   105   185   331   649  1263
    bfloat16 XLA     62*  68   123   197   248   428   803
             native  32   43    99   183   266   501   946   * as two rows: one takes a scalar path
    [512, 8192] XLA 359* 409   640   907  1430  2531  4834
             native 210  229   470   750  1313  2384  4909

Of bfloat16 on two cores of a Xeon whose AMX the library uses, with native code that multiplied one number at a time:

    rows              1    8    32
    bfloat16 XLA     75*  67    80
             native  35   53   152
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import native
from pallas_kernels.target import traced_target

_MOST_ROWS = {True: 128, False: 4}  # by whether native code is fast for many


def matmul(x: jax.Array, weights: jax.Array, precision: jax.lax.Precision | None = None) -> jax.Array:
    """x [..., K] times weights [K, N], or x [G, T, K] times weights [G, K, N], of the same type -> [..., N] float32."""
    *groups, k, n = weights.shape
    num_rows = x.size // (k * math.prod(groups))
    fits = x.dtype == weights.dtype and native.supports(weights)
    few = num_rows <= _MOST_ROWS[native.is_fast_for_many(weights.dtype)]
    on_host = traced_target().has_native_kernels
    if not (fits and few and on_host):
        if groups and on_host and x.dtype == jnp.bfloat16:  # XLA's CPU would widen all of x and the weights at once
            return jnp.stack([matmul(*of_group, precision) for of_group in zip(x, weights, strict=True)])
        return jnp.matmul(x, weights, preferred_element_type=jnp.float32, precision=precision)
    starts = np.arange(0, x.size // k + 1, num_rows, dtype=np.int32)
    out = native.grouped_product(x.reshape(-1, k), weights.reshape(-1, k, n), starts)
    return out.reshape(*x.shape[:-1], n)
