"""The gRPC servicer: checks a call, makes a Request of it, and turns its events into messages.  [no jax]

Handlers write with `context.write` instead of yielding: a cancelled, expired or dropped call then raises inside the
handler, and its `finally` gives the request back at once rather than when a generator is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from dsjax.chat import ChatStrings, ReplyParser
from dsjax.errors import ErrorCode, RequestError, invalid
from dsjax.request import FinishReason, Request, TokenEvent
from servers import convert, prompts
from servers.engine_thread import EngineThread, State
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from servers.streams import EventStream

log = logging.getLogger("dsjax.server")
T = TypeVar("T")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
MAX_REQUEST_ID_CHARS = 256
# Encoded in about a millisecond, less than a change of threads may cost while the engine thread computes.
INLINE_BYTES = 4096
# A client may reuse an id right after it cancelled; the old call's end can reach us after the new call does.
ID_REUSE_WAIT_S = 0.5
RETRY_AFTER_S = 1
# A status message travels in a header, percent-encoded (up to 3 bytes each); peers may refuse headers over 8 KB.
MAX_STATUS_BYTES = 2000

_STATES = {
    State.LOADING: pb.SERVER_STATE_LOADING,
    State.WARMING: pb.SERVER_STATE_WARMING,
    State.SERVING: pb.SERVER_STATE_SERVING,
    State.FAILED: pb.SERVER_STATE_FAILED,
    State.STOPPED: pb.SERVER_STATE_DRAINING,
}


@dataclasses.dataclass(eq=False)
class _Preparing:
    """A Generate call whose prompt is being encoded, so that the engine does not know it yet."""

    request_id: str
    aborted: bool = False


class InferenceService(pb_grpc.InferenceServicer):
    def __init__(
        self,
        thread: EngineThread,
        *,
        max_message_bytes: int,
        max_unread_tokens: int,
        config_json: str,
        chat_strings: ChatStrings,
        version: str,
    ):
        self.idle = asyncio.Event()  # no Generate call is being answered
        self.idle.set()
        self._thread = thread
        self._max_message_bytes = max_message_bytes
        self._max_unread_tokens = max_unread_tokens
        self._config_json = config_json
        self._chat_strings = chat_strings
        self._version = version
        self._start_s = time.monotonic()
        self._refusal: RequestError | None = None  # of new calls, while draining
        self._ending: RequestError | None = None  # of every call, once the grace period is over
        self._streams: dict[str, EventStream] = {}
        self._preparing: set[_Preparing] = set()
        self._num_generating = 0
        # Encoding a long prompt takes a second; the loop must go on streaming meanwhile.
        self._text_pool = ThreadPoolExecutor(2, thread_name_prefix="dsjax-text")

    # --- draining --------------------------------------------------------------------------------

    def drain(self) -> None:
        """From now on new calls get UNAVAILABLE; those being answered go on."""
        self._refusal = RequestError(ErrorCode.UNAVAILABLE, "the server is draining: send the request to another")

    def end_streams(self, error: RequestError) -> None:
        """Ends every Generate call with `error`."""
        self._refusal = self._ending = error
        for stream in self._streams.values():
            stream.fail(error)

    def close(self) -> None:
        self._text_pool.shutdown(wait=False, cancel_futures=True)

    # --- the calls -------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self._num_generating += 1
        self.idle.clear()
        try:
            async with _as_status(context):
                await self._generate(request, context)
        finally:
            self._num_generating -= 1
            if self._num_generating == 0:
                self.idle.set()

    async def _generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        arrival_s, remaining_s = time.monotonic(), context.time_remaining()
        self._require_serving()
        self._check_request_size(message)
        params = convert.sampling_params(message.sampling_params)
        if message.HasField("stream_interval") and message.stream_interval < 1:
            raise invalid("stream_interval=0 is not allowed: it must be 1 or more, or absent")
        request_id = message.request_id
        if len(request_id) > MAX_REQUEST_ID_CHARS:
            raise invalid(f"request_id has {len(request_id)} characters: at most {MAX_REQUEST_ID_CHARS} are allowed")
        if not request_id:
            request_id = f"dsjax-{uuid.uuid4().hex}"
            # So that a client can abort what it did not name, before the first token.
            await context.send_initial_metadata((("x-request-id", request_id),))
        preparing = _Preparing(request_id)
        self._preparing.add(preparing)
        try:
            prompt = await self._off_loop(
                message, lambda: prompts.of_generate(self._thread.engine, self._chat_strings, message, params)
            )
        finally:
            self._preparing.discard(preparing)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            cache_salt=message.cache_salt,
            arrival_s=arrival_s,
            deadline_s=None if remaining_s is None else arrival_s + remaining_s,
        )
        answer = _Answer(request, prompt.chat_parser)
        if preparing.aborted:
            await context.write(answer.message(answer.aborted()))
            return
        await self._wait_for_id(request_id)
        if self._ending is not None:
            raise self._ending
        stream = self._thread.submit(request, max_unread_tokens=self._max_unread_tokens if message.stream else 0)
        self._streams[request_id] = stream
        try:
            if message.stream:
                while events := await stream.take(message.stream_interval or 1):
                    await self._write(context, answer.message(events))
            else:
                await self._write(context, answer.message(await stream.take_all()))
        finally:
            self._thread.cancel(stream)
            if self._streams.get(request_id) is stream:
                del self._streams[request_id]

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with _as_status(context):
            self._require_serving()
            self._check_request_size(request)
            engine = self._thread.engine
            ids = await self._off_loop(request, lambda: prompts.of_tokenize(engine, self._chat_strings, request))
            return pb.TokenizeResponse(token_ids=ids, max_model_len=engine.max_model_len)
        raise AssertionError  # _as_status has ended the call

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with _as_status(context):
            self._require_serving()
            self._check_request_size(request)
            engine = self._thread.engine
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self._off_loop(request, lambda: prompts.detokenize(engine, list(request.token_ids), skip))
            return pb.DetokenizeResponse(text=text)
        raise AssertionError

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        async with _as_status(context):
            self._require_engine()
            if not request.request_id:
                raise invalid("request_id='' is not allowed: name the request to abort")
            early = [p for p in self._preparing if p.request_id == request.request_id and not p.aborted]
            for preparing in early:
                preparing.aborted = True
            aborted = await self._thread.abort(request.request_id)
            return pb.AbortResponse(aborted=aborted or bool(early))
        raise AssertionError

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        async with _as_status(context):
            self._require_serving()
            engine = self._thread.engine
            model = engine.model_config
            return pb.GetModelInfoResponse(
                model=engine.config.model,
                vocab_size=model.vocab_size,
                max_model_len=engine.max_model_len,
                bos_token_id=model.bos_token_id,
                eos_token_ids=model.eos_token_ids,
                config_json=json.dumps(model.to_dict()),
                has_tokenizer=engine.tokenizer is not None,
            )
        raise AssertionError

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        state = self._thread.state
        draining = self._refusal is not None and state is not State.FAILED
        return pb.GetServerInfoResponse(
            version=self._version,
            state=pb.SERVER_STATE_DRAINING if draining else _STATES[state],
            config_json=self._config_json,
            uptime_s=time.monotonic() - self._start_s,
            max_message_bytes=self._max_message_bytes,
            error=self._thread.error.message if self._thread.error else "",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        async with _as_status(context):
            self._require_engine()
            numbers = dataclasses.asdict(await self._thread.call(lambda engine: engine.stats()))
            message = pb.GetLoadsResponse()
            for name, value in numbers.items():
                if name in pb.GetLoadsResponse.DESCRIPTOR.fields_by_name and name != "counters":
                    setattr(message, name, value)
                elif isinstance(value, (int, float)):
                    message.counters[name] = value
            return message
        raise AssertionError

    # --- helpers ---------------------------------------------------------------------------------

    def _require_engine(self) -> None:
        state = self._thread.state
        if self._thread.error is not None:
            raise self._thread.error
        if state in (State.LOADING, State.WARMING):
            raise RequestError(ErrorCode.UNAVAILABLE, f"the server is {state.value}: wait until its health is SERVING")

    def _require_serving(self) -> None:
        self._require_engine()
        if self._refusal is not None:
            raise self._refusal

    def _check_request_size(self, message: convert.Message) -> None:
        convert.check_size(message, self._max_message_bytes, "request", "send a shorter prompt")

    async def _write(self, context: grpc.aio.ServicerContext, message: pb.GenerateResponse) -> None:
        remedy = "ask for fewer logprobs, prompt_logprobs or tokens, or set stream"
        convert.check_size(message, self._max_message_bytes, "answer", remedy)
        await context.write(message)

    async def _off_loop(self, message: convert.Message, function: Callable[[], T]) -> T:
        """Runs what takes long for a long `message` in the text pool, and what does not at once."""
        if message.ByteSize() <= INLINE_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, function)

    async def _wait_for_id(self, request_id: str) -> None:
        """Gives an earlier call with this id the time to end, if it is ending; if not, the new one is refused."""
        earlier = self._streams.get(request_id)
        if earlier is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(earlier.closed.wait(), ID_REUSE_WAIT_S)


class _Answer:
    """Makes the messages of one Generate call."""

    def __init__(self, request: Request, chat_parser: Callable[[], ReplyParser] | None):
        self._request = request
        self._completion_tokens = [0] * request.params.n
        self._parsers = [chat_parser() for _ in range(request.params.n)] if chat_parser else None
        self._prompt_logprobs_sent = False

    def message(self, events: list[TokenEvent]) -> pb.GenerateResponse:
        request = self._request
        message = pb.GenerateResponse(request_id=request.request_id)
        for event in events:
            self._completion_tokens[event.index] = event.num_output_tokens
            output = convert.output(event)
            if self._parsers is not None:
                output.chat.CopyFrom(prompts.chat_delta(self._parsers[event.index], event))
            message.outputs.append(output)
            if event.prompt_logprobs is not None and not self._prompt_logprobs_sent:
                self._prompt_logprobs_sent = True
                message.prompt_logprobs.CopyFrom(
                    convert.prompt_logprobs(event.prompt_logprobs, request.prompt_token_ids)
                )
        message.usage.prompt_tokens = request.num_prompt_tokens
        message.usage.cached_tokens = max((event.num_cached_tokens for event in events), default=0)
        message.usage.completion_tokens = sum(self._completion_tokens)
        return message

    def aborted(self) -> list[TokenEvent]:
        return [
            TokenEvent(request_id=self._request.request_id, index=index, finish_reason=FinishReason.ABORT)
            for index in range(self._request.params.n)
        ]


@contextlib.asynccontextmanager
async def _as_status(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call with the status of a RequestError raised inside, or INTERNAL for anything unforeseen."""
    try:
        yield
    except RequestError as error:
        full = error.code is ErrorCode.RESOURCE_EXHAUSTED
        trailing = (("retry-after", str(RETRY_AFTER_S)),) if full else ()
        await context.abort(convert.STATUS[error.code], _short(error.message), trailing)
    except Exception as error:
        log.exception("a call failed")
        await context.abort(grpc.StatusCode.INTERNAL, _short(f"the call failed: {type(error).__name__}: {error}"))


def _short(message: str) -> str:
    raw = message.encode()
    return message if len(raw) <= MAX_STATUS_BYTES else raw[:MAX_STATUS_BYTES].decode(errors="ignore") + "..."
