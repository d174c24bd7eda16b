"""Turns the ids of one sequence into text while they arrive.  [no jax]

Ids are taken one at a time, however many come in a step, so the text and the match never depend on how a sequence was
cut into steps. Work for a token depends on its own text alone: an id becomes bytes, bytes go through an incremental
UTF-8 decoder, characters through the stop automaton.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.request import SamplingParams
from dsjax.stop_strings import stop_automaton
from dsjax.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")  # with "replace" it equals Rust's from_utf8_lossy in `tokenizers`


@dataclass(frozen=True, kw_only=True)
class StopMatch:
    """A stop string was completed: `num_tokens_kept` of the ids of THIS `add` belong to the output (1 or more)."""

    stop: str
    num_tokens_kept: int


class Detokenizer:
    """One sequence's text: `add` ids as they come, `take_text` what may be shown, `finish` once at the end.

    All text taken, joined, equals `tokenizer.decode` of all ids, cut at the matched stop string. Of several stop
    strings the one completed first matches; of those completed by the same character, the one that starts first.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._automaton = stop_automaton(params.stop) if params.stop else None
        self._state = 0
        self._held = ""  # may be the beginning of a stop string
        self._utf8 = _Utf8Decoder("replace")  # holds up to 3 bytes of an incomplete character
        self._ready: list[str] = []
        self._num_tokens = 0
        self._done = False

    def add(self, ids: Sequence[int]) -> StopMatch | None:
        """Takes the next output ids; returns the match as soon as a stop string is complete.

        A match counts only if the token that completes it is number `min_tokens` or later. After a match the ids and
        text beyond it are dropped, and further calls do nothing.
        """
        if self._done:
            return None
        for position, token_id in enumerate(ids):
            self._num_tokens += 1
            if self._skip_special and self._tokenizer.is_special(token_id):
                continue
            text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
            stop = self._add_text(text)
            if stop is not None:
                self._done = True
                return StopMatch(stop=stop, num_tokens_kept=position + 1)
        return None

    def take_text(self) -> str:
        """Text that became visible since the last call; "" while a character or a possible stop is incomplete."""
        ready = self._ready
        if len(ready) == 1:
            return ready.pop()
        text = "".join(ready)
        ready.clear()
        return text

    def finish(self) -> None:
        """The sequence has ended: shows what was held back; an incomplete character becomes U+FFFD."""
        if self._done:
            return
        self._done = True
        self._ready += [self._held, self._utf8.decode(b"", final=True)]
        self._held = ""

    def _add_text(self, text: str) -> str | None:
        automaton = self._automaton
        if automaton is None:
            if text:
                self._ready.append(text)
            return None
        may_match = self._num_tokens >= self._min_tokens
        state = self._state
        for end, char in enumerate(text, 1):
            state = automaton.step(state, char)
            stop = automaton.match[state]
            if stop is not None and may_match:
                seen = self._held + text[:end]
                self._ready.append(seen if self._include_stop else seen[: len(seen) - len(stop)])
                self._held = ""
                return stop
        self._state = state
        seen = self._held + text
        visible = len(seen) - automaton.hold[state]
        if visible:
            self._ready.append(seen[:visible])
        self._held = seen[visible:]
        return None
