"""Public functions of the operation. What is traced for a CPU with native code takes one pass over the logits.

Both score experts by s = sqrt(softplus(logits)) and return experts [T, k] int32 and weights [T, k] float32: the chosen
ones' s over their sum, times `scale`. Tokens from `num_tokens` on, where that is given, have none: expert E.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.router import native
from pallas_kernels.target import traced_target


def by_score(
    logits: jax.Array,  # [T, E] float32
    bias: jax.Array,  # [E] float32
    k: int,
    scale: float,
    num_tokens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k experts of largest s + bias, largest first, of equal ones the lowest."""
    if traced_target().has_native_kernels:
        return native.by_score(logits, bias, k, scale, num_tokens)
    scores = _scores(logits)
    _, experts = jax.lax.top_k(scores + bias, k)
    return _of_tokens(experts, logits, num_tokens), _weights(scores, experts, scale)


def by_table(
    logits: jax.Array,  # [T, E] float32
    table: jax.Array,  # [V, k] int32, a token id's experts
    token_ids: jax.Array,  # [T] int32
    scale: float,
    num_tokens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts that a table has for the token's id."""
    if traced_target().has_native_kernels:
        return native.by_table(logits, table, token_ids, scale, num_tokens)
    experts = table[token_ids]
    return _of_tokens(experts, logits, num_tokens), _weights(_scores(logits), experts, scale)


def _scores(logits: jax.Array) -> jax.Array:
    return jnp.sqrt(jax.nn.softplus(logits))


def _weights(scores: jax.Array, experts: jax.Array, scale: float) -> jax.Array:
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    # 1e-20: a token whose chosen scores all underflow to 0 gets weights 0, not NaN
    return chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20) * scale


def _of_tokens(experts: jax.Array, logits: jax.Array, num_tokens: jax.Array | None) -> jax.Array:
    if num_tokens is None:
        return experts
    return jnp.where(jnp.arange(logits.shape[0])[:, None] < num_tokens, experts, logits.shape[1])
