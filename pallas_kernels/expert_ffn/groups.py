"""The form in native code on CPUs, which reads each chosen expert's weights once, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn.assignments import tokens_at, weighted_sum
from pallas_kernels.expert_ffn.matrices import Matrices, clamped_swiglu
from pallas_kernels.grouped_matmul import native, ranks


def fits(matrices: Matrices) -> bool:
    """Whether the weights are numbers, of matrices with whole vectors of columns."""
    return matrices.w13_scale is None and native.supports(matrices.w13) and native.supports(matrices.w2)


def in_groups(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    matrices: Matrices,
    num_experts: int,
    first: int | jax.Array,
    limit: float,
) -> jax.Array:
    """Assignments sorted by expert, each expert's rows times its matrices. Sorting is by counting."""
    flat = experts.reshape(-1)
    rank, count = ranks(flat, num_experts)
    starts = jnp.concatenate([jnp.zeros((1,), count.dtype), jnp.cumsum(count)])
    place = jnp.where(flat < num_experts, starts[flat] + rank, flat.shape[0])
    rows = x[tokens_at(place, flat.shape[0], experts.shape[1])]
    hidden = native.grouped_product(rows, matrices.w13, starts, first)
    hidden = clamped_swiglu(hidden, limit).astype(x.dtype)
    out = native.grouped_product(hidden, matrices.w2, starts, first)
    return weighted_sum(out, place, weights)  # what lies past the last expert's rows, unwritten, is nobody's place
