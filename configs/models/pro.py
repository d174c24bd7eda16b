"""DeepSeek-V4-Pro: 1.57 trillion parameters, 49 billion active.  [no jax]"""

from __future__ import annotations

from dsjax.config import LayerKind, ModelConfig, YarnConfig


def deepseek_v4_pro() -> ModelConfig:
    """The released Pro: 2 HCA layers, then CSA and HCA in turn, 61 in all."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=7168,
        num_attention_heads=128,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1536,
        o_groups=16,
        o_lora_rank=1024,
        moe_intermediate_size=3072,
        n_routed_experts=384,
        num_experts_per_tok=6,
        num_hash_layers=3,
        routed_scaling_factor=2.5,
        swiglu_limit=10.0,
        sliding_window=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=1024,
        hc_mult=4,
        yarn=YarnConfig(factor=16, original_max_position_embeddings=65536),
        max_position_embeddings=1048576,
        layer_kinds=(LayerKind.HCA,) * 2 + (LayerKind.CSA, LayerKind.HCA) * 29 + (LayerKind.CSA,),
        num_nextn_predict_layers=1,
        quant_method="fp8",
        expert_dtype="fp4",
    )
