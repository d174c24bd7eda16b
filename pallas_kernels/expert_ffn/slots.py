"""The forms for XLA's CPU: one product of all experts with a few slots each, or one chosen expert after the other.

Taking an expert's matrix out of a stack copies it, which at decode costs more than the product. Slots copy nothing, but
read every expert; for a token or a few, arrays of the experts' own are as good as free to choose from. Microseconds of
16 experts of 512 x 512, 4 a token, float32, on two cores with AMX:

    tokens                          1      8     32    512
    tiles, copied out of a stack 1600   2850   4700  31000
    slots                        2250   2500   2350  15500
    experts apart                 300   1800   3500  24000
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn.matrices import Apart, Matrices, clamped_swiglu
from pallas_kernels.grouped_matmul import Tiles, group_tiles, ranks


def apart_pays(num_assignments: int, num_experts: int) -> bool:
    """Whether so few experts are chosen that going through them one by one clearly beats a product of all; each is a
    branch of the program, which takes longer to compile."""
    return 2 * num_assignments <= num_experts


def slots_of_expert(num_rows: int, num_assignments: int, num_experts: int) -> int:
    """What tokens that choose evenly at random rarely exceed: the mean and two standard deviations of a count."""
    mean = num_assignments / num_experts
    return min(num_rows, -(-math.ceil(mean + 2 * math.sqrt(mean)) // 8) * 8)


def one_by_one(x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Apart, limit: float) -> jax.Array:
    """Tiles of one or two tokens, each a branch of its expert."""
    # one row of bfloat16 takes a scalar path
    tile_rows = 1 if x.shape[0] == 1 and x.dtype != jnp.bfloat16 else 2
    tiles = group_tiles(experts, len(matrices.w13), tile_rows=tile_rows)

    def branch(w13: jax.Array, w2: jax.Array) -> Callable[[jax.Array], jax.Array]:
        return lambda rows: _ffn(rows, w13, w2, limit)

    branches = [branch(*pair) for pair in zip(*matrices, strict=True)]
    start = jnp.zeros(x.shape, jnp.float32)
    return _add_tiles(start, x, tiles, weights, lambda rows, expert: jax.lax.switch(expert, branches, rows))


def in_slots(
    x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices, num_devices: int, limit: float
) -> jax.Array:
    """Every expert multiplies its slots in one batched product; tokens for which there is none go in tiles after it."""
    (num_rows, k), num_experts = experts.shape, matrices.w13.shape[0]
    flat = experts.reshape(-1)
    slots = slots_of_expert(num_rows, flat.shape[0], num_experts * num_devices)
    rank, _ = ranks(flat, num_experts)
    nowhere = num_experts * slots
    place = jnp.where((flat < num_experts) & (rank < slots), flat * slots + rank, nowhere)
    token = jnp.zeros((nowhere,), jnp.int32).at[place].set(jnp.arange(flat.shape[0], dtype=jnp.int32) // k, mode="drop")
    rows = x[token].reshape(num_experts, slots, -1)  # in an empty slot token 0, of which nothing comes
    hidden = jnp.einsum("ecd,edf->ecf", rows, matrices.w13, preferred_element_type=jnp.float32)
    hidden = clamped_swiglu(hidden, limit).astype(x.dtype)
    out = jnp.einsum("ecf,efd->ecd", hidden, matrices.w2, preferred_element_type=jnp.float32)
    out = jnp.take(out.reshape(nowhere, -1), place, axis=0, mode="fill", fill_value=0).reshape(num_rows, k, -1)
    out = jnp.sum(out * weights[..., None], axis=1)
    if slots == num_rows:
        return out
    over = jnp.where(rank < slots, num_experts, flat).reshape(experts.shape)

    def copied(rows: jax.Array, expert: jax.Array) -> jax.Array:
        return _ffn(rows, _taken(matrices.w13, expert), _taken(matrices.w2, expert), limit)

    return jax.lax.cond(
        jnp.any(over < num_experts),
        lambda out: _add_tiles(out, x, group_tiles(over, num_experts), weights, copied),
        lambda out: out,
        out,
    )


def _taken(stack: jax.Array, expert: jax.Array) -> jax.Array:
    """One matrix of a stack, by its bits where it is bfloat16: of which XLA's CPU widens all to take one."""
    if stack.dtype != jnp.bfloat16:
        return jax.lax.dynamic_index_in_dim(stack, expert, keepdims=False)
    bits = jax.lax.dynamic_index_in_dim(jax.lax.bitcast_convert_type(stack, jnp.uint16), expert, keepdims=False)
    return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits), jnp.bfloat16)


def _add_tiles(
    out: jax.Array,
    x: jax.Array,
    tiles: Tiles,
    weights: jax.Array,
    ffn: Callable[[jax.Array, jax.Array], jax.Array],  # rows [n, D], expert -> [n, D]
) -> jax.Array:
    """`out` [T, D] and what the experts make of x, a tile of one expert's tokens after the other."""
    k, flat, size = weights.shape[1], weights.reshape(-1), tiles.tile_rows

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        source = jax.lax.dynamic_slice_in_dim(tiles.source, i * size, size)
        rows = jnp.take(x, source // k, axis=0, mode="clip")
        part = ffn(rows, tiles.group[i]) * jnp.take(flat, source, mode="clip")[:, None]
        # a token's experts are distinct, so it is in a tile once
        return out.at[jnp.where(source < flat.shape[0], source // k, x.shape[0])].add(part, mode="drop")

    return jax.lax.fori_loop(0, tiles.num_tiles, body, out)


def _ffn(rows: jax.Array, w13: jax.Array, w2: jax.Array, limit: float) -> jax.Array:
    """One expert: [n, D] -> [n, D] float32."""
    hidden = clamped_swiglu(jnp.dot(rows, w13, preferred_element_type=jnp.float32), limit)
    return jnp.dot(hidden.astype(rows.dtype), w2, preferred_element_type=jnp.float32)
