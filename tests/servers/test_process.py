"""dsjax-serve as a process: the ready line, signals, the exit code; and the client program against it."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servers import client
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from tests.servers.harness import TIMEOUT_S, request

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def _server(*flags: str, line: str = "dsjax-serve ready on 127.0.0.1:") -> Iterator[tuple[subprocess.Popen, str]]:
    """(process, HOST:PORT) of a server that has printed its ready `line`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers.serve_fake", "--port=0", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    stdout, stderr = process.stdout, process.stderr
    assert stdout is not None and stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(stderr))  # so that a full pipe never blocks it
    reader.start()
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        printed = stdout.readline()
        assert printed.startswith(line), (printed, log)
        yield process, printed.split()[-1]
    finally:
        process.kill()
        process.wait()
        watchdog.cancel()
        reader.join()
        stdout.close()
        stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_four_streams_and_exits_with_0(number):
    with _server("--grace-period-s=20") as (process, address), grpc.insecure_channel(address) as channel:
        stub: Any = pb_grpc.InferenceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        calls = [stub.Generate(request(id=str(i), max_tokens=150, ignore_eos=True)) for i in range(4)]
        begun = [next(call) for call in calls]
        process.send_signal(number)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as raised:
            next(stub.Generate(request()))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        for first, call in zip(begun, calls, strict=True):
            ids = [i for message in (first, *call) for i in message.outputs[0].token_ids]
            assert ids == [(100 + i) % 256 for i in range(150)]
        watch.cancel()
        assert process.wait(TIMEOUT_S) == 0


def test_without_grace_four_streams_end_with_a_status_and_the_exit_code_is_0():
    with _server("--grace_period_s=0") as (process, address), grpc.insecure_channel(address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        calls = [stub.Generate(request(id=str(i), ignore_eos=True)) for i in range(4)]
        for call in calls:
            next(call)
        process.send_signal(signal.SIGTERM)
        for call in calls:
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
            assert "grace_period_s=0.0 was over" in raised.value.details()  # type: ignore[attr-defined]
        assert process.wait(TIMEOUT_S) == 0


def test_a_second_signal_ends_the_streams_at_once():
    with _server("--grace_period_s=1000") as (process, address), grpc.insecure_channel(address) as channel:
        stub: Any = pb_grpc.InferenceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        call = stub.Generate(request(ignore_eos=True))
        next(call)
        process.send_signal(signal.SIGINT)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert "a second signal came" in raised.value.details()  # type: ignore[attr-defined]
        watch.cancel()
        assert process.wait(TIMEOUT_S) == 0


def test_a_signal_during_the_warm_up_ends_the_process_with_0():
    with _server("--model=never-warm", line="warming") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_a_taken_port_is_one_line_and_exit_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [sys.executable, "-m", "tests.servers.serve_fake", f"--port={taken.getsockname()[1]}"],
            capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]  # none of gRPC's own
    assert len(lines) == 1 and "cannot be listened on" in lines[0]


def test_the_client_program_streams_an_answer(capsys):
    with _server() as (_, address):
        code = client.main(["dsjax-client", f"--address={address}", "--max-tokens=3", "--usage", "--wait_s=10", "abc"])
        out, err = capsys.readouterr()
        assert (code, out) == (0, "def\n")
        assert "3 prompt tokens (0 cached), 3 completion tokens, finished by length" in err
        assert client.main(["dsjax-client", f"--address={address}", "--n=2", "--max_tokens=2", "x"]) == 0
        assert sorted(capsys.readouterr().out.split("\n")) == ["", "", "[0] yz", "[1] yz"]
        assert client.main(["dsjax-client", f"--address={address}", "--timeout_s=0.05", "--ignore_eos", "x"]) == 1
        assert "dsjax-client: error: DEADLINE_EXCEEDED" in capsys.readouterr().err
        assert client.main(["dsjax-client", f"--address={address}", "--min_tokens=4000", "--max_tokens=9", "x"]) == 2
        assert "min_tokens=4000 is not allowed" in capsys.readouterr().err


