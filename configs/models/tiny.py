"""Models small enough for tests, with every kind of layer.  [no jax]"""

from __future__ import annotations

from dsjax.config import LayerKind, ModelConfig, YarnConfig


def tiny_mixed() -> ModelConfig:
    """A sliding, two CSA and an HCA layer, and MTP; windows so short that a few tokens pass every edge."""
    return ModelConfig(
        vocab_size=256,
        hidden_size=48,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        moe_intermediate_size=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        num_hash_layers=1,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        sliding_window=8,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=2,
        hc_mult=4,
        yarn=YarnConfig(factor=16, original_max_position_embeddings=64),
        max_position_embeddings=1024,
        layer_kinds=(LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA, LayerKind.CSA),
        csa_ratio=4,
        hca_ratio=8,
        num_nextn_predict_layers=1,
        dtype="float32",
    )
