"""The control channel between process 0 and another one: ordered messages, and notice of a peer that is gone.  [no jax]

A message is a JSON object and any number of arrays. Nothing that arrives is ever executed, as a pickle would be:

    4 bytes: size of the JSON | {"number": n, "kind": ..., "arrays": [[dtype, shape], ...], ...} | array | array ...

TCP keeps messages in order; the number, counted by both ends, proves it. Either end sends a heartbeat when it has
nothing else to say, so silence means that the peer's process or machine has died, hangs or is stopped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge  # pyright: ignore
from typing import Any, NamedTuple

import numpy as np

from dsjax.errors import ConfigError

log = logging.getLogger("dsjax.channel")

# Of peer_timeout_s: silence for so long is a loss, so that whoever waits has the error within peer_timeout_s.
SILENCE = 0.9
LOOK = 0.1  # of peer_timeout_s: how often a silent peer's time is looked at
BEAT = 0.2  # of peer_timeout_s: how often a heartbeat is sent
MAX_MESSAGE_BYTES = 1 << 30
START_TIMEOUT_S = 300.0  # for the processes of an engine to find each other
WARM_UP_S = 60.0  # peer_timeout_s at least until all are warm: tracing programs can keep Python from its heartbeats
RETRY_S = 0.2  # between attempts to reach a process 0 that does not listen yet


class PeerLost(RuntimeError):
    """A process of this engine has died, hangs or has failed, so no step can end any more."""


class Message(NamedTuple):
    kind: str
    fields: dict[str, Any]
    arrays: tuple[np.ndarray, ...]


class Channel:
    """One connection. `send` may be called from any thread; `receive` is for the handshake, then `start` takes over."""

    def __init__(self, connection: Connection, peer: str, peer_timeout_s: float):
        self.peer = peer  # as errors name it, e.g. "process 1"
        self.peer_timeout_s = peer_timeout_s  # may be changed at any time; the heartbeats stay as they are
        self._beat_s, self._look_s = BEAT * peer_timeout_s, LOOK * peer_timeout_s
        self._connection = connection
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._last_kind, self._last_s = "connecting", time.monotonic()

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[PeerLost], None]) -> None:
        """Begins heartbeats. Both functions are called on the channel's own thread, `on_lost` once, if ever."""

        def listen() -> None:
            while not self._closed.is_set():
                try:
                    message = self.receive()
                except PeerLost as error:
                    if not self._closed.is_set():
                        self.close()
                        on_lost(error)
                    return
                if message.kind != "heartbeat":
                    on_message(message)

        def beat() -> None:
            try:
                while not self._closed.wait(self._beat_s):
                    self.send("heartbeat")
            except PeerLost:
                pass  # `listen` finds the same and says so

        for function in (listen, beat):
            threading.Thread(target=function, name=f"dsjax-{function.__name__}-{self.peer}", daemon=True).start()

    def send(self, kind: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> None:
        """Sends one message; `fields` must be JSON. Raises PeerLost if the peer is gone or does not take it in time."""
        with self._sending:
            data = encode(self._num_sent, Message(kind, fields, tuple(arrays)))
            self._num_sent += 1
            try:
                self._connection.send_bytes(data)
            except OSError as error:
                self._hang_up()  # part of a message may be on its way: nothing can follow it
                raise self._lost(f"does not take messages ({error})") from error

    def receive(self) -> Message:
        """The next message. Raises PeerLost for a closed, silent or garbled channel."""
        try:
            while not self._connection.poll(self._look_s):
                silent_s = time.monotonic() - self._last_s
                # What came while this process itself was stopped counts.
                if silent_s > SILENCE * self.peer_timeout_s and not self._connection.poll():
                    raise self._lost("is silent")
            data = self._connection.recv_bytes(MAX_MESSAGE_BYTES)
        except EOFError as error:
            raise self._lost("closed the control channel") from error
        except BlockingIOError as error:  # the socket's own timeout
            raise self._lost("has stopped inside a message") from error
        except OSError as error:
            raise self._lost(f"cannot be heard ({error})") from error
        try:
            number, message = decode(data)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise self._lost(f"sent what is no message ({error})") from error
        if number != self._num_received:
            raise self._lost(f"sent message {number} where {self._num_received} was due")
        self._num_received += 1
        self._last_kind, self._last_s = message.kind, time.monotonic()
        return message

    def close(self) -> None:
        """Ends the channel; the peer reads what was sent, then the end."""
        self._closed.set()
        self._hang_up()

    def _hang_up(self) -> None:
        handle = socket.socket(fileno=self._connection.fileno())
        with contextlib.suppress(OSError):  # the peer may have been faster
            handle.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which closing the file would not
        handle.detach()  # the connection owns the file

    def _lost(self, what: str) -> PeerLost:
        silent_s = time.monotonic() - self._last_s
        return PeerLost(
            f"{self.peer} {what}: its last message, {self._last_kind!r}, came {silent_s:.1f} s ago, and "
            f"peer_timeout_s={self.peer_timeout_s:g}; restart all processes of the engine"
        )


def encode(number: int, message: Message) -> bytes:
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    header = {
        **message.fields,
        "number": number,
        "kind": message.kind,
        "arrays": [[array.dtype.str, array.shape] for array in arrays],
    }
    text = json.dumps(header).encode()
    return b"".join([struct.pack("!I", len(text)), text, *(array.tobytes() for array in arrays)])


def decode(data: bytes) -> tuple[int, Message]:
    """(number, message). Raises ValueError, KeyError, TypeError or struct.error for anything malformed."""
    (size,) = struct.unpack_from("!I", data)
    at = 4 + size
    header = json.loads(data[4:at])
    number, kind, arrays = header.pop("number"), header.pop("kind"), []
    for name, shape in header.pop("arrays"):
        dtype = np.dtype(name)
        if dtype.kind not in "biuf":
            raise ValueError(f"an array of {dtype}")
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    if at != len(data):
        raise ValueError(f"{len(data)} bytes where {at} were announced")
    return number, Message(kind, header, tuple(arrays))


def listen(address: tuple[str, int], key: bytes, peer_timeout_s: float) -> Listener:
    """Opens process 0's end. Raises ConfigError if the address is not one of this machine or is taken."""
    host, port = address
    try:
        family, *_, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(resolved[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"the control channel cannot listen on {host}:{port}, the port after coordinator_address' ({error}): "
            "coordinator_address must be an address of process 0's machine with two free ports in a row"
        ) from error
    return Listener(server, key, peer_timeout_s)


class Listener:
    """Process 0's end before its peers have come."""

    def __init__(self, server: socket.socket, key: bytes, peer_timeout_s: float):
        self._server, self._key, self._peer_timeout_s = server, key, peer_timeout_s
        self._end_s = time.monotonic() + START_TIMEOUT_S

    def accept(self) -> Channel:
        """The next peer that knows the key. Raises TimeoutError when none came START_TIMEOUT_S after the start."""
        while True:
            self._server.settimeout(max(0.001, self._end_s - time.monotonic()))
            connected, (host, *_) = self._server.accept()
            connection = _open(connected, self._peer_timeout_s)
            channel = Channel(connection, f"a process on {host}", self._peer_timeout_s)
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            except (AuthenticationError, EOFError, OSError) as error:
                log.warning("refused a connection from %s, which does not know the key: %r", host, error)
                connection.close()
            else:
                return channel

    def close(self) -> None:
        self._server.close()


def connect(address: tuple[str, int], key: bytes, peer_timeout_s: float) -> Channel:
    """Another process's end; waits for process 0 to listen.

    Raises ConfigError when process 0 refuses the key, TimeoutError when it is not there after START_TIMEOUT_S.
    """
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            connected = socket.create_connection(address, timeout=peer_timeout_s)
            if connected.getsockname() == connected.getpeername():  # TCP can join a free local port to itself
                connected.close()
                raise ConnectionRefusedError("nobody listens")
            break
        except OSError as error:
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"process 0 did not listen on {address[0]}:{address[1]} within {START_TIMEOUT_S:g} s ({error}): "
                    "start it, or correct coordinator_address"
                ) from error
            time.sleep(RETRY_S)
    connection = _open(connected, peer_timeout_s)
    channel = Channel(connection, "process 0", peer_timeout_s)
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError) as error:
        connection.close()
        raise ConfigError(
            f"process 0 at {address[0]}:{address[1]} has another key: key_file must hold the same for all processes, "
            f"and coordinator_address be written alike ({error!r})"
        ) from error
    return channel


def _open(connected: socket.socket, peer_timeout_s: float) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds, micros = divmod(round(SILENCE * peer_timeout_s * 1e6), 1_000_000)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # of one read or write, so that neither waits for ever
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, micros))
    return Connection(connected.detach())
