"""Cancel, disconnect, abort, deadlines and reused ids: pages come back, streams end, nobody else notices."""

import asyncio
import random
import threading

import grpc
import pytest

from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from tests.servers.fakes import FOREVER, Endless, FakeEngine, FakeTokenizer
from tests.servers.harness import TIMEOUT_S, Harness, collect, connect, request, run, status, until


async def _abort(h: Harness, id: str) -> bool:
    return (await h.stub.Abort(pb.AbortRequest(request_id=id))).aborted


async def _start(h: Harness, id: str, **params):
    """A call that has had its first message."""
    call = h.stub.Generate(request(id=id, **{**FOREVER, **params}))
    await call.read()
    return call


def test_fifty_cancels_at_random_points_leave_nothing_behind():
    rng = random.Random(0)

    async def one(h: Harness, number: int):
        call = h.stub.Generate(request(id=f"r{number % 20}-{number}", n=rng.choice([1, 1, 3]), **FOREVER))
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            await call.read()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collect(call)

    async def test(h: Harness):
        survivor = asyncio.create_task(collect(h.stub.Generate(request("a", max_tokens=200, ignore_eos=True))))
        await asyncio.gather(*(one(h, number) for number in range(50)))
        ids = [i for message in await survivor for i in message.outputs[0].token_ids]
        assert ids == [(98 + i) % 256 for i in range(200)]
        await h.idle()

    run(test, Endless())


def test_an_id_is_reused_at_once_after_a_cancel_100_times():
    async def test(h: Harness):
        for number in range(100):
            first = h.stub.Generate(request("xyz", id="x", **FOREVER))
            if number % 3:
                await first.read()
            first.cancel()
            (second,) = await collect(h.stub.Generate(request("abc", id="x", stream=False, max_tokens=3)))
            assert second.outputs[0].text == "def"
        await h.idle()

    run(test, Endless())


def test_a_live_duplicate_is_refused_and_the_first_goes_on():
    async def test(h: Harness):
        h.engine.gate.clear()
        first = h.stub.Generate(request("abc", id="x", stream=False, max_tokens=3))
        await until(lambda: ("add", "x") in h.engine.log)
        code, details = await status(collect(h.stub.Generate(request("abc", id="x"))))
        assert (code, "request_id='x' belongs to a live request" in details) == ("ALREADY_EXISTS", True)
        h.engine.gate.set()
        assert (await collect(first))[0].outputs[0].text == "def"
        await h.idle()

    # The duplicate's refusal comes from the engine thread, which must not be inside the closed gate.
    run(test, _RefusingEngine())


class _RefusingEngine(FakeEngine):
    """Steps do nothing while the gate is closed, so that commands are still served."""

    def step(self):
        return super().step() if self.gate.is_set() else []


def test_a_disconnected_client_gives_its_pages_back():
    async def test(h: Harness):
        async with connect(h.server.port) as channel:
            call = pb_grpc.InferenceStub(channel).Generate(request(id="gone", **FOREVER))
            await call.read()
        await h.idle()
        assert ("cancel", "gone") in h.engine.log

    run(test, Endless())


def test_abort_ends_the_stream_with_its_finish_reason():
    async def test(h: Harness):
        call = await _start(h, "x", n=2)
        assert await _abort(h, "x")
        last = {o.index: o for m in await collect(call) for o in m.outputs}
        assert [last[i].finish_reason for i in (0, 1)] == [pb.FINISH_REASON_ABORT] * 2
        assert min(last[i].completion_tokens for i in (0, 1)) >= 1
        await h.idle()

    run(test, Endless())


def test_abort_unknown_after_finish_and_twice_do_nothing():
    async def test(h: Harness):
        assert not await _abort(h, "never")
        await collect(h.stub.Generate(request(id="x", max_tokens=2)))
        assert not await _abort(h, "x")
        call = await _start(h, "x")
        assert [await _abort(h, "x"), await _abort(h, "x")] == [True, False]
        await collect(call)
        assert (await status(h.stub.Abort(pb.AbortRequest())))[0] == "INVALID_ARGUMENT"
        (message,) = await collect(h.stub.Generate(request(id="x", stream=False, max_tokens=2)))
        assert message.outputs[0].text == "de"
        await h.idle()

    run(test, Endless())


