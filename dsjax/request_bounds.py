"""What a request may ask of an engine; checked before it is queued.  [no jax]"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax import request_fields
from dsjax.cache.spec import CacheSpec
from dsjax.config import EngineConfig, ModelConfig, SchedulerConfig
from dsjax.errors import invalid, shown
from dsjax.prompt_len import check_prompt_len
from dsjax.request import Request, SamplingParams
from dsjax.request_fields import MAX_BIAS


@dataclass(frozen=True, kw_only=True)
class RequestBounds:
    """Of one engine: of its model, its cache and its steps."""

    scheduler: SchedulerConfig
    vocab_size: int
    eos_ids: frozenset[int]  # those that the model knows
    max_model_len: int
    max_request_tokens: int  # that the cache holds of one request
    has_tokenizer: bool

    @classmethod
    def of(
        cls, config: EngineConfig, model: ModelConfig, spec: CacheSpec, max_model_len: int, has_tokenizer: bool
    ) -> RequestBounds:
        return cls(
            scheduler=config.scheduler,
            vocab_size=model.vocab_size,
            eos_ids=frozenset(i for i in model.eos_token_ids if i < model.vocab_size),  # a tokenizer may have more
            max_model_len=max_model_len,
            max_request_tokens=spec.max_request_tokens,
            has_tokenizer=has_tokenizer,
        )

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Ids that end a sequence, from its min_tokens on."""
        stop_ids = frozenset(params.stop_token_ids)
        return stop_ids if params.ignore_eos else stop_ids | self.eos_ids

    def check(self, request: Request) -> int:
        """Prompt and output tokens the request may reach. RequestError(INVALID_ARGUMENT) if it cannot be served."""
        ids, params, vocab = request.prompt_token_ids, request.params, self.vocab_size
        self.check_prompt(ids)
        if params.n > self.scheduler.max_num_waiting:
            raise invalid(f"n={params.n} is more than may wait: max_num_waiting={self.scheduler.max_num_waiting}")
        scheduler = self.scheduler
        if not scheduler.enable_chunked_prefill and len(ids) > scheduler.max_num_batched_tokens:
            raise invalid(
                f"the prompt has {len(ids)} tokens, more than "
                f"max_num_batched_tokens={scheduler.max_num_batched_tokens}, and enable_chunked_prefill is off"
            )
        most = self.max_request_tokens
        total = min(self.max_model_len, len(ids) + (params.max_tokens or self.max_model_len))
        if params.max_tokens is None:
            total = min(total, most)
        if total > most or len(ids) >= most:
            raise invalid(
                f"prompt and max_tokens make {max(total, len(ids) + 1)} tokens, and the cache holds {most}: raise "
                "num_gpu_blocks_override or cache_memory_bytes, or ask for less"
            )
        if params.min_tokens > total - len(ids):
            raise invalid(
                f"min_tokens={params.min_tokens} is more than the {total - len(ids)} tokens that "
                f"max_model_len={self.max_model_len} leaves after the prompt"
            )
        for name, named in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = next((i for i in named if not 0 <= i < vocab), None)
            if bad is not None:
                raise invalid(f"{name} names token {bad}: ids of this model are in [0, vocab_size={vocab})")
        banned = {token for token, bias in params.logit_bias.items() if bias == -math.inf}
        if len(banned) == vocab:
            raise invalid(
                f"logit_bias bans all tokens: one at least must have a bias of {-MAX_BIAS:g} or more, or none"
            )
        if params.min_tokens and len(self.stop_ids(params) | banned) == vocab:
            raise invalid(
                f"min_tokens={params.min_tokens} cannot be reached: every token ends the answer "
                "(stop_token_ids, the end token) or is banned (logit_bias)"
            )
        if params.stop and not self.has_tokenizer:
            raise invalid("stop needs a tokenizer and this engine has none; use stop_token_ids")
        return total

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raises RequestError(INVALID_ARGUMENT) unless the model can go on from these ids."""
        if not len(ids):
            raise invalid("the prompt is empty: give at least one token")
        check_prompt_len(len(ids), self.max_model_len)
        low, high = request_fields.ends("prompt", ids)
        if low < 0 or high >= self.vocab_size:
            raise invalid(
                f"prompt token {shown(low if low < 0 else high)} is not a token: ids of this model are in "
                f"[0, vocab_size={self.vocab_size})"
            )
