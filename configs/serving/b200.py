"""DeepSeek-V4-Flash on 8 B200 of 178 GiB: 2 data shards of 4.

Sizes are those of eight H100 (20.1 GiB of weights a device). The kernels were compiled for B200, the whole step was
not, and **nothing has run there**.
"""

CHANGES = {
    "parallel": {"mesh": "data:2,model:4", "kv_parallel": 4, "expert_parallel": True},
    "cache": {"cache_memory_bytes": 128 << 30},
    "scheduler": {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 32768},
}
