"""The gRPC servicer: whether a call may be answered now, and the status it ends with.  [no jax]"""

from __future__ import annotations

import dataclasses
import json
import time

import grpc

from dsjax.chat import ChatStrings
from dsjax.errors import ErrorCode, RequestError, invalid
from dsjax.request import SamplingParams
from dsjax.scheduler.breaker import BreakerState
from servers import convert, prompts
from servers.engine_thread import EngineThread, State
from servers.flags import ServerConfig
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.proto.dsjax.v1 import inference_pb2_grpc as pb_grpc
from servers.requests import Requests
from servers.status import as_status

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name

_STATES = {
    State.LOADING: pb.SERVER_STATE_LOADING,
    State.WARMING: pb.SERVER_STATE_WARMING,
    State.SERVING: pb.SERVER_STATE_SERVING,
    State.FAILED: pb.SERVER_STATE_FAILED,
    State.STOPPED: pb.SERVER_STATE_DRAINING,
}


class InferenceService(pb_grpc.InferenceServicer):
    def __init__(
        self,
        thread: EngineThread,
        config: ServerConfig,
        *,
        config_json: str,
        chat_strings: ChatStrings,
        version: str,
    ):
        self.requests = Requests(thread, config, chat_strings)
        self._thread, self._config = thread, config
        self._config_json, self._chat_strings, self._version = config_json, chat_strings, version
        self._start_s = time.monotonic()
        self._refusal: RequestError | None = None  # of new requests, while draining

    # --- draining --------------------------------------------------------------------------------

    def drain(self) -> None:
        """From now on new requests get UNAVAILABLE; calls that are being answered, and jobs, go on."""
        self._refusal = RequestError(ErrorCode.UNAVAILABLE, "the server is draining: send the request to another")

    def end_all(self, error: RequestError) -> None:
        """Ends every Generate call and every job with `error`."""
        self._refusal = error
        self.requests.end_all(error)

    # --- the calls -------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with as_status(context):
            self._require_serving()
            await self.requests.generate(request, context)

    async def Submit(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.SubmitResponse:
        async with as_status(context):
            self._require_serving()
            return await self.requests.submit(request, context)
        raise AssertionError  # as_status has ended the call

    async def GetResult(self, request: pb.GetResultRequest, context: grpc.aio.ServicerContext) -> pb.GetResultResponse:
        async with as_status(context):
            return await self.requests.result(request)
        raise AssertionError

    async def Prefetch(self, request: pb.PrefetchRequest, context: grpc.aio.ServicerContext) -> pb.PrefetchResponse:
        async with as_status(context):
            self._require_serving()
            self.requests.check_size(request)
            engine, salt, token_ids = self._thread.engine, request.cache_salt, []
            convert.check_name("session_id", request.session_id)
            if request.WhichOneof("prompt") is None:
                raise invalid("prompt is absent: set text, token_ids, chat or session_id")
            if request.WhichOneof("prompt") != "session_id":
                prompt = await self.requests.off_loop(
                    request.ByteSize(),
                    lambda: prompts.of_generate(engine, self._chat_strings, request, SamplingParams()),
                )
                token_ids = prompt.token_ids
            elif not request.session_id:
                raise invalid("session_id='' is not allowed: name a session, or set text, token_ids or chat")
            found = await self._thread.call(
                lambda engine: engine.prefetch(token_ids=token_ids, session_id=request.session_id, cache_salt=salt)
            )
            return pb.PrefetchResponse(found=found)
        raise AssertionError

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with as_status(context):
            self._require_serving()
            self.requests.check_size(request)
            engine = self._thread.engine
            ids = await self.requests.off_loop(
                request.ByteSize(), lambda: prompts.of_tokenize(engine, self._chat_strings, request)
            )
            return pb.TokenizeResponse(token_ids=ids, max_model_len=engine.max_model_len)
        raise AssertionError

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with as_status(context):
            self._require_serving()
            self.requests.check_size(request)
            engine = self._thread.engine
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self.requests.off_loop(
                request.ByteSize(), lambda: prompts.detokenize(engine, list(request.token_ids), skip)
            )
            return pb.DetokenizeResponse(text=text)
        raise AssertionError

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        async with as_status(context):
            self._require_engine()
            if not request.request_id:
                raise invalid("request_id='' is not allowed: name the request to abort")
            return pb.AbortResponse(aborted=await self.requests.abort(request.request_id))
        raise AssertionError

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        async with as_status(context):
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
            max_message_bytes=self._config.max_message_bytes,
            error=self._thread.error.message if self._thread.error else "",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        async with as_status(context):
            self._require_engine()
            numbers = dataclasses.asdict(await self._thread.call(lambda engine: engine.stats()))
            message = pb.GetLoadsResponse()
            for name, value in numbers.items():
                if name in pb.GetLoadsResponse.DESCRIPTOR.fields_by_name and name != "counters":
                    setattr(message, name, value)
                elif isinstance(value, (int, float)):
                    message.counters[name] = value
                elif isinstance(value, dict):
                    message.counters.update({f"{name}_{key}": number for key, number in value.items()})
            jobs, breaker = self.requests.jobs, self.requests.breaker
            message.counters["num_jobs"] = jobs.num_jobs
            message.counters["num_running_jobs"] = jobs.num_live
            message.counters["job_bytes"] = jobs.num_bytes
            message.counters["breaker_closed"] = breaker.state is BreakerState.CLOSED
            message.counters["num_breaker_opened"] = breaker.num_opened
            message.counters["num_breaker_refused"] = breaker.num_refused
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
