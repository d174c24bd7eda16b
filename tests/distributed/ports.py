"""Ports for the processes of an engine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port that is free, and the one after it is too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
