"""How a call ends that does not succeed: the gRPC status of an error, with what belongs into its metadata.  [no jax]"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator

import grpc

from dsjax.errors import ErrorCode, RequestError, shown
from servers import convert

log = logging.getLogger("dsjax.server")

# A status message travels in a header, percent-encoded (up to 3 bytes each); peers may refuse headers over 8 KB.
MAX_STATUS_BYTES = 2000
_WITH_RETRY = (ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE)


class BecameJob(RequestError):
    """An interactive call is over, and its request goes on."""

    def __init__(self, job_id: str, timeout_s: float):
        super().__init__(
            ErrorCode.DEADLINE_EXCEEDED,
            f"interactive_timeout_s={timeout_s:g} passed before the answer was complete: the request goes on as "
            f"job_id={shown(job_id)}, ask GetResult",
        )
        self.job_id = job_id


@contextlib.asynccontextmanager
async def as_status(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Ends the call with the status of a RequestError raised inside, or INTERNAL for anything unforeseen."""
    try:
        yield
    except RequestError as error:
        await context.abort(convert.STATUS[error.code], _short(error.message), _metadata(error))
    except Exception as error:
        log.exception("a call failed")
        await context.abort(grpc.StatusCode.INTERNAL, _short(f"the call failed: {type(error).__name__}: {error}"))


def _metadata(error: RequestError) -> tuple[tuple[str, str], ...]:
    if isinstance(error, BecameJob):
        return (("job-id", error.job_id),)
    if error.code in _WITH_RETRY:
        return (("retry-after", str(max(1, math.ceil(error.retry_after_s or 0)))),)
    return ()


def _short(message: str) -> str:
    raw = message.encode()
    if len(raw) <= MAX_STATUS_BYTES:
        return message
    half = MAX_STATUS_BYTES // 2  # what a message shows may be long; the reason comes after it
    return raw[:half].decode(errors="ignore") + "..." + raw[-half:].decode(errors="ignore")
