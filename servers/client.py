"""`dsjax-client`: sends a prompt to a server and streams the answer to the terminal.  [no jax]

The prompt is the words on the command line, or else stdin; with neither, on a terminal, a conversation is held.
The answer goes to stdout, everything else (--usage, --logprobs) to stderr. Exit code 0, 1 if the call failed, 2 for a
wrong flag or a prompt that is not UTF-8, 130 after Ctrl-C (which cancels the request).

With --submit the prompt becomes a job, whose id is printed; --result=ID waits for a job's end and prints its answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from absl import flags
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dsjax.errors import ConfigError, RequestError
from servers import convert
from servers import flags as server_flags
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from servers.screen import Logprobs, Screen, print_usage

PROGRAM = "dsjax-client"
USAGE = (
    "dsjax-client [--address=HOST:PORT] [--chat] [--max_tokens=N] [--submit] PROMPT...  |  dsjax-client --result=JOB"
)
MAX_TIMEOUT_S = 1e8  # three years; gRPC takes ten times as much
POLL_S = 30.0  # how long the server holds a question for a result


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What the flags say besides the sampling parameters."""

    address: str
    chat: bool
    system: str
    thinking: bool
    reasoning_effort: str | None
    timeout_s: float | None
    wait_s: float
    max_message_bytes: int
    usage: bool
    priority: int
    tenant: str
    session_id: str
    interactive_timeout_s: float
    submit: bool
    result: str | None

    def __post_init__(self):
        if self.timeout_s is not None and not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s={self.timeout_s} must be in (0, {MAX_TIMEOUT_S:g}], or absent")
        if not 0 <= self.wait_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"wait_s={self.wait_s} must be in [0, {MAX_TIMEOUT_S:g}]")
        if not 1024 <= self.max_message_bytes < 1 << 31:
            raise ConfigError(f"max_message_bytes={self.max_message_bytes} must be in [1024, {(1 << 31) - 1}]")
        for name in ("system", "thinking", "reasoning_effort"):
            if getattr(self, name) and not self.chat:
                raise ConfigError(f"{name}={getattr(self, name)!r} needs --chat")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    _define_flags(values)
    words = server_flags.parse(values, argv, USAGE, positional=True)
    for number, arg in enumerate(argv):
        convert.check_text(
            f"argument {number}, {arg[:40]!r},", arg
        )  # Python keeps a byte that is not UTF-8 as a surrogate
    config = ClientConfig(**{name: server_flags.value_of(values, name) for name in ClientConfig.__dataclass_fields__})
    if config.result is not None:
        _check_result_alone(values, words)
    params = convert.sampling_params_message(server_flags.sampling_params(values))
    _request(config, params, [pb.ChatMessage()])  # a wrong flag is said before a server is asked
    options = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # checked below, with an error that names the flag
    ]
    with grpc.insecure_channel(config.address, options=options) as channel:
        try:
            if config.wait_s:
                _wait(channel, config.wait_s)
            if config.result is not None:
                return _result(channel, config)
            if not words and sys.stdin.isatty() and not config.submit:
                return _converse(channel, config, params)
            prompt = " ".join(words) if words else _read(sys.stdin.read)
            messages = [pb.ChatMessage(role="user", content=prompt)]
            if config.submit:
                request = _request(config, params, messages)
                print(pb_grpc.InferenceStub(channel).Submit(request, timeout=config.timeout_s).job_id)
            else:
                _answer(channel, config, params, messages)
            return 0
        except grpc.RpcError as error:
            print(f"{PROGRAM}: error: {_sentence(error, config)}", file=sys.stderr)
            return 1


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("address", f"localhost:{server_flags.DEFAULT_PORT}", "HOST:PORT", flag_values=values)
    flags.DEFINE_boolean("chat", False, "send chat messages; off, the model continues the text", flag_values=values)
    flags.DEFINE_string("system", "", "system message of a chat", flag_values=values)
    flags.DEFINE_boolean("thinking", False, "let a chat reason first", flag_values=values)
    flags.DEFINE_string(
        "reasoning_effort",
        None,
        "low, high or max, of a chat with --thinking; without it, it changes nothing",
        flag_values=values,
    )
    flags.DEFINE_float("timeout_s", None, "deadline of each call", flag_values=values)
    flags.DEFINE_float("wait_s", 0.0, "wait up to so long for the server to be ready", flag_values=values)
    flags.DEFINE_integer(
        "max_message_bytes", server_flags.DEFAULT_MAX_MESSAGE_BYTES, "largest message", flag_values=values
    )
    flags.DEFINE_boolean("usage", False, "print token counts and the finish reason to stderr", flag_values=values)
    flags.DEFINE_integer("priority", 0, "-16 to 15; lower goes first, if the server heeds it", flag_values=values)
    flags.DEFINE_string("tenant", "", "whose limits and weight count", flag_values=values)
    flags.DEFINE_string("session_id", "", "a conversation, whose next turn begins with this one", flag_values=values)
    flags.DEFINE_float(
        "interactive_timeout_s", 0.0, "an answer that takes longer becomes a job; 0 is no limit", flag_values=values
    )
    flags.DEFINE_boolean("submit", False, "make the prompt a job and print its id", flag_values=values)
    flags.DEFINE_string("result", None, "wait for this job, at most --timeout_s, and print it", flag_values=values)
    server_flags.define_sampling_flags(values)


