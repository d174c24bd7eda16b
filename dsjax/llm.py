"""`LLM`: the engine for notebooks and scripts, without a server."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
from tqdm import tqdm

from dsjax.config import MESH_PATH, EngineConfig, override_all
from dsjax.config_fields import field_paths, flag_name
from dsjax.engine import Engine
from dsjax.errors import ConfigError, invalid, shown
from dsjax.prompt_len import check_texts
from dsjax.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs

Prompt = str | Sequence[int]


@dataclass
class Completion:
    """One of the n answers to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None


@dataclass
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def add(self, event: TokenEvent) -> None:
        """Takes in one event of the request. Raises the event's error."""
        if event.error is not None:
            raise event.error
        out = self.outputs[event.index]
        out.text += event.text
        out.token_ids += event.token_ids
        out.logprobs += event.logprobs
        out.finish_reason, out.matched_stop = event.finish_reason, event.matched_stop
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs


class LLM:
    """A model ready to generate.

    `LLM("dsjax-nano")` serves the embedded model, `LLM("path/to/checkpoint")` any DeepSeek-V4 checkpoint; other
    settings are those of EngineConfig by their own names, e.g. `max_num_seqs=32, dtype="bfloat16"`.
    Raises ConfigError for an unknown setting or a checkpoint that cannot be loaded.
    """

    def __init__(self, model: str = "dsjax-nano", *, progress: bool = True, **settings: Any):
        config = EngineConfig(model=model)
        paths = {flag_name(path): path for path in (*field_paths(config), MESH_PATH)}
        config = override_all(config, [(paths.get(name, name), str(value)) for name, value in settings.items()])
        if config.distributed.num_processes > 1:
            raise ConfigError(f"num_processes={config.distributed.num_processes} needs dsjax-serve: LLM is one process")
        self.engine = Engine.from_config(config, progress=progress)
        self.engine.warm_up(progress)
        self._ids = itertools.count()
        self._unread: dict[str, deque[TokenEvent]] = {}  # of each open stream

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers prompts (texts or token ids), all in one batch; one output a prompt, in order.

        `params` is one for all or one a prompt. Raises RequestError, for the first prompt that is refused; the
        others are then dropped.
        """
        batch = _batch(prompts)
        each = params if isinstance(params, (list, tuple)) else [_params(params)] * len(batch)
        each = [_params(one) for one in each]
        if len(each) != len(batch):
            raise invalid(f"params has {len(each)} entries for {len(batch)} prompts: give one, or one a prompt")
        waiting = list(zip(batch, each, strict=True))
        outputs: dict[str, RequestOutput] = {}
        remaining = sum(p.n for p in each)
        try:
            with tqdm(total=remaining, desc="generating", unit="answer", disable=not progress) as bar:
                while remaining:
                    while waiting and self._has_room(waiting[0][1].n):
                        request_id, output = self._add(*waiting.pop(0))
                        outputs[request_id] = output
                    for event in self._step():
                        outputs[event.request_id].add(event)
                        if event.finished:
                            remaining -= 1
                            bar.update()
        finally:
            for request_id in outputs:  # after an error; does nothing to those that ended
                self.engine.cancel(request_id)
        return list(outputs.values())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Answers one prompt, event by event; `event.text` joined is the answer. Raises RequestError.

        Several streams may be open at once, and `generate` be called meanwhile: each call moves all of them on. To
        close a stream drops its request.
        """
        params = _params(params)
        request_id, _ = self._add(prompt, params)
        unread = self._unread[request_id] = deque()
        remaining = params.n
        try:
            while remaining:
                while not unread:
                    self._step()
                event = unread.popleft()
                if event.error is not None:
                    raise event.error
                remaining -= event.finished
                yield event
        finally:
            self.engine.cancel(request_id)
            del self._unread[request_id]

    def _step(self) -> list[TokenEvent]:
        """Moves every request on. Returns the events that are no open stream's; a stream's wait until it is asked."""
        others: list[TokenEvent] = []
        for event in self.engine.step():
            self._unread.get(event.request_id, others).append(event)
        return others

    def _has_room(self, n: int) -> bool:
        limit = self.engine.config.scheduler.max_num_waiting
        return self.engine.stats().num_waiting + n <= limit or not self.engine.has_work()

    def _add(self, prompt: Prompt, params: SamplingParams) -> tuple[str, RequestOutput]:
        request_id = f"llm-{next(self._ids)}"
        text = prompt if isinstance(prompt, str) else None
        if text is None and not _is_list(prompt):
            raise invalid(f"prompt={shown(prompt)} is not allowed: it must be a text or a list of token ids")
        ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.engine.add(Request(request_id=request_id, prompt_token_ids=ids, params=params))
        outputs = [Completion(index=i) for i in range(params.n)]
        return request_id, RequestOutput(prompt=text, prompt_token_ids=ids, outputs=outputs)

    def _encode(self, text: str) -> list[int]:
        if self.engine.tokenizer is None:
            raise invalid("the prompt is text and this model has no tokenizer: give token ids")
        check_texts(self.engine.tokenizer, [text], self.engine.max_model_len)
        return self.engine.tokenizer.encode(text)


def _batch(prompts: Any) -> list[Prompt]:
    """What `generate` is given, as a list; one that begins with a number is a prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise invalid(f"prompts={shown(prompts)} is not allowed: give a text, a list of token ids, or a list of those")
    return [prompts] if len(prompts) and isinstance(prompts[0], Number) else list(prompts)


def _params(params: Any) -> SamplingParams:
    """Those of a prompt; None is the defaults."""
    if params is not None and not isinstance(params, SamplingParams):
        raise invalid(f"params={shown(params)} is not allowed: it must be SamplingParams, one for all or one a prompt")
    return params or SamplingParams()


def _is_list(value: object) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes, bytearray))
