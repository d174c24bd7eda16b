"""The server around the service: health, reflection, sizes, failure, draining, the socket."""

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # pyright: ignore[reportMissingImports]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dsjax.errors import ConfigError
from dsjax.serving_config import TierConfig
from servers import server
from servers.flags import ServerConfig
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.server import Server, channel_options
from tests.servers.fakes import FOREVER, MODEL, Endless, FakeEngine
from tests.servers.harness import TIMEOUT_S, Harness, collect, connect, request, run, serving, status, until


async def _info(h: Harness) -> pb.GetServerInfoResponse:
    return await h.stub.GetServerInfo(pb.GetServerInfoRequest())


def test_health_is_not_serving_until_warm_and_calls_are_told_to_wait():
    async def body():
        engine = FakeEngine()
        engine.warm_gate.clear()
        async with serving(engine) as h:
            assert await h.health() == "NOT_SERVING"
            await until(lambda: h.server.thread.state.value == "warming")
            assert (await _info(h)).state == pb.SERVER_STATE_WARMING
            for call in (collect(h.stub.Generate(request())), h.stub.GetLoads(pb.GetLoadsRequest())):
                code, details = await status(call)
                assert (code, "is warming: wait until its health is SERVING" in details) == ("UNAVAILABLE", True)
            engine.warm_gate.set()
            await h.server.wait_ready()
            assert await h.health() == "SERVING"
            assert (await _info(h)).state == pb.SERVER_STATE_SERVING

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))


def test_a_failed_step_ends_the_batch_with_internal_and_health_says_so():
    async def test(h: Harness):
        calls = [h.stub.Generate(request(id=str(i), **FOREVER)) for i in range(4)]
        for call in calls:
            await call.read()
        h.engine.raise_in_step = ValueError("boom")
        for call in (*calls, h.stub.Generate(request())):
            code, details = await status(collect(call))
            assert (code, "ValueError: boom" in details) == ("INTERNAL", True)
        for call in (h.stub.GetLoads(pb.GetLoadsRequest()), h.stub.Abort(pb.AbortRequest(request_id="1"))):
            assert (await status(call))[0] == "INTERNAL"
        assert await h.health() == "NOT_SERVING"
        info = await _info(h)
        assert (info.state, "boom" in info.error) == (pb.SERVER_STATE_FAILED, True)

    run(test, Endless())


def test_draining_flips_health_first_then_refuses_new_calls_and_lets_the_live_finish():
    async def test(h: Harness):
        health: Any = health_pb2_grpc.HealthStub(h.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        h.engine.gate.clear()
        live = [h.stub.Generate(request("abc", id=str(i), stream=False, max_tokens=6)) for i in range(4)]
        await until(lambda: h.server.service.requests._num_calls == 4)
        drain = asyncio.ensure_future(h.server.drain(TIMEOUT_S))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        code, details = await status(collect(h.stub.Generate(request())))
        assert (code, "draining" in details) == ("UNAVAILABLE", True)
        assert (await _info(h)).state == pb.SERVER_STATE_DRAINING
        h.engine.gate.set()
        assert [(await collect(call))[0].outputs[0].text for call in live] == ["defghi"] * 4
        watch.cancel()
        assert await drain

    run(test)


def test_without_grace_the_live_end_with_a_status():
    async def test(h: Harness):
        live = [h.stub.Generate(request(id=str(i), **FOREVER)) for i in range(4)]
        for call in live:
            await call.read()
        drain = asyncio.ensure_future(h.server.drain(0))
        for call in live:
            code, details = await status(collect(call))
            assert (code, "the server shut down before the answer was complete" in details) == ("UNAVAILABLE", True)
        assert await drain

    run(test, Endless())


@pytest.mark.parametrize("disk", [False, True])
def test_an_engine_with_a_cache_on_disk_gets_the_time_to_write_it(disk, monkeypatch, tmp_path):
    monkeypatch.setattr(server, "ENGINE_STOP_S", 0.0)

    class Writing(FakeEngine):
        def close(self, error=None):
            written.wait(TIMEOUT_S)
            super().close(error)

    engine, written = Writing(), threading.Event()
    tiers = TierConfig(host_cache_bytes=1, disk_cache_dir=str(tmp_path), disk_cache_bytes=1) if disk else TierConfig()
    engine.config = dataclasses.replace(engine.config, tiers=tiers)

    async def body():
        made = server.Server(lambda: engine, ServerConfig(port=0))
        await made.start()
        await made.wait_ready()
        if disk:
            asyncio.get_running_loop().call_later(0.01, written.set)
        assert await made.drain(0) == disk
        written.set()
        await made.thread.stop(TIMEOUT_S)

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))


