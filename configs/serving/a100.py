"""DeepSeek-V4-Flash on 8 A100 of 80 GB: 2 data shards of 4, with plain JAX kernels.

Sizes are those of eight H100 (20.1 GiB of weights a device). The Pallas kernels need a Hopper or Blackwell GPU, and FP8
is converted by software. It was not compiled for A100, and **nothing has run there**.
"""

CHANGES = {
    "kernels": "jnp",
    "parallel": {"mesh": "data:2,model:4", "kv_parallel": 4, "expert_parallel": True},
    "cache": {"cache_memory_bytes": 40 << 30},
    "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 32768},
}
