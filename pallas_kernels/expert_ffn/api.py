"""Public functions of the operation: which form runs follows from the target and the shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn import slots
from pallas_kernels.expert_ffn.matrices import Apart, Matrices, clamped_swiglu
from pallas_kernels.expert_ffn.slots import apart_pays
from pallas_kernels.grouped_matmul import group_tiles, grouped_matmul
from pallas_kernels.target import CPU, Target

__all__ = ["Apart", "Matrices", "apart_pays", "clamped_swiglu", "expert_ffn"]


def expert_ffn(
    x: jax.Array,  # [T, D]
    experts: jax.Array,  # [T, k] int32 numbers of experts; `num_experts` is none and makes no work
    weights: jax.Array,  # [T, k] float32
    matrices: Matrices | Apart,
    num_experts: int,
    *,
    first: int | jax.Array = 0,  # which of the matrices are expert 0's
    num_devices: int = 1,
    limit: float = 0.0,
    target: Target = CPU,
) -> jax.Array:
    """The sum over a token's chosen experts of weight * W2 clamped_swiglu(W13 x), [T, D] float32.

    Of `num_devices` devices with experts of their own each expects as many tokens. Accelerators, and a CPU whose
    weights are stored codes or are those of several rounds of layers, multiply tiles of tokens sorted by expert; else
    a CPU takes one of the forms in `slots`. Matrices that are `Apart` are for a CPU, where `apart_pays`.
    """
    if isinstance(matrices, Apart):
        return slots.one_by_one(x, experts, weights, matrices, limit)
    if target.platform == "cpu" and not target.interpret and matrices.are_plain(num_experts):
        return slots.in_slots(x, experts, weights, matrices, num_devices, limit)
    return _in_tiles(x, experts, weights, matrices, num_experts, first, num_devices, limit, target)


def _in_tiles(x, experts, weights, matrices, num_experts, first, num_devices, limit, target) -> jax.Array:
    num_rows, k = experts.shape
    tiles = group_tiles(experts, num_experts, num_devices, target)
    tiles = tiles._replace(group=tiles.group + first)
    rows = jnp.take(x, tiles.source // k, axis=0, mode="fill", fill_value=0)  # [P, D]
    hidden = grouped_matmul(rows, matrices.w13, tiles, matrices.w13_scale, target)
    hidden = clamped_swiglu(hidden, limit).astype(x.dtype)
    out = grouped_matmul(hidden, matrices.w2, tiles, matrices.w2_scale, target)  # [P, D] float32
    out = jnp.take(out, tiles.destination, axis=0, mode="fill", fill_value=0).reshape(num_rows, k, -1)
    return jnp.sum(out * weights[..., None], axis=1)
