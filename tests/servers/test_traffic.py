"""Random traffic: whatever some clients do, the others get exactly their answers, and in the end nothing is held.

Jobs, and calls that become jobs or end just in time, are among it.
"""

import asyncio
import random

import grpc
import pytest

from servers.proto.dsjax.v1 import inference_pb2 as pb
from tests.servers.fakes import FakeEngine
from tests.servers.harness import Harness, collect, request, run


async def _client(h: Harness, number: int, rng: random.Random) -> str:
    """One random request; returns how it ended."""
    deed = rng.choice(["finish", "finish", "cancel", "abort", "deadline", "bad", "job", "becomes", "aborted job"])
    first, length, n = rng.randrange(256), rng.randint(1, 40), rng.choice([1, 1, 2, 3])
    prompt = [first] * rng.randint(1, 30)
    ends = deed in ("finish", "job", "becomes")
    params = {"ignore_eos": True, "n": n, "max_tokens": length if ends else 3000}
    message = request([] if deed == "bad" else prompt, id=f"r{number}", stream=rng.random() < 0.7, **params)
    message.stream_interval = rng.randint(1, 4)
    expected = {index: [(first + 1 + i) % 256 for i in range(length)] for index in range(n)}
    if deed in ("job", "aborted job"):
        job_id = (await h.stub.Submit(message)).job_id
        if deed == "aborted job":
            assert (await h.stub.Abort(pb.AbortRequest(request_id=job_id))).aborted
        await _take_job(h, job_id, expected if deed == "job" else None)
        return deed
    if deed == "becomes":
        message.interactive_timeout_s = rng.choice([0.001, 0.02, 0.1])
    call = h.stub.Generate(message, timeout=0.05 if deed == "deadline" else None)
    if deed == "cancel":
        if message.stream and rng.random() < 0.5:
            await call.read()
        call.cancel()
    if deed == "abort":
        while not (await h.stub.Abort(pb.AbortRequest(request_id=message.request_id))).aborted:
            await asyncio.sleep(0)
    try:
        outputs = [output for answer in await collect(call) for output in answer.outputs]
    except asyncio.CancelledError:
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        if deed == "becomes":
            await _take_job(h, str(dict(error.trailing_metadata() or ())["job-id"]), expected)
            return "became"
        return error.code().name
    ids = {index: [t for o in outputs if o.index == index for t in o.token_ids] for index in range(n)}
    if ends:
        assert {o.finish_reason for o in outputs if o.finish_reason} == {pb.FINISH_REASON_LENGTH}
        assert ids == expected
    return deed


async def _take_job(h: Harness, job_id: str, expected: dict[int, list[int]] | None) -> None:
    """Waits for a job and discards it; None expects that it was aborted."""
    result = await h.stub.GetResult(pb.GetResultRequest(job_id=job_id, wait_s=30, discard=True))
    reason = pb.FINISH_REASON_ABORT if expected is None else pb.FINISH_REASON_LENGTH
    assert result.state == pb.JOB_STATE_DONE
    assert {output.finish_reason for output in result.response.outputs} == {reason}
    if expected is not None:
        assert {output.index: list(output.token_ids) for output in result.response.outputs} == expected


class _Slower(FakeEngine):
    """A step is 1 ms of engine time, so that an answer of 3,000 tokens cannot end before something is done to it."""

    def step(self):
        self.gate.clear()
        self.gate.wait(0.001)
        self.gate.set()
        return super().step()


@pytest.mark.parametrize("seed", [0, 1])
def test_random_traffic(seed):
    rng = random.Random(seed)

    async def test(h: Harness):
        ended = await asyncio.gather(*(_client(h, number, random.Random(rng.random())) for number in range(150)))
        kinds = {
            "finish",
            "cancelled",
            "abort",
            "DEADLINE_EXCEEDED",
            "INVALID_ARGUMENT",
            "job",
            "became",
            "aborted job",
        }
        assert kinds <= set(ended) <= kinds | {"becomes"}  # which ended in time
        await h.idle()
        loads = await h.stub.GetLoads(pb.GetLoadsRequest())
        assert (loads.num_waiting, loads.num_running, loads.kv_cache_usage) == (0, 0, 0.0)
        assert [loads.counters[name] for name in ("num_jobs", "num_running_jobs", "job_bytes")] == [0, 0, 0]

    run(test, _Slower(max_num_seqs=6, max_num_waiting=200))
