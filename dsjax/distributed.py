"""Several processes that run one engine: process 0 leads, the others follow.

Process 0 has the scheduler and the server. Whatever changes state on the devices goes through `Runner.launch`, and
process 0 tells the others each launch, in order, before its own; so all run the same programs on the same inputs.

    process 0                                          process n
    Leader.gather   <---- hello: id, facts ----------  Follower.join
                    ----- welcome, or refused ------>
    jax.distributed.initialize                         jax.distributed.initialize
    warm_up         <---- ready ---------------------  warm_up
                    ----- serving ------------------>
    send            ----- launch: key, arrays ------>  follow
    close           ----- end, or failed ----------->
                    <---- bye -----------------------

The control channel is there before JAX's own service and is the first to notice a lost peer: JAX's collectives wait
for a dead process for ever, and its service ends the process without a word to the clients.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from dsjax.channel import START_TIMEOUT_S, WARM_UP_S, Channel, Listener, Message, PeerLost, connect, listen
from dsjax.config import DistributedConfig, EngineConfig
from dsjax.config_fields import field_paths
from dsjax.errors import ConfigError
from dsjax.runner.buckets import Bucket

log = logging.getLogger("dsjax.distributed")

LaunchKey = Bucket | int | str
POLL_S = 0.0005  # how often a running step is asked whether it has ended
# JAX ends a process that misses a peer for so long; a day, as process 0 is to stay up and say that it does not serve.
JAX_HEARTBEAT_S = 86_400
LOCAL_FIELDS = ("model", "tokenizer", "compilation_cache_dir", "distributed.process_id", "distributed.key_file")


class Launcher(Protocol):
    """What a follower uses of a Runner."""

    def warm_up(self, progress: bool = False) -> None: ...
    def launch(self, key: LaunchKey, arrays: tuple[np.ndarray, ...]) -> Any: ...


class Leader:
    """Process 0's view of the others; with no others, every method has nothing to do."""

    def __init__(self, peer_timeout_s: float = 0.0):
        self._peer_timeout_s = peer_timeout_s
        self._channels: list[Channel] = []
        self._state = threading.Condition()
        self._ready: set[str] = set()  # peers, guarded by _state
        self._left: set[str] = set()  # peers that said bye, guarded by _state
        self._lost: PeerLost | None = None  # the first, guarded by _state
        self._watcher: Callable[[PeerLost], None] | None = None  # guarded by _state

    @classmethod
    def gather(cls, config: DistributedConfig, facts: dict[str, str]) -> Leader:
        """Waits for the others. Raises ConfigError if one was started differently, TimeoutError if one is missing."""
        leader = cls(config.peer_timeout_s)
        if config.num_processes == 1:
            return leader
        listener = listen(_address(config), _key(config), config.peer_timeout_s)
        try:
            while len(leader._channels) < config.num_processes - 1:
                leader._admit(listener, facts)
        except TimeoutError as error:
            here = {channel.peer for channel in leader._channels}
            missing = [n for n in range(1, config.num_processes) if f"process {n}" not in here]
            raise TimeoutError(
                f"of num_processes={config.num_processes}, these did not come within {START_TIMEOUT_S:g} s: {missing}; "
                "start them, or correct coordinator_address"
            ) from error
        except ConfigError as error:
            leader.close(error)
            raise
        finally:
            listener.close()
        return leader

    def _admit(self, listener: Listener, facts: dict[str, str]) -> None:
        channel = listener.accept()
        try:
            hello = channel.receive()
            channel.peer = f"process {hello.fields['process_id']}"
            theirs = dict(hello.fields["facts"])
        except (PeerLost, KeyError, TypeError, ValueError) as error:
            log.warning("refused %s, which did not say hello: %s", channel.peer, error)
            channel.close()
            return
        reason = ""
        if channel.peer in (other.peer for other in self._channels):
            reason = f"{channel.peer} is there already: every process needs a process_id of its own"
        for name in sorted(facts.keys() | theirs.keys()):
            if not reason and facts.get(name) != theirs.get(name):
                reason = (
                    f"{channel.peer} has {name}={theirs.get(name)} and process 0 has {facts.get(name)}: start all "
                    "processes with the same flags, checkpoint and versions"
                )
        if reason:
            channel.send("refused", reason=reason)
            channel.close()
            raise ConfigError(reason)
        channel.send("welcome")
        channel.peer_timeout_s = max(WARM_UP_S, self._peer_timeout_s)
        self._channels.append(channel)
        channel.start(lambda message: self._on_message(channel, message), lambda error: self._on_lost(channel, error))

    def _on_message(self, channel: Channel, message: Message) -> None:
        with self._state:
            if message.kind == "ready":
                self._ready.add(channel.peer)
            elif message.kind == "bye":
                self._left.add(channel.peer)
            self._state.notify_all()
        if message.kind == "failed":
            self._on_lost(channel, PeerLost(f"{channel.peer} has failed: {message.fields.get('reason')}"))

    def _on_lost(self, channel: Channel, error: PeerLost) -> None:
        with self._state:
            if self._lost is not None or channel.peer in self._left:
                return
            log.error("%s", error)
            self._lost, watcher = error, self._watcher
            self._state.notify_all()
        if watcher is not None:
            watcher(error)

    def watch(self, watcher: Callable[[PeerLost], None]) -> None:
        """`watcher` is called once when a process is lost, on another thread: the one in a step may never return."""
        with self._state:
            self._watcher, lost = watcher, self._lost
        if lost is not None:
            watcher(lost)

    def check(self) -> None:
        """Raises PeerLost if a process is lost."""
        if self._lost is not None:
            raise self._lost

    def wait_ready(self) -> None:
        """Returns when every process has warmed up. Raises PeerLost."""
        with self._state:
            self._state.wait_for(lambda: self._lost or len(self._ready) == len(self._channels))
        self.check()
        for channel in self._channels:
            channel.peer_timeout_s = self._peer_timeout_s
            channel.send("serving")

    def send(self, key: LaunchKey, arrays: tuple[np.ndarray, ...]) -> None:
        """Tells the others what process 0 launches next. Raises PeerLost."""
        self.check()
        for channel in self._channels:
            try:
                channel.send("launch", arrays, key=astuple(key) if isinstance(key, Bucket) else key)
            except PeerLost as error:
                self._on_lost(channel, error)
        self.check()

    def wait(self, outputs: Any) -> None:
        """Returns when all arrays of a tree are computed. Raises PeerLost, although a collective may wait for ever."""
        if not self._channels:
            return
        leaves = jax.tree.leaves(outputs)
        while not all(leaf.is_ready() for leaf in leaves):
            self.check()
            time.sleep(POLL_S)
        try:
            jax.block_until_ready(leaves)
        except Exception:
            with self._state:  # the collective may have noticed first; the channel knows who it was
                self._state.wait_for(lambda: self._lost, self._peer_timeout_s)
            self.check()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Ends the others: in order, after all launches, or as failed if `error` or a lost process is why."""
        error = error or self._lost
        for channel in self._channels:
            try:
                if error is None:
                    channel.send("end")
                else:
                    channel.send("failed", reason=str(error))
            except PeerLost as lost:
                log.warning("%s", lost)
        if error is None and self._channels:
            with self._state:
                ended = self._state.wait_for(
                    lambda: self._lost or len(self._left) == len(self._channels), self._peer_timeout_s
                )
            if ended and not self._lost:
                jax.distributed.shutdown()
            else:
                log.warning("%s", self._lost or "a process did not say bye")
        for channel in self._channels:
            channel.close()
        self._channels = []


class Follower:
    """What a process other than 0 knows: its channel to process 0, and the launches that are due."""

    def __init__(self, channel: Channel, on_lost: Callable[[PeerLost], None] | None = None):
        """`on_lost` is called on the channel's thread, since the main one may wait for a device for ever."""
        self.channel = channel
        self._peer_timeout_s = channel.peer_timeout_s
        channel.peer_timeout_s = max(WARM_UP_S, channel.peer_timeout_s)
        self._due: queue.SimpleQueue[Message | PeerLost] = queue.SimpleQueue()
        self._on_lost = on_lost or self._due.put
        channel.start(self._on_message, self._on_lost)

    @classmethod
    def join(
        cls, config: DistributedConfig, facts: dict[str, str], on_lost: Callable[[PeerLost], None] | None = None
    ) -> Follower:
        """Connects to process 0. Raises ConfigError if it refuses this process, TimeoutError if it is not there."""
        channel = connect(_address(config), _key(config), config.peer_timeout_s)
        channel.send("hello", process_id=config.process_id, facts=facts)
        answer = channel.receive()
        if answer.kind != "welcome":
            channel.close()
            raise ConfigError(str(answer.fields.get("reason")))
        return cls(channel, on_lost)

    def _on_message(self, message: Message) -> None:
        if message.kind == "failed":
            self._on_lost(PeerLost(f"process 0 has failed: {message.fields.get('reason')}"))
        elif message.kind == "serving":
            self.channel.peer_timeout_s = self._peer_timeout_s
        else:
            self._due.put(message)

    def follow(self, runner: Launcher) -> None:
        """Launches what process 0 launches, until it ends this process. Call after `ready`.

        Raises PeerLost, and whatever a launch or a step on a device of this process raises.
        """
        running: deque[Any] = deque()  # outputs of launches, looked at for errors only
        while True:
            try:
                message = self._due.get(timeout=0.1 if running else None)
            except queue.Empty:
                message = None
            while running and all(leaf.is_ready() for leaf in jax.tree.leaves(running[0])):
                jax.block_until_ready(running.popleft())
            if isinstance(message, PeerLost):
                raise message
            if message is None:
                continue
            if message.kind == "end":
                jax.block_until_ready(list(running))
                return
            key = message.fields["key"]
            running.append(runner.launch(Bucket(*key) if isinstance(key, list) else key, message.arrays))

    def ready(self) -> None:
        """Tells process 0 that this one is warm."""
        self.channel.send("ready")

    def leave(self, error: BaseException | None = None) -> None:
        """Says goodbye to process 0, or what went wrong here."""
        if error is None:
            self.channel.send("bye")
            jax.distributed.shutdown()
        else:
            try:
                self.channel.send("failed", reason=f"{type(error).__name__}: {error}")
            except PeerLost as lost:
                log.warning("%s", lost)
        self.channel.close()


