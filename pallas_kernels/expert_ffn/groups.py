"""The form in native code on CPUs, which reads each chosen expert's weights once, in place."""

from __future__ import annotations

import jax

from pallas_kernels.expert_ffn import native
from pallas_kernels.expert_ffn.matrices import Matrices
from pallas_kernels.grouped_matmul import native as products


def fits(matrices: Matrices) -> bool:
    """Whether the weights are numbers, of matrices with whole vectors of columns and of hidden numbers."""
    w13, w2 = matrices.w13, matrices.w2
    numbers = matrices.w13_scale is None and products.supports(w13) and products.supports(w2)
    return numbers and native.supports(w2.shape[-2], w2.dtype)


def in_groups(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    matrices: Matrices,
    num_experts: int,
    first: int | jax.Array,
    limit: float,
) -> jax.Array:
    """Assignments sorted by expert, each expert's rows times its matrices."""
    starts, place, rows = native.sort(experts, x, num_experts)
    hidden = products.grouped_product(rows, matrices.w13, starts, first)
    hidden = native.activate(hidden, starts, limit, x.dtype)
    out = products.grouped_product(hidden, matrices.w2, starts, first)
    return native.combine(out, place, weights)  # what lies past the last expert's rows, unwritten, is nobody's place
