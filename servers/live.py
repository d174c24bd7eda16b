"""The requests that the engine knows, and what of their tokens has not been handed to their streams yet.  [no jax]

The engine thread owns it. First tokens and ends are handed over at once, others when it is their stream's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dsjax.request import TokenEvent
from servers.pacer import Pacer
from servers.streams import EventStream

Batch = tuple[EventStream, Sequence[TokenEvent], bool]  # what a stream is handed; the flag says that it is the last


@dataclass(eq=False, slots=True)
class Live:
    """A request the engine knows."""

    stream: EventStream
    last: dict[int, TokenEvent | None]  # the last event of each index that is not finished
    held: list[TokenEvent] = field(default_factory=list)  # not handed over yet
    queued: bool = False  # for its turn

    def take(self) -> Batch:
        held, self.held = self.held, []
        return self.stream, held, not self.last


class LiveRequests:
    """By request id. `cancel` ends a request in the engine when one of its sequences failed and others go on."""

    def __init__(self, max_messages_per_s: float):
        self._live: dict[str, Live] = {}
        self._pacer: Pacer[Live] = Pacer(max_messages_per_s)

    def get(self, request_id: str) -> Live | None:
        return self._live.get(request_id)

    def all(self) -> list[Live]:
        return list(self._live.values())

    def add(self, stream: EventStream) -> None:
        request = stream.request
        self._live[request.request_id] = Live(stream, dict.fromkeys(range(request.params.n)))

    def remove(self, live: Live) -> None:
        """Forgets a request, and what it holds."""
        del self._live[live.stream.request.request_id]
        live.held.clear()

    def take_all(self, events: Iterable[TokenEvent], cancel: Callable[[str], object]) -> list[Batch]:
        """`events`, and what their requests held before."""
        batches = []
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue  # its client went away while the step ran
            if event.finish_reason is None and event.error is None:
                live.last[event.index] = event
            else:
                self._end(live, event, cancel)
            if live.held:
                live.held.append(event)
                batches.append(live.take())
            else:
                batches.append((live.stream, (event,), not live.last))
        return batches

    def take_ends(self, events: Iterable[TokenEvent], cancel: Callable[[str], object]) -> list[Batch]:
        """The same of the requests of which a sequence ends; the others wait for their turn, if turns are limited."""
        if not self._pacer.is_limited:
            return self.take_all(events, cancel)
        ends: dict[Live, None] = {}
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            live.held.append(event)
            if event.finish_reason is None and event.error is None:
                live.last[event.index] = event
                if not live.queued:
                    live.queued = True
                    self._pacer.add(live)
            else:
                self._end(live, event, cancel)
                ends[live] = None
        return [live.take() for live in ends]

    @property
    def has_waiting(self) -> bool:
        return bool(self._pacer)

    def take_turns(self, now_s: float | None) -> list[Batch]:
        """What those hold whose turn has come by `now_s`, on the engine's clock; None: all."""
        batches = []
        for live in self._pacer.all() if now_s is None else self._pacer.turns(now_s):
            live.queued = False
            if live.held:  # it may have ended, or been taken, meanwhile
                batches.append(live.take())
        return batches

    def _end(self, live: Live, event: TokenEvent, cancel: Callable[[str], object]) -> None:
        """`event` ends a sequence; the last one's ends the request."""
        live.last.pop(event.index, None)
        if event.error is not None and live.last:
            cancel(event.request_id)
            live.last.clear()
        if not live.last:
            del self._live[event.request_id]
