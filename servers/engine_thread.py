"""The one thread that owns the engine.  [no jax]

    event loop                                   engine thread
    submit(request) ----- _Add ----+
    cancel(stream) ------ _Cancel -+--> inbox --> commands, then one Engine.step --+
    abort(id), call(f) --- ... ----+                                               |
    EventStream.deliver  <------ call_soon_threadsafe, for what is due <-----------+

The thread sleeps on the inbox while the engine has no work, or wants none before some time (`Engine.wake_s`). Whatever
it raises ends every stream, and every later command, with INTERNAL: nobody waits for a thread that is gone.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dsjax.errors import ConfigError, ErrorCode, RequestError, shown
from dsjax.request import FinishReason, Request, TokenEvent
from servers.engine_like import EngineLike
from servers.live import Batch, Live, LiveRequests
from servers.streams import EventStream, Keeper

log = logging.getLogger("dsjax.engine_thread")
T = TypeVar("T")
# How long the engine thread lets the loop have the interpreter for first tokens, while the device is at its next step.
FIRST_WAIT_S = 0.001


class State(enum.Enum):
    LOADING = "loading"
    WARMING = "warming"
    SERVING = "serving"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class _Add:
    stream: EventStream


@dataclass(frozen=True)
class _Cancel:
    stream: EventStream


@dataclass(frozen=True)
class _Call:
    """Runs `function(engine)` between two steps and hands its result to `reply`, a future of the loop."""

    function: Callable[[Any], Any]
    reply: asyncio.Future


class EngineThread:
    """Runs an engine made by `make_engine` (in the thread, so that loading does not block the loop).

    Methods are called on the event loop that called `start`; `on_state` is called there too. Of the steps' tokens, at
    most `max_messages_per_s` times a second a stream is handed some (0: no limit), besides its first and its last.
    """

    def __init__(
        self,
        make_engine: Callable[[], EngineLike],
        *,
        progress: bool = False,
        max_messages_per_s: float = 0,
        on_state: Callable[[State], None] = lambda state: None,
    ):
        self.state = State.LOADING
        self.error: RequestError | None = None  # why the state is FAILED
        self._make_engine = make_engine
        self._progress = progress
        self._on_state = on_state
        self._thread = threading.Thread(target=self._run, name="dsjax-engine", daemon=True)
        self._lock = threading.Condition()
        self._inbox: deque[_Add | _Cancel | _Call] = deque()  # guarded by _lock
        self._ended: RequestError | None = None  # guarded by _lock: what commands get once the thread is gone
        self._stopping = False  # guarded by _lock
        self._first_sent = threading.Event()  # first tokens of the last step that had some
        self._live = LiveRequests(max_messages_per_s)  # engine thread only
        self._engine: EngineLike | None = None
        self._step_began_s: float | None = None  # written by the engine thread, time.monotonic; None between steps

    # --- event loop ----------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stopped = asyncio.Event()
        self._thread.start()

    async def wait_ready(self) -> None:
        """Returns when the engine is warm. Raises what loading or warming up raised."""
        await asyncio.shield(self._ready)

    @property
    def engine(self) -> EngineLike:
        """For its constants (config, tokenizer, max_model_len); only once the state is past LOADING."""
        assert self._engine is not None, "the engine is not loaded"
        return self._engine

    @property
    def step_s(self) -> float:
        """How long the step that runs now has taken so far; 0 between steps."""
        return 0.0 if (began_s := self._step_began_s) is None else time.monotonic() - began_s

    def submit(
        self, request: Request, *, interval: int = 0, max_unread_tokens: int = 0, keeper: Keeper | None = None
    ) -> EventStream:
        """Queues `request`. A refusal comes from the stream, as everything else does.

        Whoever submits must call `cancel(stream)` in the end, in a `finally`; or else waits for `stream.closed`.
        """
        stream = EventStream(request, interval=interval, max_unread_tokens=max_unread_tokens, keeper=keeper)
        self._post(_Add(stream))
        return stream

    def cancel(self, stream: EventStream) -> None:
        """Drops the stream's request before the next step; nothing if it has ended. Never touches a later request
        with the same id."""
        if not stream.closed.is_set():
            self._post(_Cancel(stream))

    async def abort(self, request_id: str) -> bool:
        """Ends a live request of that id with FinishReason.ABORT on its stream; False if there is none."""
        return await self.call(lambda engine: self._abort(engine, request_id))

    async def call(self, function: Callable[[Any], T]) -> T:
        """Runs `function(engine)` on the engine thread between two steps. Raises what it raises."""
        reply = self._loop.create_future()
        self._post(_Call(function, reply))
        return await reply

    async def stop(self, timeout_s: float) -> bool:
        """Asks the thread to end after the step or compilation it is in; False if it does not in time."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        try:
            await asyncio.wait_for(self._stopped.wait(), timeout_s)
        except TimeoutError:
            return False
        self._thread.join()
        return True

    def _post(self, command: _Add | _Cancel | _Call) -> None:
        with self._lock:
            error = self._ended
            if error is None:
                self._inbox.append(command)
                self._lock.notify()
        if error is not None:
            self._refuse(command, error)

    # --- any thread ----------------------------------------------------------------------------

    def _finish(self, error: BaseException | None) -> None:
        """Ends all streams and refuses what comes later. The first call says why; the engine thread makes the last.

        Also called by the engine from elsewhere, when it knows that a step will never end.
        """
        if error is None:
            ended = RequestError(ErrorCode.UNAVAILABLE, "the server has shut down")
        else:
            ended = _internal("the engine failed and the server must be restarted", error)
        with self._lock:
            first = self._ended is None
            ended = self._ended = self._ended or ended
            left = list(self._inbox)
            self._inbox.clear()
        if first:
            self.error = None if error is None else ended
            self._set_state(State.STOPPED if error is None else State.FAILED)
        if first and error is not None:
            self._on_loop(_set_exception, self._ready, error)
        for live in self._live.all():
            self._end(live.stream, ended)
        for command in left:
            self._refuse(command, ended)
        if first and self._engine is not None:
            try:
                self._engine.close(error)
            except Exception:  # the clients have their answer: what is left can only be logged
                log.exception("the engine did not close")

    def _refuse(self, command: _Add | _Cancel | _Call, error: RequestError) -> None:
        match command:
            case _Add(stream):
                self._end(stream, error)
            case _Cancel(stream):
                self._end(stream, None)
            case _Call(_, reply):
                self._on_loop(_set_exception, reply, error)

    def _end(self, stream: EventStream, error: RequestError | None) -> None:
        self._on_loop(_end_stream, stream, error)

    def _on_loop(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("dropped %s: the event loop is closed", function)

    # --- engine thread -------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            engine = self._engine = self._make_engine()
            self._set_state(State.WARMING)
            engine.warm_up(self._progress)
            self._set_state(State.SERVING)
            engine.watch(self._finish)  # after SERVING, which must not come after a FAILED
            self._on_loop(_set_result, self._ready, None)
            while self._do_commands(engine):
                if engine.has_work() or engine.wake_s() is not None:
                    self._step_began_s = time.monotonic()
                    events, self._step_began_s = engine.step(), None
                    self._hand_over(engine, events)
        except BaseException as raised:  # also SystemExit: no caller may be left waiting
            error = raised
            if not (isinstance(raised, ConfigError) and self.state is not State.SERVING):
                log.exception("the engine failed")
        self._finish(error)
        self._on_loop(self._stopped.set)

    def _set_state(self, state: State) -> None:
        self.state = state
        self._on_loop(self._on_state, state)

    def _do_commands(self, engine: EngineLike) -> bool:
        """Waits for a command or until the engine wants to step, runs all commands there are; False when the thread is
        to stop."""
        with self._lock:
            if not self._inbox and not self._stopping and (sleep_s := _sleep_s(engine)) != 0:
                self._lock.wait(sleep_s)
            if self._stopping:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for number, command in enumerate(commands):
            try:
                self._do(engine, command)
            except BaseException:
                with self._lock:  # what was taken out must still be answered
                    self._inbox.extendleft(reversed(commands[number:]))
                raise
        return True

    def _do(self, engine: EngineLike, command: _Add | _Cancel | _Call) -> None:
        match command:
            case _Add(stream):
                request = stream.request
                if self._live.get(request.request_id) is not None:
                    self._end(stream, _live_id(request.request_id))
                    return
                try:
                    engine.add(request)
                except RequestError as error:
                    self._end(stream, error)
                except Exception as error:  # one odd request must not end the others
                    log.exception("Engine.add raised for request %r", request.request_id)
                    engine.cancel(request.request_id)
                    self._end(stream, _internal("the request could not be queued", error))
                else:
                    self._live.add(stream)
                    if stream.keeper is not None:
                        self._on_loop(stream.accepted.set)
            case _Cancel(stream):
                live = self._live.get(stream.request.request_id)
                if live is not None and live.stream is stream:
                    self._drop(engine, live)
                self._end(stream, None)
            case _Call(function, reply):
                try:
                    result = function(engine)
                except RequestError as error:
                    self._on_loop(_set_exception, reply, error)
                except Exception as error:
                    log.exception("a call between steps raised")
                    self._on_loop(_set_exception, reply, _internal("the engine could not answer", error))
                else:
                    self._on_loop(_set_result, reply, result)

    def _drop(self, engine: EngineLike, live: Live) -> None:
        engine.cancel(live.stream.request.request_id)  # first: if it raises, the stream still hears of it
        self._live.remove(live)

    def _abort(self, engine: EngineLike, request_id: str) -> bool:
        live = self._live.get(request_id)
        if live is None:
            return False
        events = list(live.held)
        self._drop(engine, live)
        for index, last in live.last.items():
            events.append(
                TokenEvent(
                    request_id=request_id,
                    index=index,
                    finish_reason=FinishReason.ABORT,
                    num_prompt_tokens=live.stream.request.num_prompt_tokens,
                    num_cached_tokens=last.num_cached_tokens if last else 0,
                    num_output_tokens=last.num_output_tokens if last else 0,
                )
            )
        self._on_loop(self._deliver, [(live.stream, events, True)])
        return True

    def _hand_over(self, engine: EngineLike, events: list[TokenEvent]) -> None:
        """Sends what is due of the steps' events to their streams, first tokens before anything else is looked at."""
        first = [event for event in events if event.num_output_tokens <= len(event.token_ids)]
        if first:
            events = [event for event in events if event.num_output_tokens > len(event.token_ids)]
            self._first_sent.clear()
            self._on_loop(self._deliver_first, self._live.take_all(first, engine.cancel))
            self._first_sent.wait(FIRST_WAIT_S)
        due = self._live.take_ends(events, engine.cancel)
        if self._live.has_waiting:
            pauses = _sleep_s(engine) != 0  # nothing would come meanwhile for those that wait
            due += self._live.take_turns(None if pauses else engine.clock())
        if due:
            self._on_loop(self._deliver, due)

    def _deliver_first(self, batches: list[Batch]) -> None:
        self._deliver(batches)
        self._loop.call_soon(self._first_sent.set)  # after the calls woken here have written

    def _deliver(self, batches: list[Batch]) -> None:
        """On the loop: hands each stream its events."""
        for stream, events, last in batches:
            if not stream.deliver(events):
                self.cancel(stream)
            if last:
                stream.close()


def _sleep_s(engine: EngineLike) -> float | None:
    """How long a thread without commands may sleep; 0 is not at all, None until one comes."""
    wake_s = engine.wake_s()
    if wake_s is not None:
        return max(0.0, wake_s - engine.clock())
    return 0 if engine.has_work() else None


def _internal(what: str, error: BaseException) -> RequestError:
    return RequestError(ErrorCode.INTERNAL, f"{what}: {type(error).__name__}: {error}")


def _live_id(request_id: str) -> RequestError:
    return RequestError(
        ErrorCode.ALREADY_EXISTS,
        f"request_id={shown(request_id)} belongs to a live request: use another, or leave it empty",
    )


def _end_stream(stream: EventStream, error: RequestError | None) -> None:
    if error is not None:
        stream.fail(error)
    stream.close()


def _set_result(future: asyncio.Future, value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