def test_abort_while_waiting_and_in_the_second_chunk():
    async def test(h: Harness):
        running = await _start(h, "running")
        waiting = h.stub.Generate(request(id="waiting", stream=False))
        await until(lambda: ("add", "waiting") in h.engine.log)
        assert await _abort(h, "waiting")
        (message,) = await collect(waiting)
        assert message.outputs == [pb.Output(finish_reason=pb.FINISH_REASON_ABORT)]
        assert ("start", "waiting") not in h.engine.log
        await _abort(h, "running")
        await collect(running)
        # A prompt of 4000 chunks; two of them are surely over when the first cannot be.
        chunked = h.stub.Generate(request([65] * 4000, id="chunked", stream=False))
        await until(lambda: ("start", "chunked") in h.engine.log)
        assert await _abort(h, "chunked")
        (message,) = await collect(chunked)
        assert message.usage == pb.Usage(prompt_tokens=4000)
        await h.idle()

    run(test, _Slow(max_num_seqs=1, chunk=1))


def test_abort_while_the_prompt_is_encoded():
    gate, entered = threading.Event(), threading.Event()

    class SlowTokenizer(FakeTokenizer):
        def encode(self, text, *, allow_special=False):
            entered.set()
            assert gate.wait(TIMEOUT_S)
            return super().encode(text)

    engine = FakeEngine(max_model_len=1 << 16)
    engine.tokenizer = SlowTokenizer()

    async def test(h: Harness):
        call = h.stub.Generate(request("x" * 5000, id="x", n=2))
        await until(entered.is_set)
        assert [await _abort(h, "x"), await _abort(h, "x")] == [True, False]
        gate.set()
        (message,) = await collect(call)
        assert [o.finish_reason for o in message.outputs] == [pb.FINISH_REASON_ABORT] * 2
        assert engine.log == []
        await h.idle()

    run(test, engine)


class _Slow(Endless):
    """The prompt "chunked" never gets past its second chunk by itself."""

    def step(self):
        if "chunked" in self._prefill and self._prefill["chunked"] <= 3998:
            self._prefill["chunked"] += 1
        return super().step()


def test_a_deadline_ends_a_running_request_and_one_in_the_queue_never_starts():
    async def test(h: Harness):
        running = await _start(h, "running")
        queued = h.stub.Generate(request(id="queued", **FOREVER), timeout=0.1)
        assert (await status(collect(queued)))[0] == "DEADLINE_EXCEEDED"
        running.cancel()
        running = h.stub.Generate(request(id="ends", **FOREVER), timeout=0.2)
        assert (await status(collect(running)))[0] == "DEADLINE_EXCEEDED"
        await h.idle()
        assert ("start", "queued") not in h.engine.log

    run(test, Endless(max_num_seqs=1))


def test_a_client_that_does_not_read_is_ended_and_stalls_nobody():
    async def test(h: Harness):
        async with connect(h.server.port, **{"grpc.http2.lookahead_bytes": 1024}) as channel:
            slow = pb_grpc.InferenceStub(channel).Generate(request(id="slow", logprobs=20, ignore_eos=True))
            for _ in range(5):
                assert len(await collect(h.stub.Generate(request("a", max_tokens=50)))) >= 1
            await until(lambda: ("cancel", "slow") in h.engine.log)
            code, details = await status(collect(slow))
        assert (code, "max_unread_tokens=100000" in details) == ("RESOURCE_EXHAUSTED", True)
        await h.idle()

    run(test, FakeEngine(max_model_len=1 << 20), max_unread_tokens=100_000)


def test_a_full_queue_says_when_to_come_again():
    async def test(h: Harness):
        running = await _start(h, "running")
        waiting = h.stub.Generate(request(id="waiting", **FOREVER))
        await until(lambda: ("add", "waiting") in h.engine.log)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(h.stub.Generate(request(id="third")))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(raised.value.trailing_metadata() or ())["retry-after"] == "1"
        running.cancel()
        waiting.cancel()
        await h.idle()

    run(test, Endless(max_num_seqs=1, max_num_waiting=1))