def test_the_client_program_shows_logprobs_a_line_a_token(capsys):
    with _server() as (_, address):
        base = ["dsjax-client", f"--address={address}", "--wait_s=1e8", "--timeout_s=1e8", "--max_tokens=2"]
        assert client.main([*base, "--logprobs=1", "--prompt_logprobs=0", "ab"]) == 0
    out, err = capsys.readouterr()
    assert out == "cd\n"
    assert err.splitlines() == [
        "[prompt] token 97 has none: nothing comes before it",
        "[prompt] token 98 logprob -0.5000 rank 1",
        "[0] token 99 logprob -0.5000 rank 1, most likely 99 -0.5000",
        "[0] token 100 logprob -0.5000 rank 1, most likely 100 -0.5000",
    ]


INT32, UINT32, INT64 = "[-2147483648, 2147483647]", "[0, 4294967295]", "[-9223372036854775808, 9223372036854775807]"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--seed=99999999999999999999999"], f"seed=99999999999999999999999 is not allowed: it must be in {INT64}"),
        (["--stop_token_ids=-1"], f"stop_token_ids=-1 is not allowed: it must be in {UINT32}"),
        (["--stop_token_ids=4294967296"], f"stop_token_ids=4294967296 is not allowed: it must be in {UINT32}"),
        (["--max_tokens=99999999999"], f"max_tokens=99999999999 is not allowed: it must be in {UINT32}"),
        (["--min_tokens=99999999999"], f"min_tokens=99999999999 is not allowed: it must be in {UINT32}"),
        (["--top_k=99999999999"], "top_k=99999999999 is not allowed: it must be at most 2147483647"),
        (["--priority=99999999999"], "priority=99999999999 is not allowed: it must be in [-16, 15]"),
        (["--priority=16"], "priority=16 is not allowed: it must be in [-16, 15]"),
        (["--interactive_timeout_s=nan"],
         "interactive_timeout_s=nan is not allowed: it must be in [0, 86400], 0 for none"),
        (["--timeout_s=nan"], "timeout_s=nan must be in (0, 1e+08], or absent"),
        (["--timeout_s=1e18"], "timeout_s=1e+18 must be in (0, 1e+08], or absent"),
        (["--timeout_s=0"], "timeout_s=0.0 must be in (0, 1e+08], or absent"),
        (["--wait_s=nan"], "wait_s=nan must be in [0, 1e+08]"),
        (["--wait_s=-1"], "wait_s=-1.0 must be in [0, 1e+08]"),
        (["--wait_s=1e18"], "wait_s=1e+18 must be in [0, 1e+08]"),
        (["a\udcff"], r"argument 1, 'a\udcff', is not valid UTF-8: see '\udcff' at 1"),
        (["--chat", "--system=\udcff"], r"argument 2, '--system=\udcff', is not valid UTF-8: see '\udcff' at 9"),
        (["--tenant=\udcff"], r"argument 1, '--tenant=\udcff', is not valid UTF-8: see '\udcff' at 9"),
        (["--stop=\udcff"], r"argument 1, '--stop=\udcff', is not valid UTF-8: see '\udcff' at 7"),
        (["--system=s"], "system='s' needs --chat"),
        (["--thinking"], "thinking=True needs --chat"),
        (["--result=x", "hi"], "result='x' takes no prompt, such as 'hi': a job's is already known"),
        (["--result=x", "--submit"],
         "result='x' goes with address, timeout_s, wait_s, max_message_bytes, usage, not with --submit"),
    ],
)  # fmt: skip
def test_what_the_client_program_cannot_send_is_one_line_and_exit_code_2(args, sentence, capsys):
    assert client.main(["dsjax-client", *args, *([] if "--result=x" in args else ["prompt"])]) == 2
    assert capsys.readouterr() == ("", f"dsjax-client: error: {sentence}\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_on_stdin_that_is_not_utf_8_is_one_line_and_exit_code_2(errors, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8", errors=errors))
    assert client.main(["dsjax-client"]) == 2
    assert capsys.readouterr().err.startswith("dsjax-client: error: stdin is not valid UTF-8: see ")


