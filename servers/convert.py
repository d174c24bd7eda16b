"""Between the protocol's messages and dsjax's own types; no state, no I/O.  [no jax]"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from dsjax.errors import ErrorCode, RequestError, invalid, shown
from dsjax.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from servers.proto.dsjax.v1 import inference_pb2 as pb

MAX_NAME_CHARS = 256  # of request ids, tenants and sessions
MIN_PRIORITY, MAX_PRIORITY = -16, 15
MAX_INTERACTIVE_TIMEOUT_S = 86400.0

STATUS = {code: grpc.StatusCode[code.value] for code in ErrorCode}

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
FINISH_NAMES = {value: reason.value for reason, value in _FINISH.items() if reason is not None}

# What a field can hold, by its type.
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
}
_OPTIONAL = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed min_tokens max_tokens "
    "ignore_eos include_stop_str_in_output skip_special_tokens logprobs prompt_logprobs"
).split()


def check_request(message: pb.GenerateRequest) -> None:
    """The fields besides prompt and sampling parameters. Raises RequestError(INVALID_ARGUMENT)."""
    if message.HasField("stream_interval") and message.stream_interval < 1:
        raise invalid("stream_interval=0 is not allowed: it must be 1 or more, or absent")
    for name in ("request_id", "tenant", "session_id"):
        check_name(name, getattr(message, name))
    check_priority(message.priority)
    if not 0 <= message.interactive_timeout_s <= MAX_INTERACTIVE_TIMEOUT_S:
        raise invalid(
            f"interactive_timeout_s={message.interactive_timeout_s} is not allowed: it must be in "
            f"[0, {MAX_INTERACTIVE_TIMEOUT_S:g}], 0 for none"
        )
    if message.interactive_timeout_s and not (message.request_id.isascii() and message.request_id.isprintable()):
        raise invalid(
            f"request_id={shown(message.request_id)} is not allowed with interactive_timeout_s: as job-id it travels "
            "in metadata, so it must be printable ASCII"
        )


def check_priority(priority: int) -> None:
    _check_range(f"priority={priority} is not allowed: it", priority, MIN_PRIORITY, MAX_PRIORITY)


def check_name(field: str, name: str) -> None:
    if len(name) > MAX_NAME_CHARS:
        raise invalid(f"{field} has {len(name)} characters: at most {MAX_NAME_CHARS} are allowed")


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields keep SamplingParams' defaults. Raises RequestError(INVALID_ARGUMENT)."""
    return SamplingParams(
        **{name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)},
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
    )


def sampling_params_message(params: SamplingParams) -> pb.SamplingParams:
    """The message that `sampling_params` reads back to equal params.

    Raises RequestError(INVALID_ARGUMENT) for a value that the message cannot hold.
    """
    message = pb.SamplingParams()
    for name in _OPTIONAL:
        value = getattr(params, name)
        if value is not None:
            _check_holds(message, name, value)
            setattr(message, name, value)
    for name in ("stop", "stop_token_ids"):
        for value in getattr(params, name):
            _check_holds(message, name, value)
        getattr(message, name).extend(getattr(params, name))
    for token, bias in params.logit_bias.items():
        _check_range(f"logit_bias names token {token}: an id", token, *_RANGES[FieldDescriptor.CPPTYPE_UINT32])
        message.logit_bias[token] = bias
    return message


def _check_holds(message: pb.SamplingParams, name: str, value: Any) -> None:
    kind = message.DESCRIPTOR.fields_by_name[name].cpp_type
    if kind in _RANGES:
        _check_range(f"{name}={value} is not allowed: it", value, *_RANGES[kind])
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        check_text(name, value)


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise invalid(f"{what} must be in [{low}, {high}]")


def check_text(name: str, text: str) -> None:
    """Raises RequestError(INVALID_ARGUMENT) for what UTF-8 cannot hold, such as a byte that was no UTF-8 before."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{name} is not valid UTF-8: see {text[error.start]!r} at {error.start}") from error


def logprobs(entries: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top_token_ids=[token for token, _ in entry.top],
            top_logprobs=[value for _, value in entry.top],
        )
        for entry in entries
    ]


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], prompt_token_ids: Sequence[int]) -> pb.PromptLogprobs:
    """A position without a prediction (the first) carries its token id alone."""
    positions = []
    for token, entry in zip(prompt_token_ids, entries, strict=True):
        positions += [pb.TokenLogprobs(token_id=token)] if entry is None else logprobs([entry])
    return pb.PromptLogprobs(positions=positions)


def output(event: TokenEvent) -> pb.Output:
    message = pb.Output(
        index=event.index,
        text=event.text,
        token_ids=event.token_ids,
        finish_reason=_FINISH[event.finish_reason],
        logprobs=logprobs(event.logprobs),
        completion_tokens=event.num_output_tokens,
    )
    if isinstance(event.matched_stop, str):
        message.stop_string = event.matched_stop
    elif event.matched_stop is not None:
        message.stop_token_id = event.matched_stop
    return message


def check_size(message: Message, max_message_bytes: int, what: str, remedy: str) -> None:
    """Raises INVALID_ARGUMENT naming the limit when `message` is larger than a message may be."""
    size = message.ByteSize()
    if size > max_message_bytes:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            f"the {what} has {size} bytes, more than max_message_bytes={max_message_bytes}: {remedy}, "
            "or raise --max_message_bytes on server and client",
        )


Message = (
    pb.GenerateRequest
    | pb.GenerateResponse
    | pb.PrefetchRequest
    | pb.GetResultResponse
    | pb.TokenizeRequest
    | pb.DetokenizeRequest
)
