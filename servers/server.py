"""The server of one engine: socket, health, reflection, and an orderly end.  [no jax]

LOADING -> WARMING -> SERVING -> draining -> closed       health is SERVING in the state of that name alone;
                 \\-> FAILED <-/                            an engine that failed leaves the server up to say so
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.metadata
import logging
import socket
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dsjax.chat import ChatStrings
from dsjax.errors import ConfigError, ErrorCode, RequestError
from servers.engine_like import EngineLike
from servers.engine_thread import EngineThread, State
from servers.flags import ServerConfig
from servers.inference_service import SERVICE_NAME, InferenceService
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc

log = logging.getLogger("dsjax.server")

# After its last message a call still has to send its status; connections are closed at the latest then.
FLUSH_S = 1.0
ENGINE_STOP_S = 5.0  # longer than any step; loading and compiling take longer and are abandoned
DISK_STOP_S = 120.0  # with a cache on disk: what is on the device is written there at the end


def channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    """gRPC's options. Its own receive limit is 4 times ours, so that a message a little too large reaches the handler,
    which names the flag; gRPC's error would not."""
    return [
        ("grpc.max_receive_message_length", min(4 * config.max_message_bytes, (1 << 31) - 1)),
        ("grpc.max_send_message_length", -1),  # the handler has checked
        ("grpc.keepalive_time_ms", config.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", config.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(config.keepalive_permit_without_calls)),
        ("grpc.http2.min_ping_interval_without_data_ms", config.min_ping_interval_without_data_ms),
        ("grpc.http2.max_ping_strikes", config.max_ping_strikes),
        ("grpc.so_reuseport", 0),  # otherwise a second server takes the same port without an error
    ]


class Server:
    """Made and used on one event loop: `start`, `wait_ready`, `drain`."""

    def __init__(
        self,
        make_engine: Callable[[], EngineLike],
        config: ServerConfig,
        *,
        config_json: str = "{}",
        chat_strings: ChatStrings | None = None,
    ):
        self.config = config
        self.port = 0  # the bound one, after `start`
        self.thread = EngineThread(
            make_engine, progress=True, max_messages_per_s=config.max_messages_per_s, on_state=self._on_state
        )
        self.service = InferenceService(
            self.thread,
            config,
            config_json=config_json,
            chat_strings=chat_strings or ChatStrings(),
            version=_version(),
        )
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._server: grpc.aio.Server = grpc.aio.server(options=channel_options(config))
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> None:
        """Binds the port (ConfigError if it cannot), serves health at once, and begins to load the engine."""
        pb_grpc.add_InferenceServicer_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            _try_to_bind(self.config.host, self.config.port)
            self.port = self._server.add_insecure_port(f"{self._host}:{self.config.port}")
        except (OSError, RuntimeError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise ConfigError(
                f"host={self.config.host!r}, port={self.config.port} cannot be listened on: it is in use, no address "
                "of this machine or not allowed; choose another --port (0 picks a free one) or --host"
            ) from error
        await self._server.start()
        self.thread.start()

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    @property
    def _host(self) -> str:
        host = self.config.host
        return f"[{host}]" if ":" in host else host

    async def wait_ready(self) -> None:
        """Returns when the engine is warm and health SERVING. Raises what loading raised."""
        await self.thread.wait_ready()
        await self._settle()

    async def drain(self, grace_period_s: float | None = None) -> bool:
        """Shuts down: health first, then no new requests, then live calls and jobs finish, or are ended after the
        grace period.

        Returns False when the engine thread did not end in time, so that the process must not wait for it.
        """
        grace_s = self.config.grace_period_s if grace_period_s is None else grace_period_s
        await self._settle()
        await self._health.enter_graceful_shutdown()
        self.service.drain()
        if not await _within(self.service.requests.idle, grace_s):
            self.end_streams(f"grace_period_s={grace_s} was over")
            await _within(self.service.requests.idle, FLUSH_S)  # longer only for a client that does not read
        await self._server.stop(FLUSH_S)
        self.service.requests.close()
        return await self.thread.stop(self._stop_s())

    def _stop_s(self) -> float:
        """How long the engine may take to end."""
        state = self.thread.state
        if state in (State.LOADING, State.WARMING):
            return 0.0
        has_disk = state is State.SERVING and self.thread.engine.config.tiers.disk_cache_dir
        return DISK_STOP_S if has_disk else ENGINE_STOP_S

    def end_streams(self, why: str) -> None:
        """Ends every live call and job with UNAVAILABLE."""
        message = f"the server shut down before the answer was complete: {why}"
        self.service.end_all(RequestError(ErrorCode.UNAVAILABLE, message))

    def _on_state(self, state: State) -> None:
        log.info("the engine is %s", state.value)
        serving = state is State.SERVING
        response = health_pb2.HealthCheckResponse
        task = asyncio.ensure_future(self._set_health(response.SERVING if serving else response.NOT_SERVING))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def _settle(self) -> None:
        """Waits until health says what the state is."""
        if self._tasks:
            await asyncio.wait(self._tasks)


def _try_to_bind(host: str, port: int) -> None:
    """Raises OSError if no address of `host` can be bound: gRPC would write lines of its own to stderr first."""
    errors: list[OSError] = []
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                trial.bind(address)
            return
        except OSError as error:
            errors.append(error)
    if all(error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES) for error in errors):
        raise errors[0]
    # gRPC knows ways around what is left, such as :: on a machine without IPv6


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


def _version() -> str:
    try:
        return importlib.metadata.version("dsjax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"
