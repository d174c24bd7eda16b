"""How tokens reach experts that are spread over the whole mesh, and how the results come back.

Two ways give the same numbers. *Gather*: every data shard gets all shards' tokens, each device computes its experts for
them, and a reduce-scatter returns the sums; it moves tokens x (shards - 1) rows each way. *All-to-all*: the devices of
a shard divide its tokens, and a token goes once to each device that has one of its experts; buffers hold what is
expected and a quarter more, and what is over goes in further passes, so no token is dropped however uneven the choice.
The cheaper way follows from the static shapes: all-to-all for many tokens on many devices, gather at decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dsjax.axes import ALL, DATA, SHARD
from pallas_kernels import collectives

# x [T, D], local expert numbers [T, k] (the number of local experts: none), weights [T, k] -> [T, D] float32
LocalExperts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def capacity(num_tokens: int, num_devices: int, k: int) -> int:
    """Rows a device can send to each other device in one pass, of its own `num_tokens` tokens with k experts each."""
    expected = num_tokens * (1 - (1 - 1 / num_devices) ** k)
    return min(num_tokens, -(-math.ceil(1.25 * expected) // 8) * 8)


def rows_moved(num_tokens: int, num_shards: int, shard_size: int, k: int) -> dict[str, int]:
    """Rows a device receives on the way there (and sends on the way back) in each way, for a shard's `num_tokens`."""
    moved = {"gather": (num_shards - 1) * num_tokens}
    if num_tokens % shard_size == 0:
        devices = num_shards * shard_size
        moved["all_to_all"] = (devices - 1) * capacity(num_tokens // shard_size, devices, k)
    return moved


def exchange(
    x: jax.Array,  # [T, D] a data shard's tokens, whole on each of its devices
    experts: jax.Array,  # [T, k] global expert numbers; `num_experts` where there is none
    weights: jax.Array,  # [T, k]
    num_experts: int,
    num_local: int,  # experts on this device
    compute: LocalExperts,
) -> jax.Array:
    """The weighted sums of the experts' outputs, [T, D] float32, of which each device of the shard has a part: they
    add up to the result. Where every device has all experts, `compute` gives such parts by itself."""
    if num_local == num_experts:
        return compute(x, experts, weights)
    assert num_local * collectives.size(ALL) == num_experts
    moved = rows_moved(x.shape[0], collectives.size(DATA), collectives.size(SHARD), experts.shape[1])
    way = _all_to_all if min(moved, key=lambda name: moved[name]) == "all_to_all" else _gather
    return way(x, experts, weights, num_local, compute)


def _pack(experts: jax.Array, weights: jax.Array) -> jax.Array:
    """One array to send instead of two."""
    return jnp.concatenate([experts, jax.lax.bitcast_convert_type(weights, jnp.int32)], axis=-1)


def _unpack(packed: jax.Array, num_local: int) -> tuple[jax.Array, jax.Array]:
    """Local numbers of the experts that are here (`num_local` for others), and the weights."""
    experts, weights = jnp.split(packed, 2, axis=-1)
    local = experts - collectives.index(ALL) * num_local
    here = (local >= 0) & (local < num_local)
    return jnp.where(here, local, num_local), jax.lax.bitcast_convert_type(weights, jnp.float32)


def _gather(x: jax.Array, experts: jax.Array, weights: jax.Array, num_local: int, compute: LocalExperts) -> jax.Array:
    with jax.named_scope("gather_tokens"):
        packed = collectives.all_gather(_pack(experts, weights), DATA, axis=0)
        tokens = collectives.all_gather(x, DATA, axis=0)
    out = compute(tokens, *_unpack(packed, num_local))
    with jax.named_scope("scatter_results"):
        return collectives.psum_scatter(out.astype(x.dtype), DATA, axis=0).astype(jnp.float32)


def _all_to_all(
    x: jax.Array, experts: jax.Array, weights: jax.Array, num_local: int, compute: LocalExperts
) -> jax.Array:
    num_devices, width = collectives.size(ALL), x.shape[1]
    own = collectives.local_part(x, SHARD, axis=0)  # [s, D]
    packed = collectives.local_part(_pack(experts, weights), SHARD, axis=0)
    num_own, k = own.shape[0], experts.shape[1]
    device = packed[:, :k] // num_local  # num_devices where there is no expert
    wanted = jnp.any(device[:, :, None] == jnp.arange(num_devices), axis=1)  # [s, devices]
    place = jnp.cumsum(wanted, axis=0, dtype=jnp.int32) - 1  # in the queue to each device
    room = capacity(num_own, num_devices, k)
    most = collectives.pmax(jnp.max(jnp.sum(wanted, axis=0, dtype=jnp.int32)), ALL)
    to = jnp.broadcast_to(jnp.arange(num_devices), wanted.shape)

    def one_pass(i: jax.Array, out: jax.Array) -> jax.Array:
        sent = wanted & (place // room == i)
        at = jnp.where(sent, place % room, room)
        token = jnp.full((num_devices, room), num_own, jnp.int32)
        token = token.at[to, at].set(jnp.arange(num_own, dtype=jnp.int32)[:, None], mode="drop")
        rows = jnp.take(own, token, axis=0, mode="fill", fill_value=0)  # [devices, room, D]
        nothing = num_local * num_devices
        choices = jnp.where(token[..., None] < num_own, packed[jnp.minimum(token, num_own - 1)], nothing)
        rows, choices = collectives.all_to_all(rows, ALL), collectives.all_to_all(choices, ALL)
        local, weight = _unpack(choices.reshape(-1, 2 * k), num_local)
        back = compute(rows.reshape(-1, width), local, weight).astype(x.dtype)
        back = collectives.all_to_all(back.reshape(num_devices, room, width), ALL)
        # a gather and a sum, not a scatter: the order of additions stays the same
        got = back[to, jnp.minimum(at, room - 1)].astype(jnp.float32)  # [s, devices, D]
        return out + jnp.sum(jnp.where(sent[..., None], got, 0), axis=1)

    with jax.named_scope("all_to_all"):
        out = jax.lax.fori_loop(0, (most + room - 1) // room, one_pass, jnp.zeros((num_own, width), jnp.float32))
    if num_own == x.shape[0]:
        return out
    whole = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.dynamic_update_slice_in_dim(whole, out, collectives.index(SHARD) * num_own, axis=0)
