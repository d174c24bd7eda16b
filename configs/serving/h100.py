"""DeepSeek-V4-Flash on 8 H100 of 79 GiB: 2 data shards of 4.

Compiled for them: 20.1 GiB of weights a device, 1.7 GiB of temporaries, and 4.3 GiB of cache for 64 requests of 32,768
tokens a shard; there is room for many more or longer ones. **Nothing has run there.**
"""

CHANGES = {
    "parallel": {"mesh": "data:2,model:4", "kv_parallel": 4, "expert_parallel": True},
    "cache": {"cache_memory_bytes": 48 << 30},
    "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 32768},
}
