"""Runs a workload against a server over gRPC, one stream a request, from one asyncio loop.  [no jax]"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from benchmarks.metrics import Record
from benchmarks.workloads import WorkItem
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as rpc

CONNECT_S = 10.0  # how long to wait for the server; then every request says what is wrong
# A prompt of a million ids is about 3 MB; answers are small.
CHANNEL_OPTIONS = [("grpc.max_send_message_length", 64 << 20), ("grpc.max_receive_message_length", 64 << 20)]


async def run(
    address: str,
    items: Sequence[WorkItem],
    *,
    arrivals: Sequence[float],  # seconds from the start, ascending
    max_concurrency: int | None,
    params: Callable[[WorkItem], pb.SamplingParams],
    cache_salt: str = "",
    on_finish: Callable[[], object] = lambda: None,
) -> tuple[list[Record], float]:
    """Returns a record for each item, in order, and the seconds from the start to the last token.

    A request's time starts when it is sent: with `max_concurrency` the client's own queue does not count, as in
    `vllm bench serve`. A refused or broken request becomes a record with an error.
    """
    limit = asyncio.Semaphore(max_concurrency or len(items) or 1)

    async def one(stub: Any, item: WorkItem, arrival: float) -> Record:
        await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - begin)))
        async with limit:
            record = Record(id=item.id, prompt_len=len(item.prompt), start_s=time.perf_counter())
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=item.prompt), sampling_params=params(item), stream=True, cache_salt=cache_salt
            )
            try:
                async for response in stub.Generate(request):
                    for output in response.outputs:
                        if output.token_ids:
                            record.token_times_s.append(time.perf_counter())
                            record.token_ids.extend(output.token_ids)
                    record.cached_tokens = max(record.cached_tokens, response.usage.cached_tokens)
            except grpc.aio.AioRpcError as error:
                record.error = f"{error.code().name}: {error.details()}"
        on_finish()
        return record

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = rpc.InferenceStub(channel)
        with contextlib.suppress(TimeoutError):  # gRPC sends what it queues before it is connected in any order
            await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
        begin = time.perf_counter()
        tasks = [one(stub, item, arrival) for item, arrival in zip(items, arrivals, strict=True)]
        records = await asyncio.gather(*tasks)
    return list(records), time.perf_counter() - begin


async def server_info(address: str) -> tuple[Any, Any]:
    """(GetServerInfo, GetModelInfo) of the server at `address`."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = rpc.InferenceStub(channel)
        return await stub.GetServerInfo(pb.GetServerInfoRequest()), await stub.GetModelInfo(pb.GetModelInfoRequest())


async def counters(address: str) -> dict[str, float]:
    """Those of GetLoads of the server at `address`."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return dict((await rpc.InferenceStub(channel).GetLoads(pb.GetLoadsRequest())).counters)
