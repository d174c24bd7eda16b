"""Asynchronous jobs: requests whose answers are kept for whoever asks, whatever becomes of their clients.  [no jax]

    open() ------------------------------> job ---- end ----> kept for job_ttl_s ---> forgotten
    open(), an interactive call --timeout--> publish()
                    '------- in time ------> forget()

The event loop owns it. A job is known by its request's id. The number of jobs and the bytes of their prompts and
answers are bounded, those of interactive calls that may become jobs among them: a call never has to be told after
its timeout that there is no room for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dsjax.errors import ErrorCode, RequestError, shown
from dsjax.request import Request
from servers.engine_thread import EngineThread
from servers.prompts import Prompt
from servers.streams import EventStream

# Of Python's objects, about: an int in a list; and a token's id, text and log-probability, or one other.
PROMPT_TOKEN_BYTES, VALUE_BYTES = 36, 128


class Job:
    """A request whose whole answer is kept."""

    def __init__(self, store: JobStore, request: Request, prompt: Prompt, admission: int):
        self.request = request
        self.prompt = prompt
        self.admission = admission  # what Breaker.allow returned
        self.stream: EventStream  # set by JobStore.open
        self.num_bytes = PROMPT_TOKEN_BYTES * request.num_prompt_tokens
        self.public = False  # GetResult finds it; an interactive call's is private until its timeout
        self.ended_s: float | None = None  # by the store's clock
        self._store = store

    def grow(self, num_values: int) -> RequestError | None:
        return self._store.grow(self, num_values * VALUE_BYTES)

    def ended(self) -> None:
        self._store.note_end(self)


class JobStore:
    """`on_end` is told of each public job's end."""

    def __init__(
        self,
        thread: EngineThread,
        *,
        max_num_jobs: int,
        max_job_bytes: int,
        job_ttl_s: float,
        on_end: Callable[[Job], None] = lambda job: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.num_live = 0  # public jobs that have not ended
        self.num_bytes = 0
        self.job_ttl_s = job_ttl_s
        self._thread, self._on_end, self._clock = thread, on_end, clock
        self._max_num_jobs, self._max_job_bytes = max_num_jobs, max_job_bytes
        self._jobs: dict[str, Job] = {}
        self._ended: dict[str, Job] = {}  # public ones, in the order of their ends

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def open(
        self, request: Request, prompt: Prompt, admission: int, *, interval: int = 0, max_unread_tokens: int = 0
    ) -> Job:
        """Submits `request` as a private job. Raises RequestError if its id is a job's or there is no room."""
        self.check_id(request.request_id)
        job = Job(self, request, prompt, admission)
        if len(self._jobs) >= self._max_num_jobs:
            raise self._full(f"{len(self._jobs)} jobs are kept, the limit max_num_jobs={self._max_num_jobs}")
        if self.num_bytes + job.num_bytes > self._max_job_bytes:
            raise self._full(
                f"jobs hold {self.num_bytes} bytes, and the prompt's {job.num_bytes} more exceed "
                f"max_job_bytes={self._max_job_bytes}"
            )
        self._jobs[request.request_id] = job
        self.num_bytes += job.num_bytes
        job.stream = self._thread.submit(request, interval=interval, max_unread_tokens=max_unread_tokens, keeper=job)
        return job

    def check_id(self, request_id: str) -> None:
        """Raises ALREADY_EXISTS if a job has this id: a second request's answer must not be taken for the first's."""
        self._expire()
        if request_id in self._jobs:
            raise RequestError(
                ErrorCode.ALREADY_EXISTS,
                f"request_id={shown(request_id)} belongs to a job: use another, or leave it empty; an ended job goes "
                f"with GetResult(discard) or after job_ttl_s={self.job_ttl_s:g}",
            )

    def publish(self, job: Job) -> None:
        """From now on the job goes on by itself, and `get` finds it."""
        job.public = True
        job.stream.detach()
        self.num_live += 1
        if job.ended_s is not None:
            self._end(job)

    def get(self, job_id: str) -> Job:
        """Raises RequestError(NOT_FOUND)."""
        self._expire()
        job = self._jobs.get(job_id)
        if job is None or not job.public:
            raise RequestError(
                ErrorCode.NOT_FOUND,
                f"job_id={shown(job_id)} is no job: it never was, was discarded, or ended more than "
                f"job_ttl_s={self.job_ttl_s:g} ago",
            )
        return job

    def forget(self, job: Job) -> None:
        if self._jobs.get(job.request.request_id) is job:
            del self._jobs[job.request.request_id]
            self._ended.pop(job.request.request_id, None)
            self.num_bytes -= job.num_bytes

    def end_all(self, error: RequestError) -> None:
        """Ends every public job that still runs with `error`."""
        for job in self._jobs.values():
            if job.public and job.ended_s is None:
                job.stream.fail(error)
                self._thread.cancel(job.stream)

    def expires_in_s(self, job: Job) -> float | None:
        """None for a job that has not ended."""
        return None if job.ended_s is None else max(0.0, job.ended_s + self.job_ttl_s - self._clock())

    # --- told by jobs ----------------------------------------------------------------------------

    def grow(self, job: Job, num_bytes: int) -> RequestError | None:
        if self._jobs.get(job.request.request_id) is not job:
            return None
        job.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_job_bytes:
            self._expire()
        if self.num_bytes <= self._max_job_bytes:
            return None
        error = self._full(f"jobs hold {self.num_bytes} bytes, more than max_job_bytes={self._max_job_bytes}")
        answer_bytes = job.num_bytes - PROMPT_TOKEN_BYTES * job.request.num_prompt_tokens
        job.num_bytes -= answer_bytes  # the stream drops it, so that the others can go on
        self.num_bytes -= answer_bytes
        return error

    def note_end(self, job: Job) -> None:
        job.ended_s = self._clock()
        if job.public:
            self._end(job)

    # --- helpers ---------------------------------------------------------------------------------

    def _end(self, job: Job) -> None:
        self.num_live -= 1
        self._ended[job.request.request_id] = job
        self._on_end(job)

    def _expire(self) -> None:
        while self._ended and self.expires_in_s(first := next(iter(self._ended.values()))) == 0:
            self.forget(first)

    def _full(self, what: str) -> RequestError:
        first = next(iter(self._ended.values()), None)
        return RequestError(
            ErrorCode.RESOURCE_EXHAUSTED,
            f"{what}: take results with GetResult(discard), or raise the limit",
            None if first is None else self.expires_in_s(first),
        )
