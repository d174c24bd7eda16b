"""dsjax-nano, the embedded model: every part of DeepSeek-V4 in five million parameters.  [no jax]"""

from __future__ import annotations

from dsjax.config import LayerKind, ModelConfig, YarnConfig


def dsjax_nano() -> ModelConfig:
    """Two sliding layers with hash routing, then CSA and HCA in turn; `training/` made its checkpoint.

    It trained on 512 tokens a sequence: 128 CSA entries, so index_topk=64 is a real choice, and 4 HCA entries.
    """
    return ModelConfig(
        vocab_size=2048,
        hidden_size=192,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        moe_intermediate_size=96,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hash_layers=2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        sliding_window=128,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        hc_mult=4,
        yarn=YarnConfig(factor=4, original_max_position_embeddings=1024),
        max_position_embeddings=4096,
        layer_kinds=(LayerKind.SLIDING,) * 2 + (LayerKind.CSA, LayerKind.HCA) * 2,
        num_nextn_predict_layers=1,
    )
