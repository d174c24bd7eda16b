"""Turns the ids of one sequence into text while they arrive.  [no jax]

Ids are taken one at a time, so the text and the match never depend on how a sequence was cut into steps. Work for a
token depends on its own text alone: an id becomes bytes, bytes go through an incremental UTF-8 decoder, characters
through the stop automaton. Most tokens are whole characters of a request without stop strings: these are looked up.
"""

from __future__ import annotations

import codecs
from functools import lru_cache

from dsjax.request import SamplingParams
from dsjax.stop_strings import stop_automaton
from dsjax.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")  # with "replace" it equals Rust's from_utf8_lossy in `tokenizers`


class _Texts(dict[int, str | None]):
    """The text of each id that was asked for; None where its bytes are not whole characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        super().__init__()
        self._tokenizer, self._skip_special = tokenizer, skip_special

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """What the id adds to the bytes of a text."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


_texts = lru_cache(maxsize=8)(_Texts)  # one for all requests of a tokenizer


class Detokenizer:
    """One sequence's text: `add` ids as they come, `finish` once at the end; each returns what became visible.

    All text returned, joined, equals `tokenizer.decode` of all ids, cut at the matched stop string. Of several stop
    strings the one completed first matches; of those completed by the same character, the one that starts first. A
    match counts only if the token that completes it is number `min_tokens` or later.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self.stop: str | None = None  # the stop string that matched
        self._texts = _texts(tokenizer, params.skip_special_tokens)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._automaton = stop_automaton(params.stop) if params.stop else None
        self._state = 0
        self._held = ""  # may be the beginning of a stop string
        self._utf8 = _Utf8Decoder("replace")  # holds up to 3 bytes of an incomplete character
        self._is_plain = self._automaton is None  # and no character is incomplete
        self._num_tokens = 0  # where there is an automaton
        self._done = False

    def add(self, token_id: int) -> str:
        """Takes the next output id; "" while a character or a possible stop string is incomplete.

        `stop` is set as soon as a stop string is complete. What comes after a match, or after `finish`, is dropped.
        """
        if self._is_plain:
            text = self._texts[token_id]
            if text is not None:
                return text
        if self._done:
            return ""
        text = self._utf8.decode(self._texts.bytes_of(token_id))
        if self._automaton is not None:
            return self._pass(text)
        self._is_plain = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """The sequence has ended: what was held back; an incomplete character becomes U+FFFD."""
        if self._done:
            return ""
        self._done, self._is_plain = True, False
        return self._held + self._utf8.decode(b"", final=True)

    def _pass(self, text: str) -> str:
        """Looks for stop strings in the text of a token; what of it, and of what was held, may be seen."""
        automaton, state = self._automaton, self._state
        assert automaton is not None
        self._num_tokens += 1
        may_match = self._num_tokens >= self._min_tokens
        for end, char in enumerate(text, 1):
            state = automaton.step(state, char)
            stop = automaton.match[state]
            if stop is not None and may_match:
                seen = self._held + text[:end]
                self.stop, self._done = stop, True
                return seen if self._include_stop else seen[: len(seen) - len(stop)]
        self._state = state
        seen = self._held + text
        visible = len(seen) - automaton.hold[state]
        self._held = seen[visible:]
        return seen[:visible]
