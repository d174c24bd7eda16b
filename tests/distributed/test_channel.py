"""The control channel between two threads: what arrives, what is refused, and how a lost peer is told."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from dsjax.channel import Channel, Message, PeerLost, connect, decode, encode, listen
from dsjax.errors import ConfigError
from tests.distributed.ports import free_port

WAIT_S = 30.0  # for what must happen; far more than it takes
SHORT_S = 0.3  # a peer_timeout_s where the test is about running out of it


def test_a_message_comes_back_as_it_was():
    arrays = (np.arange(6, dtype=np.int32).reshape(2, 3), np.float32(0.1), np.zeros((0, 4), np.float32))
    number, message = decode(encode(7, Message("launch", {"key": [8, 8, 1]}, arrays)))
    assert (number, message.kind, message.fields) == (7, "launch", {"key": [8, 8, 1]})
    assert [(a.dtype, a.shape) for a in message.arrays] == [("int32", (2, 3)), ("float32", ()), ("float32", (0, 4))]
    assert message.arrays[0].tolist() == [[0, 1, 2], [3, 4, 5]] and message.arrays[1] == np.float32(0.1)


def _raw(header: dict[str, Any], rest: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("!I", len(text)) + text + rest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\2[]",
        _raw({"number": 0, "kind": "x"}),
        _raw({"number": 0, "kind": "x", "arrays": []}, b"more"),
        _raw({"number": 0, "kind": "x", "arrays": [["<i4", [2]]]}, b"1234"),
        _raw({"number": 0, "kind": "x", "arrays": [["|O", [1]]]}, b"12345678"),
        _raw({"number": 0, "kind": "x", "arrays": [["<i4", [-1]]]}, b""),
    ],
)
def test_what_is_no_message_is_an_error(data):
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, struct.error)):
        decode(data)
    channel, other = _ends()
    other.send_bytes(data)
    with pytest.raises(PeerLost, match="the peer sent what is no message"):
        channel.receive()


def _ends(peer_timeout_s: float = WAIT_S) -> tuple[Channel, Connection]:
    """A channel, and the bare other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    from dsjax.channel import _open

    return Channel(_open(near, peer_timeout_s), "the peer", peer_timeout_s), Connection(far.detach())


@pytest.mark.parametrize(
    ("numbers", "words"), [([1], "message 1 where 0"), ([0, 0], "0 where 1"), ([0, 2], "2 where 1")]
)
def test_a_gap_or_a_repeat_is_an_error(numbers, words):
    channel, other = _ends()
    for number in numbers:
        other.send_bytes(encode(number, Message("x", {}, ())))
    with pytest.raises(PeerLost, match=words):
        for _ in numbers:
            channel.receive()


def test_a_peer_that_is_silent_or_closes_is_lost():
    channel, other = _ends(SHORT_S)
    with pytest.raises(PeerLost, match=r"the peer is silent: its last message, 'connecting', came .* ago, and peer"):
        channel.receive()
    other.close()
    with pytest.raises(PeerLost, match="the peer closed the control channel"):
        channel.receive()


def test_a_peer_that_does_not_read_is_lost():
    channel, _other = _ends(SHORT_S)
    with pytest.raises(PeerLost, match="the peer does not take messages"):
        channel.send("launch", (np.zeros(1 << 25, np.uint8),))


def test_started_channels_keep_the_order_and_tell_the_end():
    channel, other = _ends()
    peer = Channel(other, "the channel", WAIT_S)
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()
    channel.start(got.put, got.put)
    for number in range(100):
        peer.send("launch", (np.int32(number),))
    assert [int(got.get(timeout=WAIT_S).arrays[0]) for _ in range(100)] == list(range(100))
    peer.close()
    assert "the peer closed the control channel" in str(got.get(timeout=WAIT_S))


def test_heartbeats_come_where_nothing_is_said():
    channel, other = _ends(SHORT_S)
    peer = Channel(other, "the channel", WAIT_S)
    channel.start(lambda message: None, lambda error: None)
    assert [peer.receive().kind for _ in range(3)] == ["heartbeat"] * 3
    channel.close()


@contextlib.contextmanager
def _listening(key: bytes) -> Iterator[tuple[tuple[str, int], queue.SimpleQueue]]:
    """The address of a listener that accepts one peer, and where it puts the channel."""
    address, accepted = ("127.0.0.1", free_port()), queue.SimpleQueue()
    listener = listen(address, key, WAIT_S)
    thread = threading.Thread(target=lambda: accepted.put(listener.accept()))
    thread.start()
    try:
        yield address, accepted
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        listener.close()


def test_only_who_knows_the_key_is_let_in():
    with _listening(b"right") as (address, accepted):
        with pytest.raises(ConfigError, match="has another key: key_file must hold the same for all processes"):
            connect(address, b"wrong", WAIT_S)
        peer = connect(address, b"right", WAIT_S)
        peer.send("hello", id=1)
        assert accepted.get(timeout=WAIT_S).receive() == ("hello", {"id": 1}, ())


def test_an_address_that_cannot_be_listened_on_is_a_config_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}, the port after coordinator_add"):
            listen(("127.0.0.1", port), b"key", WAIT_S)


def test_a_shorter_timeout_also_ends_a_wait_that_has_begun():
    channel, _other = _ends()
    channel._look_s = SHORT_S
    timer = threading.Timer(SHORT_S, lambda: setattr(channel, "peer_timeout_s", SHORT_S))
    timer.start()
    with pytest.raises(PeerLost, match="the peer is silent"):
        channel.receive()
    timer.join()
