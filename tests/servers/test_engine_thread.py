"""The engine thread alone: ownership, hand-over, failures, sleep."""

import asyncio
import threading
import time

import pytest

from dsjax.errors import ConfigError, ErrorCode, RequestError
from dsjax.request import FinishReason, Request, SamplingParams, TokenEvent
from servers.engine_thread import EngineThread, State
from servers.streams import EventStream
from tests.servers.fakes import FakeEngine
from tests.servers.harness import TIMEOUT_S, until


def _request(id: str = "x", **fields) -> Request:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 3), ignore_eos=True, n=fields.pop("n", 1))
    return Request(request_id=id, prompt_token_ids=[97], params=params, **fields)


def _run(test, engine: FakeEngine | None = None, make=None, **options) -> None:
    async def body():
        fake = engine or FakeEngine()
        thread = EngineThread(make or (lambda: fake), **options)
        thread.start()
        try:
            if make is None:
                await thread.wait_ready()
            await test(thread, fake)
        finally:
            fake.gate.set()
            fake.warm_gate.set()
            assert await thread.stop(TIMEOUT_S)

    asyncio.run(asyncio.wait_for(body(), 2 * TIMEOUT_S))


async def _refusal(stream: EventStream) -> RequestError:
    with pytest.raises(RequestError) as raised:
        await stream.take_all()
    return raised.value


def test_every_call_of_the_engine_is_made_by_its_thread():
    names = set()

    class Watched(FakeEngine):
        def __getattribute__(self, name):
            if name in ("warm_up", "add", "cancel", "step", "has_work", "stats"):
                names.add((name, threading.current_thread().name))
            return super().__getattribute__(name)

    async def test(thread, engine):
        stream = thread.submit(_request())
        assert (await stream.take_all())[0].text == "bcd"
        await thread.call(lambda e: e.stats())
        thread.cancel(thread.submit(_request()))
        assert not await thread.abort("never")

    _run(test, Watched())
    assert names == {(n, "dsjax-engine") for n in ("warm_up", "add", "cancel", "step", "has_work", "stats")}


def test_an_idle_thread_sleeps():
    async def test(thread, engine):
        await thread.submit(_request()).take_all()
        await until(lambda: len(thread._lock._waiters) == 1)  # type: ignore[attr-defined]
        looks = engine.looks
        await thread.call(lambda e: None)
        await until(lambda: len(thread._lock._waiters) == 1)  # type: ignore[attr-defined]
        # Woken once: it looked before and after the command, and went back to sleep.
        assert (engine.num_steps, engine.looks - looks) == (3, 2)

    _run(test, _Looked())


class _Looked(FakeEngine):
    looks = 0

    def has_work(self):
        self.looks += 1
        return super().has_work()


def test_a_thread_that_waits_for_company_sleeps_until_a_command_or_its_time():
    async def test(thread, engine):
        stream = thread.submit(_request("lone"))
        await until(lambda: len(thread._lock._waiters) == 1)  # type: ignore[attr-defined]
        assert (engine.looked, engine.num_steps) == (1, 0)  # it stepped once, to learn how long
        await thread.call(lambda e: None)
        await until(lambda: len(thread._lock._waiters) == 1)  # type: ignore[attr-defined]
        assert (engine.looked, engine.num_steps) == (2, 0)
        company = thread.submit(_request("company"))
        assert [(await s.take_all())[0].text for s in (stream, company)] == ["bcd", "bcd"]
        engine.wait_s = 0.01
        assert (await thread.submit(_request("alone")).take_all())[0].text == "bcd"
        assert engine.num_steps == 6

    _run(test, _Batching())


def test_an_engine_without_requests_is_stepped_when_it_wants_to_be():
    class Fetching(FakeEngine):
        looked, due_s = 0, None

        def wake_s(self):
            return self.due_s

        def step(self):
            self.looked += 1
            self.due_s = None if self.looked == 3 else self.clock() + 0.001
            return []

    async def test(thread, engine):
        def fetch(engine):
            engine.due_s = engine.clock() + 0.001

        await thread.call(fetch)
        await until(lambda: engine.looked == 3 and len(thread._lock._waiters) == 1)  # type: ignore[attr-defined]

    _run(test, Fetching())


class _Batching(FakeEngine):
    """A lone request waits `wait_s` for another."""

    looked, wait_s, due_s = 0, 1e6, None

    def wake_s(self):
        return self.due_s

    def step(self):
        if len(self._waiting) == 1 and not self._running:
            if self.due_s is None:
                self.due_s = self.clock() + self.wait_s
            if self.clock() < self.due_s:
                self.looked += 1
                return []
        self.due_s = None
        return super().step()