def test_reflection_lists_the_services():
    async def test(h: Harness):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(h.channel)  # type: ignore[arg-type]
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        assert sorted(service.name for service in answer.list_services_response.service) == [
            "dsjax.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        ]
        call.cancel()

    run(test)


def test_a_prompt_of_1_2_million_ids_arrives_and_is_judged_by_its_length():
    async def test(h: Harness):
        code, details = await status(collect(h.stub.Generate(request([1000 % 256] * 1_200_000))))
        assert code == "INVALID_ARGUMENT" and "the prompt has 1200000 tokens" in details
        code, details = await status(collect(h.stub.Generate(request("x" * 5_000_000))))
        assert code == "INVALID_ARGUMENT" and "the prompt has at least 5000000 tokens" in details
        assert (await collect(h.stub.Generate(request("a", max_tokens=1))))[0].outputs[0].text == "b"

    run(test)


def test_an_answer_of_more_than_4_mb_arrives():
    async def test(h: Harness):
        message = request([65] * 40_000, stream=False, max_tokens=1, prompt_logprobs=20)
        (answer,) = await collect(h.stub.Generate(message))
        assert answer.ByteSize() > 4 << 20
        assert len(answer.prompt_logprobs.positions) == 40_000

    run(test, FakeEngine(max_model_len=50_000))


def test_messages_over_the_limit_are_refused_by_its_name():
    async def test(h: Harness):
        code, details = await status(collect(h.stub.Generate(request("x" * 2000))))
        assert code == "INVALID_ARGUMENT"
        assert "bytes, more than max_message_bytes=1024" in details and "--max_message_bytes" in details
        message = request([65] * 100, stream=False, max_tokens=1, prompt_logprobs=20)
        code, details = await status(collect(h.stub.Generate(message)))
        assert code == "INVALID_ARGUMENT" and "ask for fewer logprobs" in details
        await h.idle()

    run(test, max_message_bytes=1024)


def test_tokenize_and_detokenize():
    async def test(h: Harness):
        answer = await h.stub.Tokenize(pb.TokenizeRequest(text="aé"))
        assert (list(answer.token_ids), answer.max_model_len) == ([97, 0xC3, 0xA9], 4096)
        assert list((await h.stub.Tokenize(pb.TokenizeRequest(text="a", add_bos=True))).token_ids) == [256, 97]
        assert (await h.stub.Detokenize(pb.DetokenizeRequest(token_ids=[256, 97, 0xC3, 0xA9]))).text == "aé"
        raw = pb.DetokenizeRequest(token_ids=[257], skip_special_tokens=False)
        assert (await h.stub.Detokenize(raw)).text == "<｜end▁of▁sentence｜>"
        code, details = await status(h.stub.Detokenize(pb.DetokenizeRequest(token_ids=[264])))
        assert code == "INVALID_ARGUMENT" and "token_ids holds 264: it must be less than vocab_size=264" in details
        assert (await status(h.stub.Tokenize(pb.TokenizeRequest())))[0] == "INVALID_ARGUMENT"

    run(test)


def test_model_info_and_loads():
    async def test(h: Harness):
        info = await h.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model, info.vocab_size, info.max_model_len) == ("dsjax-nano", MODEL.vocab_size, 4096)
        assert (info.bos_token_id, list(info.eos_token_ids), info.has_tokenizer) == (0, [10], True)
        call = h.stub.Generate(request(**FOREVER))
        await call.read()
        loads = await h.stub.GetLoads(pb.GetLoadsRequest())
        assert (loads.num_waiting, loads.num_running) == (0, 1)
        assert (loads.num_pages_total, loads.num_pages_free, loads.kv_cache_usage) == (72, 71, 1 / 72)
        assert loads.counters["num_steps"] >= 1
        call.cancel()
        await h.idle()

    run(test, Endless(max_model_len=4096))


def test_a_taken_port_is_a_clear_error():
    async def test(h: Harness):
        second = Server(FakeEngine, ServerConfig(port=h.server.port))
        with pytest.raises(ConfigError, match=f"port={h.server.port} cannot be listened on"):
            await second.start()

    run(test)


def test_the_channel_options_exist_in_this_grpc():
    # gRPC ignores an option that it does not know, so a misspelt one would never be noticed.
    binary = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in channel_options(ServerConfig()) if name.encode() not in binary] == []


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ServerConfig) if f.type == "int"])
def test_server_config_refuses_what_grpc_would_misread(field):
    with pytest.raises(ConfigError, match=f"{field}=-1 must be in"):
        ServerConfig(**{field: -1})  # type: ignore[arg-type]


def test_a_client_that_leaves_while_its_prompt_is_encoded_leaves_nothing_behind():
    async def test(h: Harness):
        call = h.stub.Generate(request("x" * 5000, id="x", **FOREVER))
        await until(lambda: h.server.service.requests._num_calls == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collect(call)
        await h.idle()

    run(test, FakeEngine(max_model_len=1 << 20))


def test_two_channels_share_one_server():
    async def test(h: Harness):
        async with connect(h.server.port) as other:
            stub = h.stub.__class__(other)
            first, second = await asyncio.gather(
                collect(h.stub.Generate(request("abc", stream=False, max_tokens=3))),
                collect(stub.Generate(request("xyz", stream=False, max_tokens=2))),
            )
        assert (first[0].outputs[0].text, second[0].outputs[0].text) == ("def", "{|")
        assert isinstance(other, grpc.aio.Channel)

    run(test)
