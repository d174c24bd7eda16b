"""Between the protocol's messages and dsjax's own types; no state, no I/O.  [no jax]"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from dsjax.errors import ErrorCode, RequestError
from dsjax.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from servers.proto.dsjax.v1 import inference_pb2 as pb

STATUS = {code: grpc.StatusCode[code.value] for code in ErrorCode}

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
FINISH_NAMES = {value: reason.value for reason, value in _FINISH.items() if reason is not None}

_OPTIONAL = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed min_tokens max_tokens "
    "ignore_eos include_stop_str_in_output skip_special_tokens logprobs prompt_logprobs"
).split()


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields keep SamplingParams' defaults. Raises RequestError(INVALID_ARGUMENT)."""
    return SamplingParams(
        **{name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)},
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
    )


def sampling_params_message(params: SamplingParams) -> pb.SamplingParams:
    """The message that `sampling_params` reads back to equal params."""
    message = pb.SamplingParams(logit_bias=params.logit_bias, stop=params.stop, stop_token_ids=params.stop_token_ids)
    for name in _OPTIONAL:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    return message


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


Message = pb.GenerateRequest | pb.GenerateResponse | pb.TokenizeRequest | pb.DetokenizeRequest
