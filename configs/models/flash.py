"""DeepSeek-V4-Flash: 284 billion parameters, 13 billion active.  [no jax]"""

from __future__ import annotations

from dsjax.config import LayerKind, ModelConfig, YarnConfig


def deepseek_v4_flash() -> ModelConfig:
    """The released Flash: 2 sliding layers, then CSA and HCA in turn, 43 in all."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=4096,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=6,
        num_hash_layers=3,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        sliding_window=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        hc_mult=4,
        yarn=YarnConfig(factor=16, original_max_position_embeddings=65536),
        max_position_embeddings=1048576,
        layer_kinds=(LayerKind.SLIDING,) * 2 + (LayerKind.CSA, LayerKind.HCA) * 20 + (LayerKind.CSA,),
        num_nextn_predict_layers=1,
        quant_method="fp8",
        expert_dtype="fp4",
    )