def test_a_deadline_is_enforced_in_the_queue_and_while_running():
    async def test(thread, engine):
        running = thread.submit(_request("running", max_tokens=1 << 20, deadline_s=time.monotonic() + 0.05))
        queued = thread.submit(_request("queued", deadline_s=time.monotonic() + 0.02))
        for stream in (queued, running):
            assert (await _refusal(stream)).code is ErrorCode.DEADLINE_EXCEEDED
        assert ("start", "queued") not in engine.log
        assert (await thread.submit(_request("next")).take_all())[0].text == "bcd"

    _run(test, FakeEngine(max_num_seqs=1, max_model_len=1 << 30))


def test_a_cancel_never_touches_a_later_request_of_the_same_id():
    async def test(thread, engine):
        first = thread.submit(_request())
        await first.take_all()
        second = thread.submit(_request())
        thread.cancel(first)
        first.closed.clear()  # even if the first one's end had not been seen yet
        thread.cancel(first)
        assert (await second.take_all())[0].text == "bcd"
        assert ("cancel", "x") not in engine.log

    _run(test)


def test_a_cancel_is_done_before_the_next_step():
    async def test(thread, engine):
        engine.gate.clear()
        stream = thread.submit(_request(max_tokens=1000))
        await until(lambda: engine.waits == 1)
        thread.cancel(stream)
        engine.gate.set()
        await stream.closed.wait()
        assert (engine.num_steps, engine.has_work()) == (1, False)

    _run(test)


def test_a_failed_step_reaches_every_caller_and_every_later_one():
    async def test(thread, engine):
        engine.gate.clear()
        streams = [thread.submit(_request(str(i))) for i in range(3)]
        await until(lambda: engine.waits == 1)
        late, call = thread.submit(_request("late")), asyncio.ensure_future(thread.call(lambda e: e.stats()))
        engine.raise_in_step = ValueError("boom")
        engine.gate.set()
        text = "the engine failed and the server must be restarted: ValueError: boom"
        for stream in (*streams, late, thread.submit(_request("later"))):
            error = await _refusal(stream)
            assert (error.code, error.message) == (ErrorCode.INTERNAL, text)
            await stream.closed.wait()
        for awaitable in (call, thread.abort("x")):
            with pytest.raises(RequestError, match="boom"):
                await awaitable
        assert thread.state is State.FAILED

    _run(test)


def test_one_request_that_breaks_add_does_not_break_the_others():
    async def test(thread, engine):
        other = thread.submit(_request("other", max_tokens=50))
        events = await other.take()
        engine.raise_in_add = KeyError("odd")
        error = await _refusal(thread.submit(_request("odd")))
        assert (error.code, error.message) == (ErrorCode.INTERNAL, "the request could not be queued: KeyError: 'odd'")
        events += await other.take_all()
        assert (events[-1].finish_reason, events[-1].num_output_tokens) == (FinishReason.LENGTH, 50)

    _run(test)


def test_abort_of_n_ends_those_that_are_not_finished():
    async def test(thread, engine):
        engine.gate.clear()
        stream = thread.submit(_request(n=2))
        await until(lambda: engine.waits == 1)
        abort = asyncio.ensure_future(thread.abort("x"))
        await asyncio.sleep(0)
        engine.gate.set()
        assert await abort
        events = await stream.take_all()
        assert [(e.index, e.token_ids, e.finish_reason, e.num_output_tokens) for e in events] == [
            (0, (98,), FinishReason.ABORT, 1),
            (1, (98,), FinishReason.ABORT, 1),
        ]

    _run(test)


@pytest.mark.parametrize("error", [ConfigError("model='x' has no config.json"), MemoryError("too large")])
def test_an_engine_that_cannot_be_made_says_why(error):
    def make():
        raise error

    async def test(thread, engine):
        with pytest.raises(type(error), match=str(error)):
            await thread.wait_ready()
        assert thread.state is State.FAILED
        assert (await _refusal(thread.submit(_request()))).code is ErrorCode.INTERNAL

    _run(test, make=make)


def _deliveries(stream: EventStream) -> list[tuple[int, ...]]:
    """Ids of each hand-over to the stream, from now on."""
    seen, deliver = [], stream.deliver

    def watched(events):
        seen.append(tuple(token for event in events for token in event.token_ids))
        return deliver(events)

    stream.deliver = watched
    return seen


class _Stepped(FakeEngine):
    """Begins when `num_streams` requests are there; a step takes a second of its clock."""

    def __init__(self, num_streams: int, step_s: float = 1.0):
        super().__init__()
        self.num_streams = num_streams
        self.clock = lambda: self.num_steps * step_s

    def step(self):
        return super().step() if len(self.log) >= self.num_streams else []