def _check_result_alone(values: flags.FlagValues, words: Sequence[str]) -> None:
    """Raises ConfigError for what --result would ignore."""
    what = f"result={server_flags.value_of(values, 'result')!r}"
    if words:
        raise ConfigError(f"{what} takes no prompt, such as {words[0]!r}: a job's is already known")
    heeded = ("address", "timeout_s", "wait_s", "max_message_bytes", "usage", "result")
    other = next((name for name in values if values[name].present and name not in heeded), None)
    if other is not None:
        raise ConfigError(f"{what} goes with {', '.join(heeded[:-1])}, not with --{other}")


def _read(read: Callable[[], str]) -> str:
    """What stdin holds. Raises ConfigError if it is not UTF-8."""
    try:
        text = read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not valid UTF-8: see byte {error.start}") from error
    convert.check_text("stdin", text)
    return text


def _wait(channel: grpc.Channel, wait_s: float) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=wait_s, wait_for_ready=True)
    for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            watch.cancel()
            return


def _converse(channel: grpc.Channel, config: ClientConfig, params: pb.SamplingParams) -> int:
    """Reads turns from the terminal until it ends; earlier turns are sent along in a chat."""
    messages: list[pb.ChatMessage] = []
    while True:
        try:
            turn = _read(lambda: input("> "))
        except EOFError:
            print(file=sys.stderr)
            return 0
        if not turn:
            continue
        if not config.chat:
            messages = []
        messages.append(pb.ChatMessage(role="user", content=turn))
        try:
            messages.append(_answer(channel, config, params, messages))
        except (grpc.RpcError, RequestError) as error:
            messages.pop()
            sentence = str(error) if isinstance(error, RequestError) else _sentence(error, config)
            print(f"{PROGRAM}: error: {sentence}", file=sys.stderr)


def _request(config: ClientConfig, params: pb.SamplingParams, messages: Sequence[pb.ChatMessage]) -> pb.GenerateRequest:
    """Raises RequestError if it is too large, or a field is wrong."""
    convert.check_priority(config.priority)
    request = pb.GenerateRequest(
        sampling_params=params,
        stream=True,
        priority=config.priority,
        tenant=config.tenant,
        session_id=config.session_id,
        interactive_timeout_s=config.interactive_timeout_s,
    )
    if config.chat:
        request.chat.thinking_mode = pb.THINKING_MODE_THINKING if config.thinking else pb.THINKING_MODE_CHAT
        if config.reasoning_effort is not None:
            request.chat.reasoning_effort = config.reasoning_effort
        if config.system:
            request.chat.messages.add(role="system", content=config.system)
        request.chat.messages.extend(messages)
    else:
        request.text = messages[-1].content
    convert.check_request(request)
    convert.check_size(request, config.max_message_bytes, "request", "send a shorter prompt")
    return request


def _result(channel: grpc.Channel, config: ClientConfig) -> int:
    """Prints a job's answer at its end, or what there is of it after --timeout_s; returns the exit code."""
    stub, end_s = (
        pb_grpc.InferenceStub(channel),
        None if config.timeout_s is None else time.monotonic() + config.timeout_s,
    )
    while True:
        wait_s = POLL_S if end_s is None else min(POLL_S, max(0.0, end_s - time.monotonic()))
        result = stub.GetResult(pb.GetResultRequest(job_id=config.result, wait_s=wait_s))
        ended = result.state in (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED)
        if ended or (end_s is not None and time.monotonic() >= end_s):
            break
    screen, logprobs = Screen(len(result.response.outputs)), Logprobs()
    logprobs.add(result.response)
    for output in result.response.outputs:
        screen.show(output, output.HasField("chat"), whole=True)
        if output.finish_reason and config.usage:
            print_usage(result.response, output)
    screen.end()
    logprobs.show()
    if result.state == pb.JOB_STATE_FAILED:
        print(f"{PROGRAM}: error: {result.error_code}: {result.error_message}", file=sys.stderr)
    elif not ended:
        print(f"{PROGRAM}: job {config.result} goes on: this is its answer so far", file=sys.stderr)
    return 0 if result.state == pb.JOB_STATE_DONE else 1


def _answer(
    channel: grpc.Channel, config: ClientConfig, params: pb.SamplingParams, messages: Sequence[pb.ChatMessage]
) -> pb.ChatMessage:
    """Streams the answer to stdout; returns it as a message (the first of n)."""
    request = _request(config, params, messages)
    call = pb_grpc.InferenceStub(channel).Generate(request, timeout=config.timeout_s)
    screen, logprobs, answer = Screen(params.n), Logprobs(), pb.ChatMessage(role="assistant")
    try:
        for response in call:
            logprobs.add(response)
            for output in response.outputs:
                screen.show(output, config.chat)
                if output.index == 0:
                    answer.content += output.chat.content if config.chat else output.text
                    answer.reasoning_content += output.chat.reasoning_content
                    answer.tool_calls.extend(output.chat.tool_calls)
                if output.finish_reason and config.usage:
                    print_usage(response, output)
    except KeyboardInterrupt:
        call.cancel()
        raise
    finally:
        screen.end()
        logprobs.show()
    return answer


def _sentence(error: grpc.RpcError, config: ClientConfig) -> str:
    code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        details += f": raise --max_message_bytes={config.max_message_bytes}"
    if job_id := dict(error.trailing_metadata() or ()).get("job-id"):  # type: ignore[attr-defined]
        details += f" with {PROGRAM} --result={job_id}"
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details:
        details = f"no server answers at {config.address}: start dsjax-serve, or set --address ({details})"
    return f"{code.name}: {details}"


if __name__ == "__main__":
    sys.exit(main())
