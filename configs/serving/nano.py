"""The embedded model on a laptop's CPU."""

CHANGES = {
    "model": "dsjax-nano",
    "cache": {"block_size": 64},
    "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
}