def test_streams_take_turns_beyond_the_limit_and_first_and_last_tokens_never_wait():
    async def test(thread, engine):
        streams = [thread.submit(_request(name, max_tokens=6)) for name in "ab"]
        seen = [_deliveries(stream) for stream in streams]
        assert [(await stream.take_all())[0].text for stream in streams] == ["bcdefg"] * 2
        assert seen[0] == [(98,), (99,), (100,), (101, 102), (103,)]
        assert seen[1] == [(98,), (99,), (100, 101), (102, 103)]

    _run(test, _Stepped(2), max_messages_per_s=1)


def test_an_answer_of_one_token_waits_for_no_turn():
    async def test(thread, engine):
        streams = [thread.submit(_request("long", max_tokens=9)), thread.submit(_request("short", max_tokens=1))]
        seen = [_deliveries(stream) for stream in streams]
        assert [(await stream.take_all())[0].text for stream in streams] == ["bcdefghij", "b"]
        assert seen == [[(98,), (99,), (100, 101, 102, 103, 104, 105, 106)], [(98,)]]

    _run(test, _Stepped(2, step_s=0.0), max_messages_per_s=1)


def test_what_waits_for_its_turn_is_handed_over_before_the_thread_sleeps():
    class Pausing(_Stepped):
        def wake_s(self):
            return self.clock() + 1e6 if self.num_steps == 5 else None

    async def test(thread, engine):
        stream = thread.submit(_request(max_tokens=9))
        seen = _deliveries(stream)
        await until(lambda: sum(map(len, seen)) == 5)
        assert seen == [(98,), (99,), (100, 101, 102)]
        thread.cancel(stream)
        await stream.closed.wait()

    _run(test, Pausing(1, step_s=0.0), max_messages_per_s=1)


def test_an_abort_hands_over_what_waited():
    async def test(thread, engine):
        stream = thread.submit(_request(max_tokens=4000))
        await until(lambda: engine.num_steps > 10)
        assert await thread.abort("x")
        (event,) = await stream.take_all()
        assert event.finish_reason is FinishReason.ABORT and event.num_output_tokens > 10
        assert event.token_ids == tuple((98 + i) % 256 for i in range(event.num_output_tokens))

    _run(test, _Paced(1, step_s=0.0), max_messages_per_s=1)


def test_a_cancel_drops_what_waited_and_the_id_can_be_used_again():
    async def test(thread, engine):
        first = thread.submit(_request(max_tokens=4000))
        await until(lambda: engine.num_steps > 10)
        thread.cancel(first)
        await first.closed.wait()
        assert not engine.has_work()
        second = thread.submit(_request(max_tokens=5))
        assert (await second.take_all())[0].text == "bcdef"

    _run(test, _Paced(1, step_s=0.0), max_messages_per_s=1)


class _Paced(_Stepped):
    """A step takes a millisecond too, so that a long answer is still running when the test acts."""

    def step(self):
        self.gate.clear()
        self.gate.wait(0.001)
        self.gate.set()
        return super().step()


def test_what_is_unread_is_merged_and_bounded():
    def event(token: int, **fields) -> TokenEvent:
        return TokenEvent(request_id="x", token_ids=(token,), text=chr(token), **fields)

    async def test():
        stream = EventStream(_request(), max_unread_tokens=4)
        assert stream.deliver([event(97), event(98)]) and stream.deliver([event(99)])
        (merged,) = await stream.take()
        assert (merged.token_ids, merged.text) == ((97, 98, 99), "abc")
        assert stream.deliver([event(97)] * 4)  # what was taken counts no more
        assert not stream.deliver([event(97)])
        with pytest.raises(RequestError, match="5 tokens and log-probabilities unread, more than max_unread_tokens=4"):
            await stream.take()

    asyncio.run(test())


def test_an_engine_can_fail_while_its_step_never_ends():
    async def test(thread, engine):
        engine.gate.clear()
        stream = thread.submit(_request())
        await until(lambda: engine.waits == 1)
        queued = thread.submit(_request("queued"))
        engine.fail(RuntimeError("process 1 is lost"))
        for refused in (stream, queued, thread.submit(_request("late"))):
            error = await _refusal(refused)
            assert error.code is ErrorCode.INTERNAL and "RuntimeError: process 1 is lost" in error.message
        assert thread.state is State.FAILED and engine.waits == 1
        assert engine.log[-1] == ("close", "process 1 is lost")
        engine.gate.set()
        assert await thread.stop(TIMEOUT_S)
        assert thread.state is State.FAILED and engine.log.count(("close", "process 1 is lost")) == 1

    _run(test)


def test_an_engine_can_fail_while_it_is_idle():
    async def test(thread, engine):
        await thread.submit(_request()).take_all()
        engine.fail(RuntimeError("process 1 is lost"))
        assert "process 1 is lost" in (await _refusal(thread.submit(_request()))).message
        assert thread.state is State.FAILED

    _run(test)
