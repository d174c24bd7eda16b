"""One process on a CPU with a few cores, for a model as small as the embedded one.

A step has at most half the default's tokens, so that running answers wait less for a chunk of someone's prompt.
"""

CHANGES = {
    "parallel": {"mesh": "data:1,model:1,stage:1", "kv_parallel": 1, "expert_parallel": False},
    "cache": {"cache_memory_bytes": 1 << 30},
    "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 0},
}
