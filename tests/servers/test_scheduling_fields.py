"""What a request says of its place among others, hints, the circuit breaker, and when to come again."""

import dataclasses
from typing import Any

import grpc
import pytest

from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Request, TokenEvent
from servers.proto.dsjax.v1 import inference_pb2 as pb
from tests.servers.fakes import Endless, FakeEngine
from tests.servers.harness import Harness, collect, request, run, status, until

FOREVER = {"ignore_eos": True, "max_tokens": 4000}


class _Recording(FakeEngine):
    def __init__(self):
        super().__init__()
        self.requests: list[Request] = []

    def add(self, request):
        self.requests.append(request)
        super().add(request)


def _with(message: pb.GenerateRequest, **fields) -> pb.GenerateRequest:
    message.MergeFrom(pb.GenerateRequest(**fields))
    return message


async def _refusal(call) -> tuple[str, str, str]:
    """(code, message, retry-after) of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    metadata = dict(raised.value.trailing_metadata() or ())
    return raised.value.code().name, raised.value.details() or "", str(metadata.get("retry-after", ""))


def test_priority_tenant_and_session_reach_the_engine():
    async def test(h: Harness):
        fields = {"priority": -3, "tenant": "gold", "session_id": "s1", "cache_salt": "c"}
        await collect(h.stub.Generate(_with(request(max_tokens=1), **fields)))
        await h.stub.Submit(_with(request(max_tokens=1), **fields))
        await collect(h.stub.Generate(request(max_tokens=1)))
        found = [(r.priority, r.tenant, r.session_id, r.cache_salt) for r in h.engine.requests]
        assert found == [(-3, "gold", "s1", "c")] * 2 + [(0, "", "", "")]

    run(test, _Recording())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"priority": 16}, "priority=16 is not allowed: it must be in [-16, 15]"),
        ({"priority": -17}, "priority=-17 is not allowed"),
        ({"tenant": "x" * 257}, "tenant has 257 characters: at most 256 are allowed"),
        ({"session_id": "x" * 257}, "session_id has 257 characters"),
        ({"request_id": "x" * 257}, "request_id has 257 characters"),
        ({"interactive_timeout_s": -1}, "interactive_timeout_s=-1.0 is not allowed: it must be in [0, 86400]"),
        ({"interactive_timeout_s": float("nan")}, "interactive_timeout_s=nan is not allowed"),
        ({"interactive_timeout_s": 1, "request_id": "é"}, "request_id='é' is not allowed with interactive_timeout_s"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, words):
    async def test(h: Harness):
        for call in (collect(h.stub.Generate(_with(request(), **fields))), h.stub.Submit(_with(request(), **fields))):
            code, details = await status(call)
            assert (code, words in details) == ("INVALID_ARGUMENT", True)

    run(test)


def test_prefetch_hands_over_what_a_request_would_begin_with():
    async def test(h: Harness):
        for message in (
            pb.PrefetchRequest(text="ab", add_bos=True, cache_salt="c"),
            pb.PrefetchRequest(token_ids=pb.TokenIds(ids=[7, 8])),
            pb.PrefetchRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a")])),
            pb.PrefetchRequest(session_id="s"),
        ):
            assert (await h.stub.Prefetch(message)).found == bool(message.session_id)
        assert h.engine.log == [
            ("prefetch", "[256, 97, 98] '' 'c'"),
            ("prefetch", "[7, 8] '' ''"),
            ("prefetch", "[256, 258, 97, 259, 261] '' ''"),
            ("prefetch", "[] 's' ''"),
        ]
        for message, words in (
            (pb.PrefetchRequest(), "prompt is absent: set text, token_ids, chat or session_id"),
            (pb.PrefetchRequest(session_id=""), "session_id='' is not allowed"),
            (pb.PrefetchRequest(session_id="x" * 257), "session_id has 257 characters"),
        ):
            code, details = await status(h.stub.Prefetch(message))
            assert (code, words in details) == ("INVALID_ARGUMENT", True)

    run(test)


@pytest.mark.parametrize(("retry_after_s", "header"), [(None, "1"), (0.2, "1"), (2.3, "3")])
@pytest.mark.parametrize("code", [ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE])
def test_retry_after_is_rounded_up_and_at_least_1(code, retry_after_s, header):
    async def test(h: Harness):
        h.engine.raise_in_add = RequestError(code, "not now", retry_after_s)
        assert await _refusal(collect(h.stub.Generate(request()))) == (code.value, "not now", header)

    run(test)


def test_other_errors_have_no_retry_after():
    async def test(h: Harness):
        assert (await _refusal(collect(h.stub.Generate(request([])))))[2] == ""

    run(test)


def _breaking(kind: type[FakeEngine] = FakeEngine, **overload) -> Any:
    engine = kind()
    engine.config = dataclasses.replace(
        engine.config, overload=dataclasses.replace(engine.config.overload, breaker_open_s=300.0, **overload)
    )
    return engine


def test_a_step_that_stalls_opens_the_breaker_for_calls_and_jobs():
    async def test(h: Harness):
        h.engine.gate.clear()
        first = h.stub.Generate(request("abc", id="x", max_tokens=2))
        await until(lambda: h.engine.waits == 1)
        for call in (collect(h.stub.Generate(request())), h.stub.Submit(request())):
            code, details, retry = await _refusal(call)
            assert (code, "step_stall_s=1e-09" in details, 290 <= int(retry) <= 300) == ("UNAVAILABLE", True, True)
        h.engine.gate.set()
        assert [m.outputs[0].text for m in await collect(first)] in (["d", "e"], ["de"])  # who is in stays in
        assert (await _refusal(collect(h.stub.Generate(request()))))[0] == "UNAVAILABLE"
        counters = (await h.stub.GetLoads(pb.GetLoadsRequest())).counters
        assert [counters[f"{n}"] for n in ("breaker_closed", "num_breaker_opened", "num_breaker_refused")] == [0, 1, 3]
        await h.idle()

    run(test, _breaking(step_stall_s=1e-9))


def test_calls_and_jobs_that_fail_open_the_breaker():
    async def test(h: Harness):
        for _ in range(2):
            h.engine.raise_in_add = KeyError("odd")
            assert (await _refusal(collect(h.stub.Generate(request()))))[0] == "INTERNAL"
        h.engine.error_in_step = RequestError(ErrorCode.INTERNAL, "odd")
        job_id = (await h.stub.Submit(request())).job_id
        result = await h.stub.GetResult(pb.GetResultRequest(job_id=job_id, wait_s=30))
        assert (result.state, result.error_code, result.error_message) == (pb.JOB_STATE_FAILED, "INTERNAL", "odd")
        code, details, retry = await _refusal(h.stub.Submit(request()))
        assert code == "UNAVAILABLE" and "3 of the latest 3 requests failed" in details and 290 <= int(retry) <= 300
        await h.idle()

    run(test, _breaking(_Failing, breaker_min_requests=3))


class _Failing(FakeEngine):
    """One request of the next step ends with `error_in_step`."""

    error_in_step: RequestError | None = None

    def step(self):
        events = super().step()
        if self.error_in_step is None:
            return events
        error, self.error_in_step = self.error_in_step, None
        self.cancel(events[0].request_id)
        return [TokenEvent(request_id=events[0].request_id, error=error)]


def test_what_clients_do_wrong_does_not_open_the_breaker():
    async def test(h: Harness):
        for _ in range(3):
            assert (await status(collect(h.stub.Generate(request([])))))[0] == "INVALID_ARGUMENT"
            call = h.stub.Generate(request(**FOREVER))
            await call.read()
            call.cancel()
        await h.idle()
        assert len(await collect(h.stub.Generate(request(stream=False, max_tokens=1)))) == 1

    run(test, _breaking(breaker_min_requests=1))


@pytest.mark.parametrize(("idle_s", "opens"), [(60.0, False), (float("inf"), False), (0.001, True)])
def test_a_deadline_opens_the_breaker_only_if_an_idle_engine_meets_it(idle_s, opens):
    async def test(h: Harness):
        h.engine.idle_s = idle_s
        h.engine.gate.clear()
        for _ in range(3):
            assert (await status(collect(h.stub.Generate(request(), timeout=0.1))))[0] == "DEADLINE_EXCEEDED"
            await until(h.server.service.requests.idle.is_set)
            if opens:
                break
        h.engine.gate.set()
        if opens:
            assert "1 of the latest 1 requests failed" in (await status(collect(h.stub.Generate(request()))))[1]
        else:
            assert len(await collect(h.stub.Generate(request(stream=False, max_tokens=1)))) == 1
        await h.idle()

    run(test, _breaking(breaker_min_requests=1))


def test_a_deadline_that_passes_at_once_or_while_the_answer_comes_leaves_the_breaker_closed():
    async def test(h: Harness):
        h.engine.idle_s = 0.05
        for timeout_s in (1e-6, 1.0):
            assert (await status(collect(h.stub.Generate(request(**FOREVER), timeout=timeout_s))))[0] == (
                "DEADLINE_EXCEEDED"
            )
            await until(h.server.service.requests.idle.is_set)
        assert len(await collect(h.stub.Generate(request(stream=False, max_tokens=1)))) == 1
        await h.idle()

    run(test, _breaking(Endless, breaker_min_requests=1))
