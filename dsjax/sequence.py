"""What the engine keeps of a live request besides the scheduler's view: it makes events of the tokens.

Runs once for every token: what a sequence says of all its tokens is looked up when it begins.
"""

from __future__ import annotations

from dsjax.detokenizer import Detokenizer
from dsjax.errors import RequestError
from dsjax.request import FinishReason, Request, TokenEvent, TokenLogprobs
from dsjax.runner.output import StepOutput
from dsjax.scheduler.plan import RowPlan
from dsjax.tokenizer import Tokenizer


class LiveSequence:
    """One of a request's `params.n` sequences."""

    __slots__ = (
        "_detokenizer",
        "_first",
        "_id",
        "_index",
        "_logprobs",
        "_max_output",
        "_num_cached",
        "_num_prompt",
        "_stop_ids",
        "_token_ids",
        "prompt_logprobs",
        "request",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer | None):
        """Without a tokenizer there is no text, ids only."""
        params = request.params
        self.request = request
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._detokenizer = Detokenizer(tokenizer, params) if tokenizer else None
        self._id, self._index, self._logprobs = request.parent_id, request.index, params.logprobs
        self._token_ids, self._stop_ids, self._num_prompt = (
            request.token_ids,
            request.stop_ids,
            request.num_prompt_tokens,
        )
        self._max_output = request.max_total_tokens - request.num_prompt_tokens
        self._num_cached = 0  # known when it has started
        self._first = True  # no event has been made

    def advance(self, token: int, output: StepOutput, r: int) -> TokenEvent:
        """Handles one new token, row `r` of a step: text, stops, limits."""
        detokenizer, num_output = self._detokenizer, len(self._token_ids) - self._num_prompt
        text, logprobs = "", ()
        reason = matched = prompt_logprobs = None
        if token in self._stop_ids:  # never before min_tokens: the step holds these ids back, and others are left
            reason = FinishReason.STOP
            params = self.request.params
            matched = token if token in params.stop_token_ids else None
            # its own text is not part of the answer, unless asked for
            if detokenizer is not None and params.include_stop_str_in_output and matched is not None:
                text = detokenizer.add(token)
        elif detokenizer is not None:
            text = detokenizer.add(token)
            if detokenizer.stop is not None:
                reason, matched = FinishReason.STOP, detokenizer.stop
        if reason is None and num_output >= self._max_output:
            reason = FinishReason.LENGTH
        if reason is not None and detokenizer is not None:
            text += detokenizer.finish()
        if self._logprobs is not None:
            logprobs = (_token_logprobs(token, output.logprobs, r, self._logprobs),)
        if self._first:
            self._first, self._num_cached = False, self.request.num_cached
            if self.prompt_logprobs is not None:
                prompt_logprobs = tuple(self.prompt_logprobs)
        return TokenEvent(  # by position, which takes half as long as by name
            self._id,
            self._index,
            (token,),
            text,
            logprobs,
            prompt_logprobs,
            reason,
            matched,
            self._num_prompt,
            self._num_cached,
            num_output,
        )

    def failed(self, error: RequestError) -> TokenEvent:
        """The last event, if the sequence ends without an answer."""
        request = self.request
        return TokenEvent(
            request_id=request.parent_id,
            index=request.index,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached,
            num_output_tokens=request.num_output_tokens,
            error=error,
        )

    def add_prompt_logprobs(self, row: RowPlan, output: StepOutput, token: int) -> None:
        """Appends what this step says of prompt positions start + 1 .. end (recomputed ones are known already); the
        step's tokens from `token` on are the row's."""
        request, known = row.request, self.prompt_logprobs
        assert known is not None and request.params.prompt_logprobs is not None
        for position in range(row.start + 1, min(row.end + 1, request.num_prompt_tokens)):
            if position == len(known):
                at = token + position - 1 - row.start
                known.append(
                    _token_logprobs(
                        request.prompt_token_ids[position], output.prompt_logprobs, at, request.params.prompt_logprobs
                    )
                )


def _token_logprobs(token: int, logprobs, r: int, num_top: int) -> TokenLogprobs:
    top = tuple(
        (int(i), float(v)) for i, v in zip(logprobs.top_ids[r, :num_top], logprobs.top[r, :num_top], strict=True)
    )
    return TokenLogprobs(token_id=token, logprob=float(logprobs.chosen[r]), rank=int(logprobs.rank[r]), top=top)