def initialize(config: DistributedConfig) -> None:
    """Joins this process's devices with the others'. The first use of JAX in a process; nothing for one alone."""
    if config.num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which drains the server
    jax.distributed.initialize(
        coordinator_address=config.coordinator_address,
        coordinator_bind_address=config.coordinator_address,  # JAX's default is every interface
        num_processes=config.num_processes,
        process_id=config.process_id,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=JAX_HEARTBEAT_S,
    )


def facts_of(config: EngineConfig, folder: Path) -> dict[str, str]:
    """What must be the same in all processes, by the name that an error gives it."""
    facts = {name: str(value) for name, value in field_paths(config).items() if name not in LOCAL_FIELDS}
    facts |= {f"version of {name}": importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    facts["digest of config.json"] = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    for file in sorted(folder.glob("*.safetensors")):
        facts[f"size of {file.name}"] = str(file.stat().st_size)
    return facts


def _address(config: DistributedConfig) -> tuple[str, int]:
    """The control channel's: the port after JAX's own."""
    host, _, port = config.coordinator_address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError(
            f"coordinator_address={config.coordinator_address!r} must be host:port of process 0, the port in [1, 65534]"
        )
    return host.strip("[]"), int(port) + 1


def _key(config: DistributedConfig) -> bytes:
    """What a peer must know: the content of key_file; without one the address, which keeps out mistakes only."""
    if not config.key_file:
        return config.coordinator_address.encode()
    try:
        key = Path(config.key_file).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key_file={config.key_file!r} cannot be read: {error.strerror}") from error
    if len(key) < 16:
        raise ConfigError(f"key_file={config.key_file!r} has {len(key)} bytes: a secret of at least 16 is needed")
    return key
