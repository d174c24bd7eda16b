"""The embedded model on a laptop's CPU."""

from dsjax.config import CacheConfig, EngineConfig, SchedulerConfig


def config() -> EngineConfig:
    return EngineConfig(
        model="dsjax-nano",
        cache=CacheConfig(block_size=64),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
    )
