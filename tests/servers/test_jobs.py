"""Asynchronous jobs: submitted, or made of interactive calls that took too long; kept, bounded, ended in order."""

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

from dsjax.request import Request
from servers.engine_thread import State
from servers.jobs import PROMPT_TOKEN_BYTES, VALUE_BYTES
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from tests.servers.fakes import CONTROL, FakeEngine
from tests.servers.harness import TIMEOUT_S, Harness, collect, connect, request, run, status, until

FOREVER = {"ignore_eos": True, "max_tokens": 4000}


class _Held(FakeEngine):
    """Makes `steps` steps, and more once `go` is set; commands are served meanwhile."""

    def __init__(self, steps: int, **options: Any):
        super().__init__(**options)
        self.go, self._steps = threading.Event(), steps

    def step(self):
        if self.num_steps < self._steps or self.go.wait(0.001):
            return super().step()
        return []


async def _submit(h: Harness, prompt: str | list[int] = "abc", id: str = "", **params) -> str:
    return (await h.stub.Submit(request(prompt, id=id, **params))).job_id


async def _result(h: Harness, job_id: str, wait_s: float = TIMEOUT_S, discard: bool = False) -> pb.GetResultResponse:
    return await h.stub.GetResult(pb.GetResultRequest(job_id=job_id, wait_s=wait_s, discard=discard))


async def _until_text(h: Harness, job_id: str, text: str) -> pb.GetResultResponse:
    """The job as it is once its answers are `text` so far: a step's tokens come some time after the step."""
    end = time.monotonic() + TIMEOUT_S
    while True:
        result = await _result(h, job_id, wait_s=0)
        if result.response.outputs and all(o.text == text for o in result.response.outputs):
            return result
        assert time.monotonic() < end, result


async def _abort(h: Harness, id: str) -> bool:
    return (await h.stub.Abort(pb.AbortRequest(request_id=id))).aborted


def _interactive(*args, timeout_s: float = 0.05, **params) -> pb.GenerateRequest:
    message = request(*args, **params)
    message.interactive_timeout_s = timeout_s
    return message


async def _until_job(call: Any) -> tuple[list[pb.GenerateResponse], str]:
    """(messages, job id) of an interactive call that must become a job."""
    messages: list[pb.GenerateResponse] = []
    try:
        while True:
            message = await call.read()
            assert message is not grpc.aio.EOF, "the call succeeded"  # pyright: ignore[reportAttributeAccessIssue]
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        job_id = dict(error.trailing_metadata() or ())["job-id"]
        assert f"the request goes on as job_id='{job_id}', ask GetResult" in (error.details() or "")
        return messages, str(job_id)


def test_a_job_answers_what_a_call_does():
    async def test(h: Harness):
        (answer,) = await collect(h.stub.Generate(request("abc", id="x", stream=False, n=2, logprobs=1, max_tokens=5)))
        submitted = await h.stub.Submit(request("abc", id="x", n=2, logprobs=1, max_tokens=5))
        assert (submitted.job_id, submitted.job_ttl_s) == ("x", 600.0)
        for _ in range(2):  # kept until discarded
            result = await _result(h, "x")
            assert (result.state, result.response, result.error_code) == (pb.JOB_STATE_DONE, answer, "")
            assert 0 < result.expires_in_s <= 600
        await h.idle()

    run(test)


def test_queued_running_done_and_a_wait_that_ends_before_the_job():
    async def test(h: Harness):
        first, second = await _submit(h, "abc", max_tokens=6), await _submit(h, "x", max_tokens=1)
        await _until_text(h, first, "def")
        result = await _result(h, first, wait_s=0.01)
        assert (result.state, result.response.outputs[0].text) == (pb.JOB_STATE_RUNNING, "def")
        assert not result.HasField("expires_in_s")
        result = await _result(h, second, wait_s=0, discard=True)  # which says nothing of a job that has not ended
        assert (result.state, result.response.usage.prompt_tokens) == (pb.JOB_STATE_QUEUED, 1)
        h.engine.go.set()
        assert (await _result(h, first)).response.outputs[0].text == "defghi"
        assert (await _result(h, second)).response.outputs[0].text == "y"
        await h.idle()

    run(test, _Held(3, max_num_seqs=1))


