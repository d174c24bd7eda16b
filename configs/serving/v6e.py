"""DeepSeek-V4-Flash on 16 TPU v6e chips of 32 GiB (`v6e:4x4`): 4 data shards of 4.

Compiled for that slice: 11.5 GiB of weights a device, 1.9 GiB of temporaries, and 4.3 GiB of cache for 64 requests of
32,768 tokens a shard. **Nothing has run there.**
"""

CHANGES = {
    "parallel": {"mesh": "data:4,model:4", "kv_parallel": 4, "expert_parallel": True},
    "cache": {"cache_memory_bytes": 12 << 30},
    "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 32768},
}
