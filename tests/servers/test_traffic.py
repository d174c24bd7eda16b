"""Random traffic: whatever some clients do, the others get exactly their answers, and in the end nothing is held."""

import asyncio
import random

import grpc
import pytest

from servers.proto.dsjax.v1 import inference_pb2 as pb
from tests.servers.fakes import FakeEngine
from tests.servers.harness import Harness, collect, request, run


async def _client(h: Harness, number: int, rng: random.Random) -> str:
    """One random request; returns how it ended."""
    deed = rng.choice(["finish", "finish", "finish", "cancel", "abort", "deadline", "bad"])
    first, length, n = rng.randrange(256), rng.randint(1, 40), rng.choice([1, 1, 2, 3])
    prompt = [first] * rng.randint(1, 30)
    params = {"ignore_eos": True, "n": n, "max_tokens": length if deed == "finish" else 3000}
    message = request([] if deed == "bad" else prompt, id=f"r{number}", stream=rng.random() < 0.7, **params)
    message.stream_interval = rng.randint(1, 4)
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
        return error.code().name
    ids = {index: [t for o in outputs if o.index == index for t in o.token_ids] for index in range(n)}
    expected = [(first + 1 + i) % 256 for i in range(length)]
    if deed == "finish":
        assert {o.finish_reason for o in outputs if o.finish_reason} == {pb.FINISH_REASON_LENGTH}
        assert ids == dict.fromkeys(range(n), expected)
    return deed


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
        assert set(ended) == {"finish", "cancelled", "abort", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
        await h.idle()
        loads = await h.stub.GetLoads(pb.GetLoadsRequest())
        assert (loads.num_waiting, loads.num_running, loads.kv_cache_usage) == (0, 0, 0.0)

    run(test, _Slower(max_num_seqs=6, max_num_waiting=200))
