"""The old ways of serving that ours is compared with, as settings of the same engine.  [no jax]"""

from __future__ import annotations

from dataclasses import replace

from dsjax.cache.spec import CacheSpec
from dsjax.config import EngineConfig, ModelConfig


def contiguous_rows(config: EngineConfig, model: ModelConfig, max_model_len: int, dtype: str) -> int:
    """Requests that fit in the memory of the config's cache when each reserves `max_model_len` tokens for itself."""

    def num_bytes(num_seqs: int) -> int:
        """Without pages of prefixes, and with the window's pages once a request."""
        cache = replace(
            config.cache, enable_prefix_caching=False, num_gpu_blocks_override=0, cache_memory_bytes=1 << 60
        )
        scheduler = replace(config.scheduler, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs)
        return CacheSpec.of(
            model, cache, scheduler, max_model_len, dtype, num_parts=config.parallel.kv_parallel
        ).num_bytes()

    ours = CacheSpec.of(
        model, config.cache, config.scheduler, max_model_len, dtype, num_parts=config.parallel.kv_parallel
    ).num_bytes()
    one = num_bytes(2) - num_bytes(1)
    return max(1, ours // one)


def naive(config: EngineConfig, model: ModelConfig, longest_prompt: int, dtype: str = "bfloat16") -> EngineConfig:
    """First come first served, prompts whole, no prefix reuse, and the cache cut into equal rows of `max_model_len`.

    It has the memory of `config` and at most its rows.
    """
    max_model_len = config.scheduler.max_model_len or model.max_position_embeddings
    rows = min(config.scheduler.max_num_seqs, contiguous_rows(config, model, max_model_len, dtype))
    return replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False, num_gpu_blocks_override=0, cache_memory_bytes=1 << 60),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=rows,
            max_num_batched_tokens=max(longest_prompt, rows),
            enable_chunked_prefill=False,
            scheduling_policy="fcfs",
            length_groups=0.0,
        ),
        feedback=type(config.feedback)(),
    )