def test_a_job_outlives_its_client_and_the_deadline_of_its_call():
    async def test(h: Harness):
        async with connect(h.server.port) as channel:
            stub: Any = pb_grpc.InferenceStub(channel)
            message = request("abc", max_tokens=6)
            job_id = (await stub.Submit(message, timeout=TIMEOUT_S)).job_id
        assert h.engine.requests[-1].deadline_s is None
        h.engine.go.set()
        assert (await _result(h, job_id)).response.outputs[0].text == "defghi"

    run(test, _Recording(1))


class _Recording(_Held):
    def __init__(self, steps: int):
        super().__init__(steps)
        self.requests: list[Request] = []

    def add(self, request):
        self.requests.append(request)
        super().add(request)


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_becomes_a_job_and_no_token_is_lost_or_doubled(stream):
    async def test(h: Harness):
        call = h.stub.Generate(_interactive("abc", stream=stream, n=2, max_tokens=20))
        messages, job_id = await _until_job(call)
        seen = "".join(o.text for m in messages for o in m.outputs if o.index == 0)
        running = await _until_text(h, job_id, "defgh")
        assert (running.state, len(running.response.outputs)) == (pb.JOB_STATE_RUNNING, 2)
        assert "defgh".startswith(seen) if stream else seen == ""
        h.engine.go.set()
        result = await _result(h, job_id)
        text = "defghijklmnopqrstuvw"
        assert (result.state, [o.text for o in result.response.outputs]) == (pb.JOB_STATE_DONE, [text, text])
        assert [list(o.token_ids) for o in result.response.outputs] == [[*text.encode()]] * 2
        assert result.response.usage.completion_tokens == 40
        await h.idle()

    run(test, _Held(5))


def test_a_call_becomes_a_job_even_if_there_is_always_more_to_write():
    async def test(h: Harness):
        messages, job_id = await _until_job(h.stub.Generate(_interactive("abc", timeout_s=0.02, ignore_eos=True)))
        assert await _abort(h, job_id)
        result = await _result(h, job_id)
        seen = [token for m in messages for token in m.outputs[0].token_ids]
        assert list(result.response.outputs[0].token_ids)[: len(seen)] == seen

    run(test, FakeEngine(max_model_len=1 << 30), max_job_bytes=1 << 40)


def test_a_call_that_ends_in_time_leaves_no_job():
    async def test(h: Harness):
        messages = await collect(h.stub.Generate(_interactive("abc", id="x", timeout_s=TIMEOUT_S, max_tokens=3)))
        assert "".join(m.outputs[0].text for m in messages) == "def"
        assert (await status(_result(h, "x", 0)))[0] == "NOT_FOUND"
        call = h.stub.Generate(_interactive("abc", id="y", timeout_s=TIMEOUT_S, **FOREVER))
        await call.read()
        assert (await status(_result(h, "y", 0)))[0] == "NOT_FOUND"  # not yet
        call.cancel()
        await h.idle()
        counters = (await h.stub.GetLoads(pb.GetLoadsRequest())).counters
        assert (counters["num_jobs"], counters["num_running_jobs"], counters["job_bytes"]) == (0, 0, 0)

    run(test, _Paced())


class _Paced(FakeEngine):
    """A step is 2 ms of engine time."""

    def step(self):
        self.gate.clear()
        self.gate.wait(0.002)
        self.gate.set()
        return super().step()


def test_an_earlier_deadline_of_the_call_ends_the_request():
    async def test(h: Harness):
        call = h.stub.Generate(_interactive("abc", id="x", timeout_s=TIMEOUT_S, **FOREVER), timeout=0.1)
        assert (await status(collect(call)))[0] == "DEADLINE_EXCEEDED"
        await h.idle()
        assert (await status(_result(h, "x", 0)))[0] == "NOT_FOUND"

    run(test, _Paced())


