"""A deterministic engine for server tests: the next token is the last one + 1, and ids are bytes.

So the prompt "abc" (97, 98, 99) is answered "defgh...". A request holds one page while it is queued or running. Hooks:
`gate` (a threading.Event: steps wait for it), `raise_in_step` (raised by the next step, once), `log` (what happened).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs import serving
from dsjax.config import LayerKind, ModelConfig
from dsjax.detokenizer import Detokenizer
from dsjax.errors import ErrorCode, RequestError, invalid
from dsjax.request import FinishReason, Request, TokenEvent, TokenLogprobs

VOCAB = 256 + 8
EOS_ID = 10  # the byte "\n"
CONTROL = {"<｜begin▁of▁sentence｜>": 256, "<｜end▁of▁sentence｜>": 257, "<｜User｜>": 258, "<｜Assistant｜>": 259,
           "<think>": 260, "</think>": 261, "｜DSML｜": 262, "<｜latest_reminder｜>": 263}  # fmt: skip
_TEXTS = {token_id: text for text, token_id in CONTROL.items()}
MODEL = ModelConfig(
    vocab_size=VOCAB, hidden_size=8, num_attention_heads=2, head_dim=8, qk_rope_head_dim=4, q_lora_rank=8, o_groups=1,
    o_lora_rank=8, moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1, num_hash_layers=0,
    routed_scaling_factor=1.0, swiglu_limit=0.0, sliding_window=8, index_n_heads=0, index_head_dim=0, index_topk=0,
    hc_mult=2, max_position_embeddings=4096, layer_kinds=(LayerKind.SLIDING,), eos_token_ids=(EOS_ID,),
)  # fmt: skip


class FakeTokenizer:
    """One token a byte; control tokens above."""

    vocab_size = VOCAB
    bos_token_id = 256
    eos_token_ids = (EOS_ID,)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def fewest_tokens(self, num_bytes: int) -> int:
        return num_bytes

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else _TEXTS[token_id].encode()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in (256, 257)

    def control_id(self, marker: str) -> int | None:
        return CONTROL.get(marker)


@dataclass(frozen=True)
class FakeStats:
    num_waiting: int
    num_running: int
    num_pages_total: int
    num_pages_free: int
    num_pages_cached: int
    kv_cache_usage: float
    num_steps: int


@dataclass
class _Sequence:
    request: Request
    index: int
    detokenizer: Detokenizer
    output: list[int] = field(default_factory=list)


class FakeEngine:
    """Engine's interface. Runs `max_num_seqs` requests at once, each a token a step; prompts take one step a chunk."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        max_num_waiting: int = 64,
        max_model_len: int = 4096,
        chunk: int = 1 << 30,
        num_cached: int = 0,
        script: str = "",
    ):
        self.config = serving.load("nano")
        self.model_config = MODEL
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.max_model_len = max_model_len
        self.clock = time.monotonic
        self.num_pages = max_num_seqs + max_num_waiting
        self.gate = threading.Event()
        self.gate.set()
        self.warm_gate = threading.Event()
        self.warm_gate.set()
        self.waits = 0  # steps that found the gate closed
        self.raise_in_step: BaseException | None = None
        self.raise_in_add: Exception | None = None
        self.num_steps = 0
        self.idle_s = 0.0  # what first_token_s says
        self.log: list[tuple[str, str]] = []
        self._max_num_seqs, self._max_num_waiting = max_num_seqs, max_num_waiting
        self._chunk, self._num_cached, self._script = chunk, num_cached, list(script.encode())
        self._waiting: list[Request] = []
        self._running: dict[str, list[_Sequence]] = {}
        self._prefill: dict[str, int] = {}  # prompt tokens left

    def warm_up(self, progress: bool = False) -> None:
        self.warm_gate.wait(30)

    def add(self, request: Request) -> None:
        if self.raise_in_add is not None:
            error, self.raise_in_add = self.raise_in_add, None
            raise error
        if not request.prompt_token_ids:
            raise invalid("the prompt is empty: it must have at least one token")
        if request.num_prompt_tokens >= self.max_model_len:
            raise invalid(
                f"the prompt has {request.num_prompt_tokens} tokens: with an answer it must fit into "
                f"max_model_len={self.max_model_len}; raise --max_model_len"
            )
        if request.request_id in self._running or any(r.request_id == request.request_id for r in self._waiting):
            raise RequestError(ErrorCode.ALREADY_EXISTS, f"request_id={request.request_id!r} is live")
        if len(self._waiting) >= self._max_num_waiting:
            raise RequestError(
                ErrorCode.RESOURCE_EXHAUSTED, f"{len(self._waiting)} requests wait: max_num_waiting allows no more"
            )
        self._waiting.append(request)
        self.log.append(("add", request.request_id))

    def cancel(self, request_id: str) -> bool:
        self.log.append(("cancel", request_id))
        before = len(self._waiting)
        self._waiting = [r for r in self._waiting if r.request_id != request_id]
        live = self._running.pop(request_id, None) is not None or len(self._waiting) < before
        return live

    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def wake_s(self) -> float | None:
        return None

    def prefetch(self, *, token_ids: Sequence[int], session_id: str, cache_salt: str) -> bool:
        self.log.append(("prefetch", f"{list(token_ids)} {session_id!r} {cache_salt!r}"))
        return bool(session_id)

    def step(self) -> list[TokenEvent]:
        time.sleep(0)  # as a step that waits for its device, this lets other threads run
        if not self.gate.is_set():
            self.waits += 1
            self.gate.wait(30)
        if self.raise_in_step is not None:
            error, self.raise_in_step = self.raise_in_step, None
            raise error
        self.num_steps += 1
        events = self._expire()
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting.pop(0)
            self.log.append(("start", request.request_id))
            self._prefill[request.request_id] = request.num_prompt_tokens
            self._running[request.request_id] = [
                _Sequence(request, index, Detokenizer(self.tokenizer, request.params))  # type: ignore[arg-type]
                for index in range(request.params.n)
            ]
        for request_id, sequences in list(self._running.items()):
            self._prefill[request_id] -= self._chunk
            if self._prefill[request_id] > 0:
                continue
            for sequence in list(sequences):
                event = self._advance(sequence)
                events.append(event)
                if event.finished:
                    sequences.remove(sequence)
            if not sequences:
                del self._running[request_id]
                self.log.append(("finish", request_id))
        return events

    def _expire(self) -> list[TokenEvent]:
        now, events = time.monotonic(), []
        for request in [*self._waiting, *(s[0].request for s in self._running.values())]:
            if request.deadline_s is not None and now >= request.deadline_s:
                self.cancel(request.request_id)
                self.log.append(("expire", request.request_id))
                error = RequestError(ErrorCode.DEADLINE_EXCEEDED, "the deadline passed")
                events.append(TokenEvent(request_id=request.request_id, error=error))
        return events

    def _advance(self, sequence: _Sequence) -> TokenEvent:
        request, params, output = sequence.request, sequence.request.params, sequence.output
        first = not output
        if self._script:
            token = self._script[len(output) % len(self._script)]
        else:
            token = ((output or request.prompt_token_ids)[-1] + 1) % 256
        output.append(token)
        text = sequence.detokenizer.add(token)
        finish, matched = None, None
        enough = len(output) >= params.min_tokens
        if sequence.detokenizer.stop is not None:
            finish, matched = FinishReason.STOP, sequence.detokenizer.stop
        elif (enough and token in params.stop_token_ids) or (enough and token == EOS_ID and not params.ignore_eos):
            finish, matched = FinishReason.STOP, token
        elif len(output) == params.max_tokens or request.num_prompt_tokens + len(output) >= self.max_model_len:
            finish = FinishReason.LENGTH
        if finish is not None:
            text += sequence.detokenizer.finish()
        entry = self._logprobs(token, params.logprobs)
        prompt = None
        if first and params.prompt_logprobs is not None:
            rest = [self._logprobs(t, params.prompt_logprobs)[0] for t in request.prompt_token_ids[1:]]
            prompt = (None, *rest)
        return TokenEvent(
            request_id=request.request_id,
            index=sequence.index,
            token_ids=(token,),
            text=text,
            logprobs=entry,
            prompt_logprobs=prompt,
            finish_reason=finish,
            matched_stop=matched,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=self._num_cached,
            num_output_tokens=len(output),
        )

    def _logprobs(self, token: int, count: int | None) -> tuple[TokenLogprobs, ...]:
        if count is None:
            return ()
        top = tuple(((token + i) % 256, -0.5 - i) for i in range(count))
        return (TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top=top),)

    def watch(self, fail: Callable[[BaseException], None]) -> None:
        self.fail = fail

    def close(self, error: BaseException | None = None) -> None:
        self.log.append(("close", "" if error is None else str(error)))

    def first_token_s(self, num_prompt: int) -> float:
        return self.idle_s

    def stats(self) -> FakeStats:
        used = len(self._running) + len(self._waiting)
        return FakeStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_pages_total=self.num_pages,
            num_pages_free=self.num_pages - used,
            num_pages_cached=0,
            kv_cache_usage=used / self.num_pages,
            num_steps=self.num_steps,
        )


FOREVER = {"ignore_eos": True, "max_tokens": 1 << 20}


class Endless(FakeEngine):
    """A step is 5 ms of engine time: FOREVER is never over, so that whatever comes next is in time."""

    def __init__(self, **options: Any):
        super().__init__(**{"max_model_len": 1 << 30, **options})

    def step(self) -> list[TokenEvent]:
        self.gate.clear()
        self.gate.wait(0.005)
        self.gate.set()
        return super().step()
