"""A leader and followers in real processes over real sockets; their runners compute nothing."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsjax.channel import PeerLost
from dsjax.config import DistributedConfig, EngineConfig
from dsjax.distributed import Follower, Leader, facts_of
from dsjax.errors import ConfigError
from dsjax.runner.buckets import Bucket
from tests.distributed.ports import free_port

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0
FACTS = {"fact": "same"}


class Never:
    """A result that is never computed, as that of a collective whose other side is gone."""

    def is_ready(self) -> bool:
        return False


@contextlib.contextmanager
def _engine(
    num_processes: int = 2, peer_timeout_s: float = WAIT_S, fact: str = "same", ids: tuple[int, ...] = ()
) -> Iterator[tuple[Leader, list[subprocess.Popen]]]:
    """(leader, the follower processes)."""
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.follow_fake", address, str(num_processes), str(n),
             str(peer_timeout_s), fact],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)),
        )
        for n in ids or range(1, num_processes)
    ]  # fmt: skip
    watchdog = threading.Timer(WAIT_S, lambda: [process.kill() for process in processes])
    watchdog.start()
    config = DistributedConfig(coordinator_address=address, num_processes=num_processes, peer_timeout_s=peer_timeout_s)
    leader = None
    try:
        leader = Leader.gather(config, FACTS)
        yield leader, processes
    finally:
        watchdog.cancel()
        if leader is not None:
            leader.close(RuntimeError("the test is over"))
        for process in processes:
            process.kill()
            process.communicate()


def test_every_launch_comes_once_in_order_and_the_end_is_orderly():
    with _engine(num_processes=3) as (leader, processes):
        leader.wait_ready()
        for number in range(200):
            leader.send(Bucket(8, 8, 1), (np.full(2, number, np.int32), np.float32([0.5])))
        leader.send(4, ())
        leader.send("set a slot's sampling tables", (np.int32(3),))
        leader.close()
        for process in processes:
            assert process.stdout.read().splitlines() == [
                "warm",
                *(f"Bucket(num_tokens=8, num_rows=8, block=1) [[{n}, {n}], [0.5]]" for n in range(200)),
                "4 []",
                "set a slot's sampling tables [3]",
            ]
            assert process.wait(WAIT_S) == 0
        leader.check()


def test_a_process_started_differently_is_refused_by_the_name_of_what_differs():
    words = "process 1 has fact=other and process 0 has same: start all processes with the same"
    with pytest.raises(ConfigError, match=words), _engine(fact="other"):
        pass
    words = "process 1 is there already: every process needs a process_id of its own"
    with pytest.raises(ConfigError, match=words), _engine(num_processes=3, ids=(1, 1)):
        pass


def test_a_killed_process_is_named_though_the_step_never_ends():
    with _engine() as (leader, processes):
        leader.wait_ready()
        processes[0].send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"process 1 (closed the control channel|cannot be heard).*: its last"):
            leader.wait([Never()])
        with pytest.raises(PeerLost, match="process 1"):
            leader.send(4, ())
        told: list[PeerLost] = []
        leader.watch(told.append)
        assert [str(error)[:9] for error in told] == ["process 1"]


def test_a_stopped_process_is_named_and_the_other_ones_end():
    with _engine(num_processes=3, peer_timeout_s=3) as (leader, processes):
        leader.wait_ready()
        told: queue.SimpleQueue[PeerLost] = queue.SimpleQueue()
        leader.watch(told.put)
        processes[1].send_signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"process 2 is silent: .*'(heartbeat|ready)', came .* peer_timeout_s=3;"):
            leader.wait([Never()])
        assert str(told.get(timeout=WAIT_S)).startswith("process 2 is silent")
        leader.close()
        assert processes[0].wait(WAIT_S) == 1
        assert "process 0 has failed: process 2 is silent" in processes[0].stdout.read()


def test_a_failed_launch_ends_the_leader_too():
    with _engine() as (leader, processes):
        leader.wait_ready()
        with pytest.raises(PeerLost, match="process 1 has failed: ValueError: the device is on fire"):
            leader.send("crash", ())  # raises itself if a follower is quick to fail
            leader.wait([Never()])
        assert processes[0].wait(WAIT_S) == 1


def test_followers_end_without_their_leader():
    with _engine() as (leader, processes):
        leader.wait_ready()
        leader._channels[0].close()  # as the kernel does for a process that was killed
        assert processes[0].wait(WAIT_S) == 1
        assert "process 0 closed the control channel" in processes[0].stdout.read()


def test_a_leader_alone_has_nothing_to_do():
    leader = Leader.gather(DistributedConfig(), FACTS)
    leader.wait_ready()
    leader.send(4, ())
    leader.wait([Never()])
    leader.close()
    leader.check()


@pytest.mark.parametrize("address", ["host", ":1234", "host:x", "host:65535", "host:0"])
def test_a_wrong_address_is_a_config_error(address):
    config = DistributedConfig(coordinator_address=address, num_processes=2)
    with pytest.raises(ConfigError, match=f"coordinator_address='{address}' must be host:port of process 0"):
        Leader.gather(config, FACTS)


def test_a_key_file_must_be_there_and_hold_a_secret(tmp_path):
    def config(file: str) -> DistributedConfig:
        return DistributedConfig(coordinator_address="127.0.0.1:9", num_processes=2, process_id=1, key_file=file)

    with pytest.raises(ConfigError, match=r"key_file='/nowhere' cannot be read: No such file"):
        Follower.join(config("/nowhere"), FACTS)
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 bytes: a secret of at least 16 is needed"):
        Follower.join(config(str(tmp_path / "key")), FACTS)


def test_what_must_be_the_same(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")

    def facts(**fields: Any) -> dict[str, str]:
        shared = {"coordinator_address": "h:1", "num_processes": 2}
        distributed = DistributedConfig(**{**shared, **fields.pop("distributed", {})})
        return facts_of(EngineConfig(**{"model": "/m", **fields}, distributed=distributed), tmp_path)

    own = facts()
    assert facts(model="/other", tokenizer="/t", compilation_cache_dir="", distributed={"process_id": 1}) == own
    assert (own["size of model.safetensors"], own["scheduler.max_num_seqs"]) == ("5", "16")
    assert facts(dtype="bfloat16")["dtype"] != own["dtype"]
    (tmp_path / "config.json").write_text("{ }")
    assert {name for name, value in facts().items() if value != own[name]} == {"digest of config.json"}
