"""A model for benchmarks on a CPU.  [no jax]"""

from __future__ import annotations

from dsjax.config import LayerKind, ModelConfig, YarnConfig


def bench_60m() -> ModelConfig:
    """70.5 M parameters, 28.5 M of them at work for a token: large enough for a step to take its time in products."""
    kinds = (LayerKind.CSA, LayerKind.HCA) * 3
    return ModelConfig(
        vocab_size=8192,
        hidden_size=512,
        num_attention_heads=8,
        head_dim=128,
        qk_rope_head_dim=32,
        q_lora_rank=256,
        o_groups=2,
        o_lora_rank=128,
        moe_intermediate_size=256,
        n_routed_experts=16,
        num_experts_per_tok=4,
        num_hash_layers=2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        sliding_window=128,
        index_n_heads=8,
        index_head_dim=64,
        index_topk=64,
        hc_mult=4,
        yarn=YarnConfig(factor=16, original_max_position_embeddings=65536),
        max_position_embeddings=1 << 20,
        layer_kinds=(LayerKind.SLIDING, LayerKind.SLIDING, *kinds),
        dtype="float32",
    )
