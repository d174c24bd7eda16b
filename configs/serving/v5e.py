"""DeepSeek-V4-Flash on 32 TPU v5e chips of 16 GiB (`v5e:4x8`): 8 data shards of 4.

By the split of the README's compiled targets, weights take 7.2 GiB a device, and 32 requests of 32,768 tokens a shard
2.3 GiB of cache. It was compiled for no such slice, and **nothing has run there**.
"""

CHANGES = {
    "parallel": {"mesh": "data:8,model:4", "kv_parallel": 4, "expert_parallel": True},
    "cache": {"cache_memory_bytes": 4 << 30},
    "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 32768},
}
