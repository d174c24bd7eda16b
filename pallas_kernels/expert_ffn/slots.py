"""The form for many tokens in bfloat16 on a CPU with AMX: XLA's library multiplies all experts with as many slots each.

It multiplies several times as fast as native code, but each expert has slots for more tokens than choose it evenly, and
its matrix is copied. On a Zen 5, where it is no faster, groups in native code take 0.38 to 0.83 of the time of slots,
for 8 to 2048 tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn.assignments import tokens_at, weighted_sum
from pallas_kernels.expert_ffn.groups import in_groups
from pallas_kernels.expert_ffn.matrices import Matrices, clamped_swiglu
from pallas_kernels.grouped_matmul import native, ranks


def pays(dtype: jnp.dtype, num_assignments: int, num_experts: int) -> bool:
    """Whether the library multiplies faster, and an expert has enough tokens to make good what is copied."""
    return not native.is_fast_for_many(dtype) and num_assignments > 16 * num_experts


def slots_of_expert(num_rows: int, num_assignments: int, num_experts: int) -> int:
    """What tokens that choose evenly at random rarely exceed: the mean and two standard deviations of a count."""
    mean = num_assignments / num_experts
    return min(num_rows, -(-math.ceil(mean + 2 * math.sqrt(mean)) // 8) * 8)


def in_slots(
    x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices, num_devices: int, limit: float
) -> jax.Array:
    """Every expert multiplies its slots in one batched product; tokens for which there is none go after it."""
    (num_rows, k), num_experts = experts.shape, matrices.w13.shape[0]
    flat = experts.reshape(-1)
    slots = slots_of_expert(num_rows, flat.shape[0], num_experts * num_devices)
    rank, _ = ranks(flat, num_experts)
    nowhere = num_experts * slots
    place = jnp.where((flat < num_experts) & (rank < slots), flat * slots + rank, nowhere)
    # in an empty slot is token 0, of which nothing comes
    rows = x[tokens_at(place, nowhere, k)].reshape(num_experts, slots, -1)
    hidden = jnp.einsum("ecd,edf->ecf", rows, matrices.w13, preferred_element_type=jnp.float32)
    hidden = clamped_swiglu(hidden, limit).astype(x.dtype)
    out = jnp.einsum("ecf,efd->ecd", hidden, matrices.w2, preferred_element_type=jnp.float32)
    out = weighted_sum(out.reshape(nowhere, -1), place, weights)
    if slots == num_rows:
        return out
    over = jnp.where(rank < slots, num_experts, flat).reshape(experts.shape)
    return jax.lax.cond(
        jnp.any(over < num_experts),
        lambda out: out + in_groups(x, over, weights, matrices, num_experts, 0, limit),
        lambda out: out,
        out,
    )