def test_tool_calls_have_the_ids_that_were_streamed():
    dsml = CONTROL["｜DSML｜"]
    parts = ("Adding.\n\n<", dsml, "tool_calls>\n<", dsml, 'invoke name="add">\n</', dsml, "invoke>\n</", dsml,
             "tool_calls>")  # fmt: skip
    tokens = [i for part in parts for i in (part.encode() if isinstance(part, str) else [part])]

    async def test(h: Harness):
        streamed, timeout_s = [], 0.05
        while not streamed:  # a machine too busy to stream so much so soon
            engine._steps = h.engine.num_steps + len(tokens)
            message = _interactive([], timeout_s=timeout_s, ignore_eos=True, max_tokens=len(tokens) + 5)
            message.chat.messages.add(role="user", content="hi")
            messages, job_id = await _until_job(h.stub.Generate(message))
            streamed, timeout_s = [call for m in messages for call in m.outputs[0].chat.tool_calls], 4 * timeout_s
            assert streamed or await _abort(h, job_id)
        (streamed,) = streamed
        h.engine.go.set()
        (chat,) = [o.chat for o in (await _result(h, job_id)).response.outputs]
        assert (chat.content, chat.tool_calls[0]) == ("Adding.", streamed)

    engine = _Held(len(tokens))
    engine._script = tokens
    run(test, engine)


def test_abort_ends_a_job_and_an_id_is_reused_at_once_after_a_discard():
    async def test(h: Harness):
        for _ in range(30):
            await _submit(h, "xyz", id="x", n=2, **FOREVER)
            assert [await _abort(h, "x"), await _abort(h, "x")] == [True, False]
            result = await _result(h, "x", discard=True)
            assert result.state == pb.JOB_STATE_DONE
            assert {o.finish_reason for o in result.response.outputs} == {pb.FINISH_REASON_ABORT}
            await _submit(h, "abc", id="x", max_tokens=3)
            result = await _result(h, "x", discard=True)
            assert result.response.outputs[0].text == "def"
            assert (await status(_result(h, "x")))[0] == "NOT_FOUND"
        await h.idle()

    run(test, _Paced())


def test_the_id_of_a_job_is_taken_until_it_is_forgotten():
    async def test(h: Harness):
        words = "request_id='x' belongs to a job"
        await _submit(h, "abc", id="x", max_tokens=9)
        for _ in range(2):  # while it runs, and at its end
            for call in (h.stub.Submit(request(id="x")), collect(h.stub.Generate(request(id="x")))):
                code, details = await status(call)
                assert (code, words in details) == ("ALREADY_EXISTS", True)
            h.engine.go.set()
            assert (await _result(h, "x")).response.outputs[0].text == "defghijkl"

    run(test, _Held(2))


def test_the_id_of_a_live_call_cannot_be_a_jobs():
    async def test(h: Harness):
        call = h.stub.Generate(request(id="x", **FOREVER))
        await call.read()
        assert (await status(h.stub.Submit(request(id="x"))))[0] == "ALREADY_EXISTS"
        call.cancel()
        await h.idle()

    run(test, _Held(2))


def test_what_the_engine_refuses_is_no_job():
    async def test(h: Harness):
        await _submit(h, id="running", **FOREVER)
        await until(lambda: ("start", "running") in h.engine.log)
        await _submit(h, id="waiting", **FOREVER)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _submit(h)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(raised.value.trailing_metadata() or ())["retry-after"] == "1"
        code, details = await status(_submit(h, [1] * 5000))
        assert (code, "the prompt has 5000 tokens" in details) == ("INVALID_ARGUMENT", True)
        counters = (await h.stub.GetLoads(pb.GetLoadsRequest())).counters
        assert (counters["num_jobs"], counters["num_running_jobs"]) == (2, 2)
        assert await _abort(h, "running") and await _abort(h, "waiting")
        await h.idle()

    run(test, _Held(1, max_num_seqs=1, max_num_waiting=1))


