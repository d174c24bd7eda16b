"""dsjax-serve as two processes of four CPU devices each, joined over loopback: answers, orderly ends, and losses.

Each start compiles the step in both processes, so there are as few starts as possible.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jax
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dsjax.verify import read_golden
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from tests.distributed.ports import free_port
from tests.golden_sets import COPIES
from tests.servers.harness import request

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = COPIES / "q1_fp8fp4"
MESH = ("--mesh=data:2,model:4", "--kv_parallel=2")
START_S, END_S = 300, 60  # compiling, on a busy machine
HEALTH = health_pb2.HealthCheckResponse


@dataclass
class Pair:
    """Both processes, a channel to the first, and what they have logged."""

    processes: list[subprocess.Popen]
    logs: list[list[str]]
    channel: grpc.Channel

    @property
    def stub(self) -> Any:
        return pb_grpc.InferenceStub(self.channel)

    def watch(self) -> Any:
        """A stream of health states, which begins with SERVING."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == HEALTH.SERVING
        return watch

    def tokens(self, ids: list[int], num: int) -> list[int]:
        return _tokens(self.stub.Generate(_greedy(ids, num)))


def _greedy(ids: list[int], num: int, **fields: Any) -> pb.GenerateRequest:
    return request(ids, temperature=0.0, max_tokens=num, ignore_eos=True, **fields)


def _tokens(call: Any) -> list[int]:
    return [token for message in call for token in message.outputs[0].token_ids]


@contextlib.contextmanager
def _serving(*flags: str) -> Iterator[Pair]:
    address = f"127.0.0.1:{free_port()}"
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    xla_flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"  # the last one counts
    environment = dict(os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS=xla_flags)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "servers.main", f"--model={MODEL}", "--port=0", "--prefix_unit_tokens=4",
             f"--compilation_cache_dir={cache}", f"--coordinator_address={address}", "--num_processes=2",
             f"--process_id={number}", *MESH, *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )
        for number in range(2)
    ]  # fmt: skip
    logs: list[list[str]] = [[], []]
    readers = [threading.Thread(target=log.extend, args=(p.stderr,)) for p, log in zip(processes, logs, strict=True)]
    watchdog = threading.Timer(START_S, lambda: [process.kill() for process in processes])
    for thread in (*readers, watchdog):
        thread.start()
    try:
        following, ready = (process.stdout.readline() for process in reversed(processes))
        watchdog.cancel()
        assert following == f"dsjax-serve following {address}\n", logs[1][-5:]
        assert ready.startswith("dsjax-serve ready on 127.0.0.1:"), logs[0][-5:]
        with grpc.insecure_channel(ready.split()[-1]) as channel:
            yield Pair(processes, logs, channel)
    finally:
        watchdog.cancel()
        for process in processes:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join()
        for process in processes:
            process.stdout.close()
            process.stderr.close()


def test_two_processes_answer_as_one_and_drain_together():
    golden = [(prompt.ids.tolist(), prompt.greedy_ids.tolist()) for prompt in read_golden(MODEL)]
    with _serving("--max_num_seqs=4", "--max_num_batched_tokens=16", "--fail_on_recompile") as pair:
        calls = [pair.stub.Generate(_greedy(ids, len(answer))) for ids, answer in golden for _ in range(2)]
        assert [_tokens(call) for call in calls] == [answer for _, answer in golden for _ in range(2)]

        ids, answer = max(golden, key=lambda prompt: len(prompt[0]))
        messages = list(pair.stub.Generate(_greedy(ids, len(answer))))
        assert [token for message in messages for token in message.outputs[0].token_ids] == answer
        assert messages[-1].usage.cached_tokens == 196

        endless = pair.stub.Generate(_greedy(ids, 3000))
        next(endless)
        endless.cancel()
        biased = _greedy(ids, 3)
        biased.sampling_params.logit_bias[7] = 100.0  # goes through the other program that every process runs
        assert _tokens(pair.stub.Generate(biased)) == [7, 7, 7]
        assert pair.tokens(ids, len(answer)) == answer

        last = pair.stub.Generate(_greedy(ids, 60))
        next(last)
        for process in pair.processes:  # as a cluster does
            process.send_signal(signal.SIGTERM)
        assert len(_tokens(last)) == 59
        assert [process.wait(END_S) for process in pair.processes] == [0, 0]
    assert not any("Traceback" in line for log in pair.logs for line in log)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_the_engine(number):
    with _serving("--max_num_seqs=2", "--max_num_batched_tokens=2", "--peer_timeout_s=3") as pair:
        watch, call = pair.watch(), pair.stub.Generate(_greedy([1, 2, 3], 3000))
        next(call)
        pair.processes[1].send_signal(number)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() is grpc.StatusCode.INTERNAL  # type: ignore[attr-defined]
        assert "PeerLost: process 1 " in raised.value.details()  # type: ignore[attr-defined]
        assert "peer_timeout_s=3; restart all processes" in raised.value.details()  # type: ignore[attr-defined]
        assert next(watch).status == HEALTH.NOT_SERVING
        watch.cancel()
        pair.processes[0].send_signal(signal.SIGTERM)
        assert pair.processes[0].wait(END_S) == 1


def test_an_idle_engine_notices_too_and_a_follower_does_not_outlive_its_leader():
    with _serving("--max_num_seqs=2", "--max_num_batched_tokens=2", "--peer_timeout_s=3") as pair:
        watch = pair.watch()
        pair.processes[0].send_signal(signal.SIGSTOP)  # no socket is closed: only silence can tell
        assert pair.processes[1].wait(END_S) == 1
        pair.processes[0].send_signal(signal.SIGCONT)
        assert next(watch).status == HEALTH.NOT_SERVING
        watch.cancel()
        pair.processes[0].send_signal(signal.SIGTERM)
        assert pair.processes[0].wait(END_S) == 1
    assert "dsjax-serve: error: process 0 is silent: its last message" in pair.logs[1][-1]
