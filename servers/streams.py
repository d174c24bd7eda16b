"""The asyncio side of one request: token events come in from the engine thread, the caller awaits them.  [no jax]

Everything here runs on the event loop. Events that the caller has not taken yet are merged, so a slow client costs the
memory of its tokens, not of messages, and at most `max_unread_tokens` of those; no other stream waits for it.

The stream of a job also keeps all that ever came, taken or not, so that a call that turns into a job loses nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from typing import Protocol

from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Request, TokenEvent, TokenLogprobs


class Keeper(Protocol):
    """Who answers for what a stream keeps."""

    def grow(self, num_values: int) -> RequestError | None:
        """So many ids and log-probabilities came. An error drops what is kept and ends the stream: there is no room."""
        ...

    def ended(self) -> None:
        """Nothing more will come, and the engine holds nothing of the request."""
        ...


class _Merged:
    """The merged events of one index: those that nobody has taken, or all. One alone, the usual case, is not copied."""

    __slots__ = ("_logprobs", "_prompt_logprobs", "_text", "_token_ids", "last", "num_ids")

    def __init__(self, event: TokenEvent):
        self.last = event
        self.num_ids = len(event.token_ids)
        self._text: list[str] = []  # it and those below are empty while there is one event

    def add(self, event: TokenEvent) -> None:
        """Takes the next event."""
        if not self._text:
            first = self.last
            self._text, self._token_ids, self._logprobs = [first.text], [*first.token_ids], [*first.logprobs]
            self._prompt_logprobs = first.prompt_logprobs
        self.last = event
        self.num_ids += len(event.token_ids)
        self._text.append(event.text)
        self._token_ids += event.token_ids
        if event.logprobs:
            self._logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs

    def merged(self) -> TokenEvent:
        last = self.last
        if not self._text:
            return last
        return TokenEvent(
            request_id=last.request_id,
            index=last.index,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=last.finish_reason,
            matched_stop=last.matched_stop,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            num_output_tokens=last.num_output_tokens,
        )


class EventStream:
    """The events of one request (all `params.n` of it), from `EngineThread.submit`.

    The first event of each index, and its last, may be taken at once; what comes between them is held back until it has
    `interval` ids (0: until the last). `max_unread_tokens` 0 is no limit, for callers that want the whole answer at
    once anyway. With a `keeper` all that comes is kept.
    """

    def __init__(
        self,
        request: Request,
        *,
        interval: int = 0,
        max_unread_tokens: int = 0,
        keeper: Keeper | None = None,
    ):
        self.request = request
        self.accepted = asyncio.Event()  # the engine has queued the request; only set if there is a keeper
        self.closed = asyncio.Event()  # nothing more will come, and the engine holds nothing of the request
        self.keeper = keeper
        self.first_s: float | None = None  # time.monotonic, when the first token came
        self._interval = interval or math.inf
        self._kept: dict[int, _Merged] = {}
        self._detached = False  # nobody will take anything
        self._max_unread = max_unread_tokens
        self._unread: dict[int, _Merged] = {}
        self._due: set[int] = set()  # indices of which something may be taken
        self._num_unread = 0
        self._error: RequestError | None = None
        self._news = asyncio.Event()  # something may be taken
        self._over = asyncio.Event()  # closed, or ended with an error
        self._started: set[int] = set()  # indices of which something was taken

    def deliver(self, events: Iterable[TokenEvent]) -> bool:
        """Adds events; False if the stream has ended with an error, so that the engine need not go on."""
        if self._error is not None:
            return False
        for event in events:
            if event.error is not None:
                self.fail(event.error)
                return True
            if self.first_s is None:
                self.first_s = time.monotonic()
            if self.keeper is not None:
                _add(self._kept, event)
                error = self.keeper.grow(_num_values(event) + _num_logprobs(event.prompt_logprobs or ()))
                if error is not None:
                    self._kept.clear()
                    self.fail(error)
                    return False
            if self._detached:
                continue
            index = event.index
            unread = self._unread.get(index)
            if unread is None:
                unread = self._unread[index] = _Merged(event)
            else:
                unread.add(event)
            self._num_unread += _num_values(event) if event.logprobs else len(event.token_ids)
            if unread.num_ids >= self._interval or event.finish_reason is not None or index not in self._started:
                self._due.add(index)
                self._news.set()
        if self._max_unread and self._num_unread > self._max_unread:
            message = (
                f"the client left {self._num_unread} tokens and log-probabilities unread, more than "
                f"max_unread_tokens={self._max_unread}: read faster, or raise --max_unread_tokens"
            )
            self.fail(RequestError(ErrorCode.RESOURCE_EXHAUSTED, message))
            return False
        return True

    def fail(self, error: RequestError) -> None:
        """Ends the stream with `error`; what is unread is dropped."""
        if self._error is None and not self.closed.is_set():
            self._error = error
            self._unread.clear()
            self._due.clear()
            self._news.set()
            self._over.set()

    def close(self) -> None:
        """Says that nothing more will come."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._news.set()
        self._over.set()
        if self.keeper is not None:
            self.keeper.ended()

    @property
    def error(self) -> RequestError | None:
        return self._error

    def detach(self) -> None:
        """From now on nobody takes events; they are only kept."""
        self._detached = True
        self._unread.clear()
        self._due.clear()
        self._num_unread = 0

    def whole(self) -> list[TokenEvent]:
        """Everything that was kept, one merged event for each index that has some."""
        return [kept.merged() for _, kept in sorted(self._kept.items())]

    async def take(self) -> list[TokenEvent]:
        """Waits for what may be taken and returns one merged event for each index that has some; [] once all is taken.

        Raises RequestError when the request was refused or failed.
        """
        while True:
            await self._news.wait()
            if self._error is not None:
                raise self._error
            due = sorted(self._due)
            self._due.clear()
            if not self.closed.is_set():
                self._news.clear()
            elif not due:
                return []
            if due:
                events = [self._unread.pop(index).merged() for index in due]
                self._started.update(due)
                self._num_unread -= sum(map(_num_values, events))
                return events

    async def take_all(self) -> list[TokenEvent]:
        """Waits for the end and returns one merged event for each index, in order. Raises as `take`."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
        events = [unread.merged() for _, unread in sorted(self._unread.items())]
        self._unread.clear()
        return events


def _add(merged: dict[int, _Merged], event: TokenEvent) -> _Merged:
    """Adds an event to those of its index, which are returned."""
    found = merged.get(event.index)
    if found is None:
        found = merged[event.index] = _Merged(event)
    else:
        found.add(event)
    return found


def _num_values(event: TokenEvent) -> int:
    """Ids and log-probabilities of an event's tokens."""
    return len(event.token_ids) + (_num_logprobs(event.logprobs) if event.logprobs else 0)


def _num_logprobs(entries: Iterable[TokenLogprobs | None]) -> int:
    return sum(1 + len(entry.top) for entry in entries if entry is not None)
