"""Public functions of the operation: which form runs follows from the target and the shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_ffn import groups, native, slots
from pallas_kernels.expert_ffn.assignments import weighted_sum
from pallas_kernels.expert_ffn.matrices import Matrices, clamped_swiglu
from pallas_kernels.grouped_matmul import group_tiles, grouped_matmul
from pallas_kernels.target import CPU, Target, traced_target

__all__ = ["Matrices", "clamped_swiglu", "expert_ffn", "swiglu"]


def swiglu(gate_up: jax.Array, limit: float, dtype: jnp.dtype) -> jax.Array:
    """`clamped_swiglu` of gate_up [T, 2F] float32, rounded to `dtype`; in native code what is traced for such a CPU."""
    rows, both = gate_up.shape
    if traced_target().has_native_kernels and native.supports(both // 2, dtype):
        return native.activate(gate_up, np.array([rows], np.int32), limit, dtype)
    return clamped_swiglu(gate_up, limit).astype(dtype)


def expert_ffn(
    x: jax.Array,  # [T, D]
    experts: jax.Array,  # [T, k] int32 numbers of experts; `num_experts` is none and makes no work
    weights: jax.Array,  # [T, k] float32
    matrices: Matrices,
    num_experts: int,
    *,
    first: int | jax.Array = 0,  # which of the matrices are expert 0's
    num_devices: int = 1,
    limit: float = 0.0,
    target: Target = CPU,
) -> jax.Array:
    """The sum over a token's chosen experts of weight * W2 clamped_swiglu(W13 x), [T, D] float32.

    Of `num_devices` devices with experts of their own each expects as many tokens. Native code multiplies an expert's
    tokens in one piece; where they are many and XLA's library is faster, it does, in `slots`. Accelerators, weights
    that are stored codes, and a CPU without native code multiply tiles of tokens sorted by expert.
    """
    if not (target.has_native_kernels and groups.fits(matrices)):
        return _in_tiles(x, experts, weights, matrices, num_experts, first, num_devices, limit, target)
    of_one_round = matrices.w13.shape[0] == num_experts
    if of_one_round and slots.pays(x.dtype, experts.size, num_experts * num_devices):
        return slots.in_slots(x, experts, weights, matrices, num_devices, limit)
    return groups.in_groups(x, experts, weights, matrices, num_experts, first, limit)


def _in_tiles(x, experts, weights, matrices, num_experts, first, num_devices, limit, target) -> jax.Array:
    tiles = group_tiles(experts, num_experts, num_devices, target)
    tiles = tiles._replace(group=tiles.group + first)
    rows = jnp.take(x, tiles.source // experts.shape[1], axis=0, mode="fill", fill_value=0)  # [P, D]
    hidden = grouped_matmul(rows, matrices.w13, tiles, matrices.w13_scale, target)
    hidden = swiglu(hidden, limit, x.dtype)
    out = grouped_matmul(hidden, matrices.w2, tiles, matrices.w2_scale, target)  # [P, D] float32
    return weighted_sum(out, tiles.destination, weights)
