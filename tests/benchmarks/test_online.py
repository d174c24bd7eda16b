"""The gRPC load generator against a server of a few lines on this machine."""

import asyncio
from contextlib import asynccontextmanager

import grpc

from benchmarks import online
from benchmarks.workloads import WorkItem
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as rpc


class Counting(rpc.InferenceServicer):
    """Streams last + 1, one token a message; refuses prompts that start with 0."""

    def __init__(self):
        self.live = self.most_live = 0
        self.salts = set()

    async def Generate(self, request, context):
        if request.token_ids.ids[0] == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt starts with 0")
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        self.salts.add(request.cache_salt)
        last = request.token_ids.ids[-1]
        for i in range(request.sampling_params.max_tokens):
            await asyncio.sleep(0)  # let the other streams in
            output = pb.Output(token_ids=[last + 1 + i])
            yield pb.GenerateResponse(outputs=[output], usage=pb.Usage(cached_tokens=3))
        self.live -= 1

    async def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse(config_json='{"model": "m"}')

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(model="m", vocab_size=100)


@asynccontextmanager
async def serving():
    server, service = grpc.aio.server(), Counting()
    rpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", service
    await server.stop(None)


def send(items, **kwargs):
    async def go():
        async with serving() as (address, service):
            records, duration = await online.run(
                address,
                items,
                arrivals=[0.0] * len(items),
                params=lambda item: pb.SamplingParams(max_tokens=item.max_tokens),
                cache_salt="s",
                **kwargs,
            )
            return records, duration, service

    return asyncio.run(go())


ITEMS = [WorkItem(id=i, prompt=(10 * i + 5,), max_tokens=3) for i in range(4)]


def test_tokens_times_and_salt():
    records, duration, service = send(ITEMS, max_concurrency=None)
    assert [r.token_ids for r in records] == [[6, 7, 8], [16, 17, 18], [26, 27, 28], [36, 37, 38]]
    assert [len(r.token_times_s) for r in records] == [3, 3, 3, 3]
    assert [r.cached_tokens for r in records] == [3, 3, 3, 3]
    assert all(0 < r.ttft_s <= r.latency_s <= duration for r in records)
    assert service.salts == {"s"}


def test_max_concurrency_holds():
    records, _, service = send(ITEMS, max_concurrency=1)
    assert (service.most_live, [r.ok for r in records]) == (1, [True] * 4)


def test_a_refusal_is_recorded():
    records, _, _ = send([WorkItem(id=9, prompt=(0,), max_tokens=1), ITEMS[1]], max_concurrency=None)
    assert records[0].error == "INVALID_ARGUMENT: prompt starts with 0"
    assert records[1].token_ids == [16, 17, 18]


def test_server_info():
    async def go():
        async with serving() as (address, _):
            return await online.server_info(address)

    server, model = asyncio.run(go())
    assert (server.config_json, model.model, model.vocab_size) == ('{"model": "m"}', "m", 100)
