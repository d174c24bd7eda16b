"""Small models and cache specs for the cache's tests."""

from __future__ import annotations

from dsjax.cache.spec import CacheSpec
from dsjax.config import CacheConfig, LayerKind, ModelConfig, SchedulerConfig

MIXED = (LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA, LayerKind.CSA)


def model_config(
    layer_kinds=MIXED, window: int = 8, csa_ratio: int = 4, hca_ratio: int = 8, index: int = 8
) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        hidden_size=32,
        num_attention_heads=2,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=8,
        o_groups=1,
        o_lora_rank=8,
        moe_intermediate_size=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        num_hash_layers=0,
        routed_scaling_factor=1.0,
        swiglu_limit=0.0,
        sliding_window=window,
        index_n_heads=1,
        index_head_dim=index,
        index_topk=2,
        hc_mult=2,
        max_position_embeddings=4096,
        layer_kinds=layer_kinds,
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
    )


def cache_spec(
    layer_kinds=MIXED,
    window: int = 8,
    hca_ratio: int = 8,
    index: int = 8,
    page: int = 8,
    unit: int = 8,
    interval: int = 16,
    num_snapshots: int = 16,
    num_blocks: int = 0,
    memory_bytes: int = 1 << 30,
    num_seqs: int = 4,
    budget: int = 32,
    max_model_len: int = 256,
    prefix: bool = True,
    dtype: str = "float32",
    num_parts: int = 1,
    tiled: bool = False,
    as_bits: bool = False,
    **cache: str,
) -> CacheSpec:
    return CacheSpec.of(
        model_config(layer_kinds, window, hca_ratio=hca_ratio, index=index),
        CacheConfig(
            block_size=page,
            enable_prefix_caching=prefix,
            prefix_unit_tokens=unit,
            snapshot_interval_tokens=interval,
            num_snapshots=num_snapshots,
            num_gpu_blocks_override=num_blocks,
            cache_memory_bytes=memory_bytes,
            **cache,
        ),
        SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget),
        max_model_len,
        dtype,
        num_parts=num_parts,
        tiled=tiled,
        as_bits=as_bits,
    )
