"""The main job for real: dsjax-serve on the embedded model in its own process, over a real gRPC channel."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jax
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dsjax import SamplingParams
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from tests.embedded import FLAGS, nano
from tests.servers.harness import request

ROOT = Path(__file__).parents[2]
START_S = 300  # compiling, on a busy machine
PROMPT = "And it came to pass that"
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@contextlib.contextmanager
def _serve(*, drained: bool = False) -> Iterator[tuple[subprocess.Popen, str]]:
    """(process, HOST:PORT) of a warm server; it must end with exit code 0 on SIGTERM, the test's own if `drained`."""
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "servers.main",
            "--port=0",
            "--grace_period_s=60",
            f"--compilation_cache_dir={cache}",
            *FLAGS,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    assert process.stdout is not None and process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,))
    reader.start()
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        assert line.startswith("dsjax-serve ready on "), (line, log[-5:])
        yield process, line.split()[-1]
        if not drained:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0, log[-5:]
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen, str]]:
    with _serve() as found:
        yield found


@pytest.fixture
def stub(server) -> Iterator[Any]:
    with grpc.insecure_channel(server[1]) as channel:
        yield pb_grpc.InferenceStub(channel)


def _loads(stub) -> Any:
    return stub.GetLoads(pb.GetLoadsRequest())


def test_streamed_equals_unary_equals_the_library(stub):
    streamed = list(stub.Generate(request(PROMPT, **GREEDY)))
    (unary,) = stub.Generate(request(PROMPT, stream=False, **GREEDY))
    text, ids = unary.outputs[0].text, list(unary.outputs[0].token_ids)
    assert "".join(m.outputs[0].text for m in streamed) == text
    assert [i for m in streamed for i in m.outputs[0].token_ids] == ids
    decoded = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert decoded.text == text
    (local,) = nano().generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
    assert (local.outputs[0].text, local.outputs[0].token_ids) == (text, ids)
    assert unary.usage.completion_tokens == len(ids)


def test_sixty_requests_at_once_each_equal_alone(stub):
    prompts = [f"{PROMPT} {word}" for word in "the a his her my our they we he she".split()]
    alone = [next(stub.Generate(request(p, stream=False, **GREEDY))).outputs[0].text for p in prompts]
    calls = [stub.Generate(request(prompts[i % 10], **GREEDY)) for i in range(60)]
    for i, call in enumerate(calls):
        assert "".join(m.outputs[0].text for m in call) == alone[i % 10], prompts[i % 10]


def test_cancelled_and_expired_calls_return_every_page_within_a_second(stub):
    total = _loads(stub).num_pages_total
    calls = [stub.Generate(request(PROMPT, max_tokens=900, ignore_eos=True)) for _ in range(6)]
    for call in calls[:4]:  # the other two wait for a slot
        next(call)
    expiring = stub.Generate(request(PROMPT, max_tokens=900, ignore_eos=True), timeout=0.2)
    with pytest.raises(grpc.RpcError) as expired:
        list(expiring)
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    for call in calls:
        call.cancel()
    end = time.monotonic() + 1
    while True:
        loads = _loads(stub)
        if (loads.num_running, loads.num_waiting) == (0, 0):
            break
        assert time.monotonic() < end, loads
    assert loads.num_pages_free + loads.num_pages_cached == total


def test_a_job_and_a_call_that_becomes_one_answer_what_a_call_does(stub):
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 200}
    (unary,) = stub.Generate(request(PROMPT, stream=False, **params))
    submitted = stub.Submit(request(PROMPT, **params)).job_id
    message = request(PROMPT, **params)
    message.interactive_timeout_s = 0.02  # 200 tokens take ten times as long
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(message))
    became = dict(raised.value.trailing_metadata())["job-id"]  # type: ignore[attr-defined]
    for job_id in (submitted, became):
        result = stub.GetResult(pb.GetResultRequest(job_id=job_id, wait_s=60, discard=True))
        assert result.state == pb.JOB_STATE_DONE
        assert result.response.outputs == unary.outputs
    assert not stub.Prefetch(pb.PrefetchRequest(text=PROMPT)).found  # no tiers


def test_model_info_and_health(server, stub):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.vocab_size == nano().engine.model_config.vocab_size
    with grpc.insecure_channel(server[1]) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING


def test_loads_have_every_number_of_the_stats(stub):
    stats = nano().engine.stats()
    counters = dict(_loads(stub).counters)
    numbers = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats)}
    of_kinds = {f"{name}_{kind}" for name, value in numbers.items() if isinstance(value, dict) for kind in value}
    assert {"num_pages_of_window", "num_pages_used_of_csa"} <= of_kinds
    expected = of_kinds | {name for name, value in numbers.items() if not isinstance(value, dict)}
    expected -= {f.name for f in pb.GetLoadsResponse.DESCRIPTOR.fields} | {"num_running_per_shard"}
    assert expected <= set(counters)
    assert (counters["degrade_level"], counters["num_shed"], counters["num_refused"]) == (0, 0, 0)


def test_sigterm_lets_live_streams_finish(stub):
    with _serve(drained=True) as (process, address), grpc.insecure_channel(address) as channel:
        other: Any = pb_grpc.InferenceStub(channel)
        calls = [other.Generate(request(PROMPT, max_tokens=200, ignore_eos=True, temperature=0.0)) for _ in range(4)]
        seen = [len(next(call).outputs[0].token_ids) for call in calls]
        process.send_signal(signal.SIGTERM)
        for call, tokens in zip(calls, seen, strict=True):
            assert tokens + sum(len(m.outputs[0].token_ids) for m in call) == 200