def test_no_more_jobs_than_max_num_jobs_and_calls_that_may_become_jobs_count():
    async def test(h: Harness):
        await _submit(h, id="x", max_tokens=1)
        for call in (h.stub.Submit(request()), collect(h.stub.Generate(_interactive()))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "1 jobs are kept, the limit max_num_jobs=1" in (raised.value.details() or "")
        await _result(h, "x")
        with pytest.raises(grpc.aio.AioRpcError) as raised:  # at its end it is known when there is room
            await h.stub.Submit(request())
        assert 590 < int(dict(raised.value.trailing_metadata() or ())["retry-after"]) <= 600
        await _result(h, "x", discard=True)
        await _submit(h, max_tokens=1)

    run(test, max_num_jobs=1)


def test_a_job_that_needs_more_bytes_than_there_are_fails_and_the_others_go_on():
    async def test(h: Harness):
        small, large = await _submit(h, "a", max_tokens=20), await _submit(h, "b", **FOREVER)
        result = await _result(h, large)
        assert (result.state, result.error_code) == (pb.JOB_STATE_FAILED, "RESOURCE_EXHAUSTED")
        assert "max_job_bytes=12872" in result.error_message
        result = await _result(h, small)
        assert (result.state, len(result.response.outputs[0].token_ids)) == (pb.JOB_STATE_DONE, 20)
        await h.idle()
        counters = (await h.stub.GetLoads(pb.GetLoadsRequest())).counters
        assert counters["job_bytes"] == 2 * PROMPT_TOKEN_BYTES + 20 * VALUE_BYTES

    run(test, _Paced(), max_job_bytes=2 * PROMPT_TOKEN_BYTES + 100 * VALUE_BYTES)


def test_a_failed_step_fails_jobs_and_results_can_still_be_taken():
    async def test(h: Harness):
        done = await _submit(h, "abc", max_tokens=2)
        await _result(h, done)
        failed = await _submit(h, **FOREVER)
        h.engine.raise_in_step = ValueError("boom")
        h.engine.go.set()
        result = await _result(h, failed)
        assert (result.state, result.error_code) == (pb.JOB_STATE_FAILED, "INTERNAL")
        assert "ValueError: boom" in result.error_message
        assert h.server.thread.state is State.FAILED
        assert (await _result(h, done)).response.outputs[0].text == "de"
        assert (await status(_submit(h)))[0] == "INTERNAL"

    run(test, _Held(3))


def test_draining_waits_for_jobs_and_their_results_can_be_waited_for():
    async def test(h: Harness):
        job_id = await _submit(h, "abc", max_tokens=6)
        waiting = asyncio.ensure_future(_result(h, job_id))
        drain = asyncio.ensure_future(h.server.drain(TIMEOUT_S))
        await until(lambda: h.server.service._refusal is not None)
        assert (await status(_submit(h)))[0] == "UNAVAILABLE"
        assert not h.server.service.requests.idle.is_set()
        h.engine.go.set()
        assert (await waiting).response.outputs[0].text == "defghi"
        assert await drain

    run(test, _Held(2))


def test_after_the_grace_period_jobs_end_as_unavailable():
    async def test(h: Harness):
        job_id = await _submit(h, "abc", **FOREVER)
        waiting = asyncio.ensure_future(_result(h, job_id))
        await _until_text(h, job_id, "de")
        assert await h.server.drain(0)
        result = await waiting
        assert (result.state, result.error_code) == (pb.JOB_STATE_FAILED, "UNAVAILABLE")
        assert "grace_period_s=0 was over" in result.error_message
        assert result.response.outputs[0].text == "de"
        assert h.engine.log[-2:] == [("cancel", job_id), ("close", "")]

    run(test, _Held(2))


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        ({"job_id": "x"}, "NOT_FOUND", "job_id='x' is no job: it never was, was discarded, or ended more than job_"),
        ({"job_id": "x", "wait_s": -1}, "INVALID_ARGUMENT", "wait_s=-1.0 is not allowed: it must be in [0, 3600]"),
        ({"job_id": "x", "wait_s": float("nan")}, "INVALID_ARGUMENT", "wait_s=nan is not allowed"),
    ],
)  # fmt: skip
def test_get_result_refuses_by_name(message, code, words):
    async def test(h: Harness):
        found, details = await status(h.stub.GetResult(pb.GetResultRequest(**message)))
        assert (found, words in details) == (code, True)

    run(test)


def test_a_result_larger_than_a_message_is_refused_and_stays():
    async def test(h: Harness):
        job_id = await _submit(h, "x" * 100, prompt_logprobs=20, max_tokens=1)
        for _ in range(2):
            code, details = await status(_result(h, job_id, discard=True))
            assert (code, "more than max_message_bytes=1024" in details) == ("INVALID_ARGUMENT", True)

    run(test, max_message_bytes=1024)
