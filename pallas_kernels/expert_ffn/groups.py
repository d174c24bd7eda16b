"""The form in native code on CPUs, which reads each chosen expert's weights once, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
    num_rows, k = experts.shape
    flat = experts.reshape(-1)
    rank, count = ranks(flat, num_experts)
    starts = jnp.concatenate([jnp.zeros((1,), count.dtype), jnp.cumsum(count)])
    place = jnp.where(flat < num_experts, starts[flat] + rank, flat.shape[0])
    token = jnp.zeros(flat.shape, jnp.int32).at[place].set(jnp.arange(flat.shape[0], dtype=jnp.int32) // k, mode="drop")
    hidden = native.grouped_product(x[token], matrices.w13, starts, first)
    hidden = clamped_swiglu(hidden, limit).astype(x.dtype)
    out = native.grouped_product(hidden, matrices.w2, starts, first)
    # past the last expert's rows nothing was written
    out = jnp.take(out, place, axis=0, mode="fill", fill_value=0).reshape(num_rows, k, -1)
    return jnp.sum(out * weights[..., None], axis=1)
