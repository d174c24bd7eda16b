"""A server with a fake engine on a loopback port, and a client of it, inside one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dsjax.chat import ChatStrings
from servers.flags import ServerConfig
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from servers.server import Server
from tests.servers.fakes import FakeEngine

TIMEOUT_S = 30.0  # of everything that must happen; far more than it takes


@dataclass
class Harness:
    engine: FakeEngine
    server: Server
    channel: grpc.aio.Channel
    stub: Any

    async def health(self) -> str:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def num_free(self) -> int:
        return (await self.stub.GetLoads(pb.GetLoadsRequest())).num_pages_free

    async def idle(self) -> None:
        """Waits until the engine holds nothing."""
        await until(lambda: not self.engine.has_work() and self.server.service.requests.idle.is_set())
        assert await self.num_free() == self.engine.num_pages


def run(test: Callable[[Harness], Coroutine[Any, Any, None]], engine: FakeEngine | None = None, **config: Any) -> None:
    """Runs `test(harness)` against a warm server; the server must come to an orderly end afterwards."""

    async def body() -> None:
        async with serving(engine or FakeEngine(), **config) as harness:
            await harness.server.wait_ready()
            await test(harness)

    asyncio.run(asyncio.wait_for(body(), 2 * TIMEOUT_S))


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine, chat_strings: ChatStrings | None = None, **config: Any) -> AsyncIterator[Harness]:
    server = Server(lambda: engine, ServerConfig(port=0, **config), chat_strings=chat_strings)
    await server.start()
    try:
        async with connect(server.port) as channel:
            yield Harness(engine, server, channel, pb_grpc.InferenceStub(channel))
    finally:
        engine.gate.set()
        engine.warm_gate.set()
        assert await server.drain(0)


def connect(port: int, **options: int) -> grpc.aio.Channel:
    limits = {"grpc.max_receive_message_length": -1, "grpc.max_send_message_length": -1}
    # A pool of its own: channels to one address share a connection otherwise.
    extra = {"grpc.use_local_subchannel_pool": 1}
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list({**limits, **extra, **options}.items()))


async def until(condition: Callable[[], bool]) -> None:
    """Polls; fails after TIMEOUT_S."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.001)


def request(prompt: str | list[int] = "abc", *, stream: bool = True, id: str = "", **params: Any) -> pb.GenerateRequest:
    message = pb.GenerateRequest(request_id=id, stream=stream, sampling_params=pb.SamplingParams(**params))
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
        message.token_ids.SetInParent()
    return message


async def collect(call: Any) -> list[pb.GenerateResponse]:
    """The messages left; `call.read()` may have taken some before."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
        messages.append(message)
    return messages


async def status(awaitable: Any) -> tuple[str, str]:
    """(code, message) of a call that must fail."""
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call succeeded")
