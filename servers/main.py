"""`dsjax-serve`: serves a model over gRPC until SIGTERM or SIGINT.  [no jax]

One line on stdout when requests are answered: `dsjax-serve ready on HOST:PORT`. The log, with the resolved
configuration as one line of JSON, is on stderr. Exit code 0 after a drain, 1 if the engine failed, 2 for a wrong flag.

Of an engine with several processes, process 0 does this. The others print `dsjax-serve following HOST:PORT` and do what
it does on their devices, until it has drained (exit code 0) or is lost (1).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags

from dsjax.chat import ChatStrings
from dsjax.config import EngineConfig
from dsjax.errors import ConfigError
from servers import flags as server_flags
from servers.engine_like import EngineLike
from servers.engine_thread import State
from servers.server import Server

log = logging.getLogger("dsjax.server")
PROGRAM = "dsjax-serve"
USAGE = "dsjax-serve [--model=FOLDER] [--port=50051] [--config=NAME] [--set FIELD=VALUE ...]"

MakeEngine = Callable[[EngineConfig], EngineLike]
ReadStrings = Callable[[EngineConfig], ChatStrings]


def make_engine(config: EngineConfig) -> EngineLike:
    from dsjax.engine import Engine  # here, so that a wrong flag is answered before JAX is imported

    return Engine.from_config(config, progress=True)


def read_chat_strings(config: EngineConfig) -> ChatStrings:
    """The fixed chat texts in the model's folder.

    Raises ConfigError, also for a model that is not there and whatever else is wrong with the config at first sight: a
    server listens only then.
    """
    from dsjax.load import check_config, model_dir

    check_config(config)
    return ChatStrings.from_path(model_dir(config.model))


def main(
    argv: Sequence[str] | None = None,
    make_engine: MakeEngine = make_engine,
    read_chat_strings: ReadStrings = read_chat_strings,
) -> int:
    """The console script. Tests pass the functions, to serve a fake engine."""
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv, make_engine, read_chat_strings))


def _main(argv: Sequence[str], make_engine: MakeEngine, read_chat_strings: ReadStrings) -> int:
    values = flags.FlagValues()
    server_flags.define_engine_flags(values)
    server_flags.define_server_flags(values)
    server_flags.parse(values, argv, USAGE)
    engine_config, server_config = server_flags.engine_config(values), server_flags.server_config(values)
    server_flags.log_to_stderr()
    config_json = server_flags.config_json(engine=engine_config, server=server_config)
    log.info("config: %s", config_json)

    if engine_config.distributed.process_id > 0:
        return _follow(engine_config)

    def make_server() -> Server:
        strings = read_chat_strings(engine_config)
        return Server(lambda: make_engine(engine_config), server_config, config_json=config_json, chat_strings=strings)

    code, ended = asyncio.run(_serve(make_server))
    if code or not ended:
        # A daemon thread inside a compilation, or a device that waits for a lost process, breaks an orderly exit.
        _exit_now(code)
    return code


def _exit_now(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _follow(config: EngineConfig) -> int:
    """Runs a process other than 0 to its end; returns the exit code."""
    from dsjax.channel import PeerLost
    from dsjax.load import load_follower

    def fail(error: Exception) -> NoReturn:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        _exit_now(1)

    def on_signal(number: int, frame: object) -> None:
        log.info("%s: process 0 ends this one when it has drained", signal.Signals(number).name)

    try:
        follower, runner = load_follower(config, fail, progress=True)
    except (PeerLost, TimeoutError) as error:  # process 0 is not there, or no more
        fail(error)
    # A signal often goes to all processes at once, and process 0 cannot drain without the others.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        runner.warm_up(progress=True)
        follower.ready()
        print(f"{PROGRAM} following {config.distributed.coordinator_address}", flush=True)
        follower.follow(runner)
        follower.leave()
    except Exception as error:
        log.exception("this process failed")
        follower.leave(error)
        fail(error)
    return 0


async def _serve(make_server: Callable[[], Server]) -> tuple[int, bool]:
    """Returns the exit code and whether the engine thread has ended."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: %s", number.name, "ending at once" if stop.is_set() else "draining")
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    server = make_server()
    await server.start()
    log.info("listening on %s; the engine is loading", server.address)
    try:
        await _first(server.wait_ready(), stop.wait())
    except ConfigError:
        await server.drain(0)
        raise
    except Exception as error:  # the engine thread has logged it
        print(f"{PROGRAM}: error: the engine could not start: {type(error).__name__}: {error}", file=sys.stderr)
        return 1, await server.drain(0)
    if not stop.is_set():
        prepare_interpreter()
        print(f"{PROGRAM} ready on {server.address}", flush=True)
        await stop.wait()
    if server.thread.state in (State.LOADING, State.WARMING):
        return 0, await server.drain(0)
    drain = asyncio.ensure_future(server.drain())
    await _first(asyncio.shield(drain), hurry.wait())
    if not drain.done():
        server.end_streams("a second signal came")
    ended = await drain
    return (1 if server.thread.state is State.FAILED else 0), ended


def prepare_interpreter() -> None:
    """Keeps Python's garbage collector from stopping every stream."""
    gc.collect()
    gc.freeze()  # what is loaded stays: to look through it takes 0.1 s, in which no stream gets a token
    gc.set_threshold(10_000, 10, 10)  # a step makes hundreds of objects, which go without help


async def _first(*awaitables) -> None:
    """Waits for the first to end, cancels the others, raises what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()


if __name__ == "__main__":
    sys.exit(main())
