"""300 streams at once over real connections, on the real engine with a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from dsjax.engine import Engine
from servers.flags import ServerConfig
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from servers.server import Server
from tests.fakes import assert_idle
from tests.servers.harness import collect, connect, request, until
from tests.tiny_model import random_prompt, solo, tiny_engine

NUM_STREAMS, NUM_CONNECTIONS, NUM_PROMPTS, NUM_OUTPUT, NUM_ROWS = 300, 10, 60, 10, 16
LENGTHS = (1, 5, 8, 13, 16, 17, 24, 33, 40, 41)


class _Watched:
    """The engine, which takes no step before all are queued, and what it did in which order."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.added: list[str] = []
        self.first_tokens: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def add(self, request):
        self.engine.add(request)
        self.added.append(request.request_id)

    def step(self):
        if len(self.added) < NUM_STREAMS:
            return []
        if not self.first_tokens:
            assert self.engine.scheduler.num_live == NUM_STREAMS
        events = self.engine.step()
        self.first_tokens += [event.request_id for event in events if event.num_output_tokens == 1]
        return events


@pytest.mark.slow
def test_300_streams_at_once_are_complete_equal_to_solo_and_in_order():
    watched = _Watched(tiny_engine(max_num_seqs=NUM_ROWS, max_num_waiting=NUM_STREAMS))
    prompts = [random_prompt(i, LENGTHS[i % len(LENGTHS)]) for i in range(NUM_PROMPTS)]

    async def one(stub: Any, number: int) -> list[pb.GenerateResponse]:
        prompt = prompts[number % NUM_PROMPTS]
        message = request(prompt, id=f"r{number}", temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT)
        return await collect(stub.Generate(message))

    async def body() -> list[list[pb.GenerateResponse]]:
        server = Server(lambda: watched, ServerConfig(port=0))
        await server.start()
        await server.wait_ready()
        async with contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(connect(server.port)) for _ in range(NUM_CONNECTIONS)]
            stubs = [pb_grpc.InferenceStub(channel) for channel in channels]
            streams = await asyncio.gather(*(one(stubs[i % NUM_CONNECTIONS], i) for i in range(NUM_STREAMS)))
        await until(lambda: not watched.engine.has_work())  # the step after the last tokens is still to be read
        assert_idle(watched.engine)
        assert await server.drain(0)
        return streams

    for number, messages in enumerate(asyncio.run(body())):
        outputs = [output for message in messages for output in message.outputs]
        assert [token for output in outputs for token in output.token_ids] == solo(
            prompts[number % NUM_PROMPTS], NUM_OUTPUT
        )
        assert outputs[-1].finish_reason == pb.FINISH_REASON_LENGTH
    # First come, first served: only requests that run at the same time can overtake each other, so a first token
    # comes fewer than NUM_ROWS places from its request's place in the order of arrival.
    assert sorted(watched.first_tokens) == sorted(watched.added)
    places = {request_id: place for place, request_id in enumerate(watched.added)}
    moved = [abs(place - places[request_id]) for place, request_id in enumerate(watched.first_tokens)]
    assert max(moved) < NUM_ROWS
