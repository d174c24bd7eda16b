"""Mixture of experts: hash or top-k routing, clamped SwiGLU experts, one shared expert (spec 2.7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dsjax.axes import SHARD
from dsjax.config import ModelConfig
from dsjax.model.exchange import exchange
from dsjax.model.param import HIGHEST, Buffer, Linear, constant, normal, weight, widen
from pallas_kernels import collectives, router
from pallas_kernels.expert_ffn import Matrices, clamped_swiglu, expert_ffn, swiglu
from pallas_kernels.matmul import matmul
from pallas_kernels.target import CPU, Target


class Gate(nnx.Module):
    """Scores experts; which ones a token uses comes from its id on hash layers, else from the biased scores."""

    def __init__(self, config: ModelConfig, hashed: bool, rngs: nnx.Rngs):
        self.kernel = normal(rngs, (config.hidden_size, config.n_routed_experts), ("embed", None))
        if hashed:
            k, e = config.num_experts_per_tok, config.n_routed_experts
            # k distinct experts a token id; a trained model brings its own table
            table = (jnp.arange(config.vocab_size)[:, None] * k + jnp.arange(k)) % e
            self.tid2eid = Buffer(table.astype(jnp.int32), logical_axes=(None, None))
        else:
            self.bias = constant((config.n_routed_experts,), (None,), 0.0)
        self.config, self.hashed = config, hashed

    def __call__(
        self, x: jax.Array, token_ids: jax.Array, num_tokens: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, D], token_ids [T] -> experts [T, k] int32, weights [T, k] float32, which sum to the scaling factor.

        Tokens from `num_tokens` on, where that is given, have no expert: the number `n_routed_experts`.
        """
        logits = matmul(x.astype(jnp.float32), self.kernel[...], HIGHEST)
        scale = self.config.routed_scaling_factor
        if self.hashed:
            return router.by_table(logits, self.tid2eid[...], token_ids, scale, num_tokens)
        return router.by_score(logits, self.bias[...], self.config.num_experts_per_tok, scale, num_tokens)


class Experts(nnx.Module):
    """The routed experts' weights, stacked: w13 [E, D, 2F] (gate, then up) and w2 [E, F, D], stored or in `dtype`.

    In a scanned model they are those of every round, [rounds, E, ...], of which round `round` is in use.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        stored = config.expert_format
        self.w13, self.w13_scale = weight(rngs, (e, d, 2 * f), ("expert", "embed", "expert_gate_up"), dtype, stored)
        self.w2, self.w2_scale = weight(rngs, (e, f, d), ("expert", "expert_ffn", "embed"), dtype, stored)
        self.config = config
        self.round: int | jax.Array = 0

    def dense(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """Every expert on every token, then the chosen ones summed: differentiable, and exact. -> [T, D] float32.

        Widens all stored experts at once: a form for checking and training, not for serving.
        """
        w13, w2 = widen(self.w13, self.w13_scale, x.dtype), widen(self.w2, self.w2_scale, x.dtype)
        by_expert = jnp.einsum(
            "tk,tke->te", weights, jax.nn.one_hot(experts, self.config.n_routed_experts, dtype=jnp.float32)
        )
        hidden = jnp.einsum("td,edf->etf", x, w13, preferred_element_type=jnp.float32)
        hidden = clamped_swiglu(hidden, self.config.swiglu_limit) * by_expert.T[..., None]
        return jnp.einsum("etf,efd->td", hidden.astype(x.dtype), w2, preferred_element_type=jnp.float32)

    @property
    def num_local(self) -> int:
        """Experts on this device."""
        return self.w13.shape[-3]

    def grouped(self, x: jax.Array, experts: jax.Array, weights: jax.Array, target: Target = CPU) -> jax.Array:
        """Only the chosen experts of this device; expert `num_local` is none and makes no work. -> [T, D] float32, a
        part of the sum where other devices have other experts or slices of them."""
        return expert_ffn(
            x,
            experts,
            weights,
            self._matrices(),
            self.num_local,
            first=self.round * self.num_local,
            num_devices=self.config.n_routed_experts // self.num_local,
            limit=self.config.swiglu_limit,
            target=target,
        )

    def _matrices(self) -> Matrices:
        def of_rounds(stack: nnx.Variable | None) -> jax.Array | None:
            return None if stack is None else stack[...].reshape(-1, *stack.shape[-2:])

        return Matrices(*map(of_rounds, (self.w13, self.w2, self.w13_scale, self.w2_scale)))  # type: ignore[arg-type]


class SharedExpert(nnx.Module):
    """The expert every token passes through; clamped like the others."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: jnp.dtype):
        f = config.moe_intermediate_size * config.n_shared_experts
        self.w13 = Linear(rngs, (config.hidden_size, 2 * f), ("embed", "gate_up"), dtype, config.quant_method)
        self.w2 = Linear(rngs, (f, config.hidden_size), ("ffn", "embed"), dtype, config.quant_method)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = swiglu(self.w13(x, jnp.float32), self.config.swiglu_limit, x.dtype)
        return self.w2(hidden, jnp.float32)


class MoE(nnx.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, config: ModelConfig, hashed: bool, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.gate = Gate(config, hashed, rngs)
        self.experts = Experts(config, rngs, dtype)
        self.shared_experts = SharedExpert(config, rngs, dtype)

    def __call__(
        self, x: jax.Array, token_ids: jax.Array, num_tokens: jax.Array | None, tap=None, target: Target = CPU
    ) -> jax.Array:
        """x [T, D] -> [T, D]. `num_tokens` None takes the differentiable form; else rows past it are padding."""
        with jax.named_scope("router"):
            experts, weights = self.gate(x, token_ids, num_tokens)
        if tap is not None:
            tap("router_idx", experts)
            tap("router_w", weights)
        if num_tokens is None:
            routed = self.experts.dense(x, experts, weights)
        else:
            num_experts = self.gate.config.n_routed_experts
            compute = functools.partial(self.experts.grouped, target=target)
            routed = exchange(x, experts, weights, num_experts, self.experts.num_local, compute)
        with jax.named_scope("shared"):
            shared = self.shared_experts(x)
        return collectives.psum((routed + shared).astype(x.dtype), SHARD)
