"""The old ways of serving that ours is compared with, as settings of the same engine.  [no jax]"""

from __future__ import annotations

from dataclasses import replace

from dsjax.cache.spec import CacheSpec
from dsjax.config import EngineConfig, ModelConfig
from dsjax.serving_config import PathConfig

# Of a SchedulerConfig: requests of all lengths have the same limits.
ONE_PATH = {"hot": PathConfig(max_tokens=1 << 30), "warm": PathConfig(max_tokens=(1 << 30) + 1)}


def contiguous_bytes(config: EngineConfig, model: ModelConfig, dtype: str, *, rings: bool = True) -> float:
    """That a request reserves on a device for `max_model_len` tokens, in arrays of its own.

    With `rings` a layer keeps no more raw latents than its window; without, those of all tokens, as a cache does that
    treats all layers alike.
    """
    length, spec = _spec(config, model, dtype)
    total = 4.0 * spec.state_values
    for kind in spec.kinds.values():
        tokens = min(kind.window, length) if rings and kind.window else length
        total += kind.num_entries(tokens) * kind.page_bytes / kind.entries_per_page
    return total


def contiguous_rows(config: EngineConfig, model: ModelConfig, dtype: str, *, rings: bool = True) -> int:
    """Requests that fit in the memory of the config's cache, each with `contiguous_bytes`."""
    _, spec = _spec(config, model, dtype)
    return max(1, int(spec.num_bytes() / contiguous_bytes(config, model, dtype, rings=rings)))


def _spec(config: EngineConfig, model: ModelConfig, dtype: str) -> tuple[int, CacheSpec]:
    length = config.scheduler.max_model_len or model.max_position_embeddings
    parts = config.parallel.kv_parallel
    return length, CacheSpec.of(model, config.cache, config.scheduler, length, dtype, num_parts=parts)


def naive(config: EngineConfig, model: ModelConfig, longest_prompt: int, dtype: str = "bfloat16") -> EngineConfig:
    """First come first served, prompts whole, no prefix reuse, and the cache cut into equal rows of `max_model_len`.

    It has the memory of `config` and at most its rows.
    """
    rows = min(config.scheduler.max_num_seqs, contiguous_rows(config, model, dtype))
    return replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False, num_gpu_blocks_override=0, cache_memory_bytes=1 << 60),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=rows,
            max_num_batched_tokens=max(longest_prompt, rows),
            enable_chunked_prefill=False,
            scheduling_policy="fcfs",
            **ONE_PATH,
            length_groups=0.0,
        ),
        feedback=type(config.feedback)(),
    )