def test_the_client_program_holds_a_conversation(capsys, monkeypatch):
    # The fake's answer to a chat is 6, 7, 8, 9 (its prompt ends in </think>, 261) and 10, its end token.
    turns = iter(["hi", "", "more"])
    asked: list[str] = []

    def read(prompt: str) -> str:
        asked.append(prompt)
        try:
            return next(turns)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with _server() as (_, address):
        assert client.main(["dsjax-client", f"--address={address}", "--chat", "--system=Be brief.", "--usage"]) == 0
    out, err = capsys.readouterr()
    assert out == "\x06\x07\x08\t\n\n" * 2
    assert len(asked) == 4
    assert "[0] 15 prompt tokens" in err  # BOS, 9 of the system, User, 2, Assistant, </think>
    assert "[0] 28 prompt tokens" in err  # and the answer (5), EOS, User, 4, Assistant, </think>


def test_the_client_program_names_the_server_that_does_not_answer(capsys):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert client.main(["dsjax-client", f"--address=127.0.0.1:{port}", "hello"]) == 1
    assert f"no server answers at 127.0.0.1:{port}: start dsjax-serve, or set --address" in capsys.readouterr().err


def test_server_info_holds_the_resolved_config():
    with _server("--max_num_seqs=5") as (_, address), grpc.insecure_channel(address) as channel:
        info = pb_grpc.InferenceStub(channel).GetServerInfo(pb.GetServerInfoRequest())
    assert '"scheduler.max_num_seqs": 5' in info.config_json
    assert (info.state, info.max_message_bytes) == (pb.SERVER_STATE_SERVING, 256 << 20)


def test_the_client_program_submits_jobs_and_shows_results(capsys):
    with _server() as (_, address), grpc.insecure_channel(address) as channel:
        base = ["dsjax-client", f"--address={address}", "--wait_s=10"]
        assert client.main([*base, "--submit", "--max_tokens=3", "--priority=-1", "--tenant=t", "abc"]) == 0
        job_id = capsys.readouterr().out.strip()
        assert client.main([*base, f"--result={job_id}", "--usage"]) == 0
        out, err = capsys.readouterr()
        assert (out, "3 completion tokens, finished by length" in err) == ("def\n", True)
        assert client.main([*base, "--interactive_timeout_s=0.1", "--ignore_eos", "--max_tokens=4000", "abc"]) == 1
        out, err = capsys.readouterr()
        assert "DEADLINE_EXCEEDED: interactive_timeout_s=0.1 passed before the answer was complete" in err
        seen, job_id = out.rstrip("\n"), err.strip().rpartition("--result=")[2]
        assert client.main([*base, f"--result={job_id}", "--timeout_s=0.01"]) == 1
        assert f"job {job_id} goes on: this is its answer so far" in capsys.readouterr().err
        assert pb_grpc.InferenceStub(channel).Abort(pb.AbortRequest(request_id=job_id)).aborted
        assert client.main([*base, f"--result={job_id}"]) == 0
        assert capsys.readouterr().out.startswith(seen)
        assert client.main([*base, "--result=never"]) == 1
        assert "NOT_FOUND: job_id='never' is no job" in capsys.readouterr().err
        assert client.main([*base, "--logprobs=1", "--max_tokens=1", "--submit", "abc"]) == 0
        assert client.main([*base, f"--result={capsys.readouterr().out.strip()}"]) == 0
        assert "[0] token 100 logprob -0.5000 rank 1, most likely 100 -0.5000" in capsys.readouterr().err
