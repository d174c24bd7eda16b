"""The requests of a server, from a call's message to its answer or job.  [no jax]

    message -> circuit breaker -> checks, prompt encoded -> EngineThread.submit -> messages written as tokens come
                                                       '-> JobStore.open ------'-> kept, for GetResult

Owned by the event loop. Messages are written with `context.write` instead of being yielded: a cancelled, expired or
dropped call then raises inside its handler, whose `finally` gives the request back at once rather than when a generator
is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from dsjax.chat import ChatStrings
from dsjax.errors import ErrorCode, RequestError, invalid, shown
from dsjax.request import Request, TokenEvent
from dsjax.scheduler.breaker import Breaker, is_late
from servers import convert, prompts
from servers.answers import Answer
from servers.engine_thread import EngineThread
from servers.flags import ServerConfig
from servers.jobs import Job, JobStore
from servers.proto.dsjax.v1 import inference_pb2 as pb
from servers.status import BecameJob
from servers.streams import EventStream

T = TypeVar("T")

# Encoded in about a millisecond, less than a change of threads may cost while the engine thread computes.
INLINE_BYTES = 4096
# A client may reuse an id right after it cancelled; the old call's end can reach us after the new call does.
ID_REUSE_WAIT_S = 0.5
MAX_WAIT_S = 3600.0  # of GetResult


@dataclasses.dataclass(eq=False)
class _Preparing:
    """A call whose prompt is being encoded, so that the engine does not know it yet."""

    request_id: str
    aborted: bool = False


@dataclasses.dataclass
class _Admission:
    """The circuit breaker has let a request in."""

    number: int
    stream: EventStream | None = None  # once the engine has been given it
    by_job: bool = False  # how it ended will be a job's to say


class Requests:
    """Raises RequestError for what cannot be answered; a server that is not SERVING must not ask."""

    def __init__(self, thread: EngineThread, config: ServerConfig, chat_strings: ChatStrings):
        self.idle = asyncio.Event()  # no request is being answered, no job runs
        self.idle.set()
        self.jobs = JobStore(
            thread,
            max_num_jobs=config.max_num_jobs,
            max_job_bytes=config.max_job_bytes,
            job_ttl_s=config.job_ttl_s,
            on_end=self._on_job_end,
        )
        self._thread, self._config, self._chat_strings = thread, config, chat_strings
        self._ending: RequestError | None = None  # of every request, once the grace period is over
        self._streams: dict[str, EventStream] = {}  # of Generate calls
        self._preparing: set[_Preparing] = set()
        self._num_calls = 0  # Generate and Submit
        # Encoding a long prompt takes a second; the loop must go on streaming meanwhile.
        self._text_pool = ThreadPoolExecutor(2, thread_name_prefix="dsjax-text")

    def end_all(self, error: RequestError) -> None:
        """Ends every Generate call and every job with `error`."""
        self._ending = error
        for stream in self._streams.values():
            stream.fail(error)
        self.jobs.end_all(error)

    def close(self) -> None:
        self._text_pool.shutdown(wait=False, cancel_futures=True)

    # --- what the calls do -----------------------------------------------------------------------

    async def generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Writes the answer, or raises BecameJob."""
        with self._admission(context, message.tenant) as admission:
            request, prompt, aborted = await self._prepare(message, context)
            answer = Answer(request, prompt)
            if aborted:
                await context.write(answer.aborted())
                return
            interval = (message.stream_interval or 1) if message.stream else 0
            max_unread = self._config.max_unread_tokens if message.stream else 0
            job: Job | None = None
            due_s: float | None = None  # by time.monotonic, which is the loop's clock too
            if message.interactive_timeout_s:
                job = self.jobs.open(request, prompt, admission.number, interval=interval, max_unread_tokens=max_unread)
                stream, due_s = job.stream, request.arrival_s + message.interactive_timeout_s
            else:
                self.jobs.check_id(request.request_id)
                stream = self._thread.submit(request, interval=interval, max_unread_tokens=max_unread)
            admission.stream = stream
            self._streams[request.request_id] = stream
            take = stream.take if message.stream else stream.take_all
            try:
                while events := await (take() if due_s is None else _before(due_s, stream, take)):
                    await self._write(context, answer.message(events))
            except TimeoutError:
                assert job is not None
                self.jobs.publish(job)
                admission.by_job = True
                raise BecameJob(request.request_id, message.interactive_timeout_s) from None
            finally:
                if job is None or not job.public:
                    self._thread.cancel(stream)
                if job is not None and not job.public:
                    self.jobs.forget(job)
                if self._streams.get(request.request_id) is stream:
                    del self._streams[request.request_id]

    async def submit(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.SubmitResponse:
        """Returns when the engine has queued the request."""
        with self._admission(context, message.tenant) as admission:
            request, prompt, aborted = await self._prepare(message, context, outlives_call=True)
            if aborted:
                raise RequestError(
                    ErrorCode.CANCELLED, f"request_id={shown(request.request_id)} was aborted before it was queued"
                )
            job = self.jobs.open(request, prompt, admission.number)
            admission.stream = job.stream
            try:
                await _first_of(job.stream.accepted, job.stream.closed)
                if job.stream.error is not None and not job.stream.accepted.is_set():
                    raise job.stream.error
            except BaseException:  # also a client that went away and does not know the job
                self._thread.cancel(job.stream)
                self.jobs.forget(job)
                raise
            admission.by_job = True
            self.jobs.publish(job)
            return pb.SubmitResponse(job_id=request.request_id, job_ttl_s=self.jobs.job_ttl_s)

    async def result(self, message: pb.GetResultRequest) -> pb.GetResultResponse:
        """Answers in every state of the server: what is done can be taken."""
        if not 0 <= message.wait_s <= MAX_WAIT_S:
            raise invalid(f"wait_s={message.wait_s} is not allowed: it must be in [0, {MAX_WAIT_S:g}]")
        job = self.jobs.get(message.job_id)
        if message.wait_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.stream.closed.wait(), message.wait_s)
        error, events, ended = job.stream.error, job.stream.whole(), job.ended_s is not None
        state = pb.JOB_STATE_RUNNING if events else pb.JOB_STATE_QUEUED
        if error is not None:
            state = pb.JOB_STATE_FAILED
        elif ended:
            state = pb.JOB_STATE_DONE
        result = pb.GetResultResponse(state=state, expires_in_s=self.jobs.expires_in_s(job))
        if error is not None:
            result.error_code, result.error_message = error.code.value, error.message
        # a job's bytes are those of its tokens as objects: of the size of the messages that are made of them
        answer = await self.off_loop(job.num_bytes, lambda: Answer(job.request, job.prompt).message(events))
        result.response.CopyFrom(answer)
        remedy = "ask for fewer logprobs, prompt_logprobs or tokens"
        convert.check_size(result, self._config.max_message_bytes, "answer", remedy)
        if message.discard and ended:
            self.jobs.forget(job)
        return result

    async def abort(self, request_id: str) -> bool:
        """Ends a live request with FinishReason.ABORT; False if there is none of this id."""
        early = [p for p in self._preparing if p.request_id == request_id and not p.aborted]
        for preparing in early:
            preparing.aborted = True
        return await self._thread.abort(request_id) or bool(early)

    def check_size(self, message: convert.Message) -> None:
        convert.check_size(message, self._config.max_message_bytes, "request", "send a shorter prompt")

    async def off_loop(self, num_bytes: int, function: Callable[[], T]) -> T:
        """Runs what takes long, for text of so many bytes, in the text pool, and what does not at once."""
        if num_bytes <= INLINE_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, function)

    # --- the circuit breaker, and what is live -----------------------------------------------------

    @functools.cached_property
    def breaker(self) -> Breaker:
        return Breaker(self._thread.engine.config.overload)

    @contextlib.contextmanager
    def _admission(self, context: grpc.aio.ServicerContext, tenant: str) -> Iterator[_Admission]:
        """Asks the circuit breaker, and tells it how what runs inside ended, unless a job will."""
        admission = _Admission(self.breaker.allow(time.monotonic(), self._thread.step_s))
        self._num_calls += 1
        self.idle.clear()
        code: ErrorCode | None = ErrorCode.CANCELLED  # which says nothing of the server
        try:
            yield admission
            code = None
        except RequestError as error:
            code = error.code
            raise
        except asyncio.CancelledError:
            if context.time_remaining() == 0:
                code = ErrorCode.DEADLINE_EXCEEDED
            raise
        except Exception:
            code = ErrorCode.INTERNAL
            raise
        finally:
            if code is ErrorCode.DEADLINE_EXCEEDED and not self._is_late(admission.stream):
                code = ErrorCode.CANCELLED
            if not admission.by_job:
                self.breaker.ended(time.monotonic(), admission.number, code, tenant)
            self._num_calls -= 1
            self._look_idle()

    def _is_late(self, stream: EventStream | None) -> bool:
        """Whether a deadline that has passed just now was the engine's to meet: it knew of the request in time."""
        if stream is None:
            return False
        request, now_s = stream.request, time.monotonic()
        first_s = (now_s if stream.first_s is None else stream.first_s) - request.arrival_s
        return is_late(first_s, now_s - request.arrival_s, self._thread.engine.first_token_s(request.num_prompt_tokens))

    def _on_job_end(self, job: Job) -> None:
        error = job.stream.error
        code = None if error is None else error.code
        self.breaker.ended(time.monotonic(), job.admission, code, job.request.tenant)
        self._look_idle()

    def _look_idle(self) -> None:
        if self._num_calls == 0 and self.jobs.num_live == 0:
            self.idle.set()

    # --- helpers ---------------------------------------------------------------------------------

    async def _prepare(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext, *, outlives_call: bool = False
    ) -> tuple[Request, prompts.Prompt, bool]:
        """The request of a message, its prompt, and whether it was aborted meanwhile."""
        arrival_s, remaining_s = time.monotonic(), context.time_remaining()
        self.check_size(message)
        convert.check_request(message)
        params = convert.sampling_params(message.sampling_params)
        request_id = message.request_id
        if not request_id:
            request_id = f"dsjax-{uuid.uuid4().hex}"
            # So that a client can abort what it did not name, before the first token.
            await context.send_initial_metadata((("x-request-id", request_id),))
        preparing = _Preparing(request_id)
        self._preparing.add(preparing)
        try:
            prompt = await self.off_loop(
                message.ByteSize(),
                lambda: prompts.of_generate(self._thread.engine, self._chat_strings, message, params),
            )
        finally:
            self._preparing.discard(preparing)
        if remaining_s is not None and 0 < message.interactive_timeout_s < remaining_s:
            outlives_call = True
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            cache_salt=message.cache_salt,
            priority=message.priority,
            tenant=message.tenant,
            session_id=message.session_id,
            arrival_s=arrival_s,
            deadline_s=None if remaining_s is None or outlives_call else arrival_s + remaining_s,
        )
        if not preparing.aborted:
            await self._wait_for_id(request_id)
        if self._ending is not None:
            raise self._ending
        return request, prompt, preparing.aborted

    async def _wait_for_id(self, request_id: str) -> None:
        """Gives an earlier call with this id the time to end, if it is ending; if not, the new one is refused."""
        earlier = self._streams.get(request_id)
        if earlier is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(earlier.closed.wait(), ID_REUSE_WAIT_S)

    async def _write(self, context: grpc.aio.ServicerContext, message: pb.GenerateResponse) -> None:
        remedy = "ask for fewer logprobs, prompt_logprobs or tokens, or set stream"
        convert.check_size(message, self._config.max_message_bytes, "answer", remedy)
        await context.write(message)


async def _before(
    due_s: float, stream: EventStream, take: Callable[[], Awaitable[list[TokenEvent]]]
) -> list[TokenEvent]:
    """Raises TimeoutError at `due_s`, though there may be more to take at once, always."""
    if time.monotonic() >= due_s and not stream.closed.is_set():
        raise TimeoutError
    async with asyncio.timeout_at(due_s):
        return await take()


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
