"""The one way dsjax refuses something: a code and one sentence that names field, value, limit and knob.  [no jax]"""

from __future__ import annotations

import enum
import reprlib


class ErrorCode(enum.Enum):
    """Codes with the meaning of the gRPC status of the same name."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    NOT_FOUND = "NOT_FOUND"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """A request that was refused or ended without an answer; `code` says which gRPC status it is.

    `retry_after_s`, where it is known, is when the same request may be taken.
    """

    def __init__(self, code: ErrorCode, message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


def invalid(message: str) -> RequestError:
    """The commonest refusal: a field of the request is wrong."""
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)


class _Short(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxtuple = self.maxlist = self.maxdict = 3

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python refuses to write out thousands of digits
        return super().repr_int(x, level) if bits < 1024 else f"an integer of {bits} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value as an error shows it: short, so that what comes after it is read."""
    return _SHORT.repr(value)


class ConfigError(ValueError):
    """A configuration, checkpoint or flag that cannot be used; the message names it and the limit."""
