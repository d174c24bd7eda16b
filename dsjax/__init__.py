"""dsjax serves DeepSeek-V4 with JAX.

Letters in shape comments: T tokens of a step, R rows (requests in it), NB query blocks of B queries, P pages a row,
D hidden, N heads, H head dim, C compressed entries, K top-k or keys, E experts, F expert width, V vocabulary,
S residual streams, HI and dI heads and width of the indexer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsjax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from dsjax.errors import ConfigError, ErrorCode, RequestError
from dsjax.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    from dsjax.engine import Engine
    from dsjax.llm import LLM

__all__ = [
    "LLM",
    "CacheConfig",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "ErrorCode",
    "FinishReason",
    "ModelConfig",
    "RequestError",
    "SamplingParams",
    "SchedulerConfig",
    "TokenEvent",
    "TokenLogprobs",
]


def __getattr__(name: str) -> Any:
    """LLM and Engine import JAX, which takes a second that configs and clients need not spend."""
    if name == "LLM":
        from dsjax.llm import LLM

        return LLM
    if name == "Engine":
        from dsjax.engine import Engine

        return Engine
    raise AttributeError(f"module 'dsjax' has no attribute {name!r}")
