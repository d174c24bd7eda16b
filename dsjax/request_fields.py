"""Types of what callers give for a request's fields; errors name field, value and what it must be.  [no jax]"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from dsjax.errors import RequestError, invalid, shown

MAX_BIAS = 1e6  # of a logit: more would leave float32 nothing of the logit itself


def wrong(name: str, value: object, must: str) -> RequestError:
    return invalid(f"{name}={shown(value)} is not allowed: {must}")


def integer(name: str, value: Any) -> int:
    """An int of any integer type; bool is none."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong(name, value, "it must be a whole number")
    return int(value)


def number(name: str, value: Any) -> float:
    """A float of any real type; bool is none, NaN is."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(name, value, "it must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # no field takes either


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise wrong(name, value, "it must be true or false")
    return bool(value)


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Of one string or several."""
    if isinstance(value, str):
        return (value,)
    texts: tuple[Any, ...] = tuple(value) if _is_list(value) else (None,)
    if not all(isinstance(text, str) for text in texts):
        raise wrong(name, value, "it must be a string or a list of strings")
    return texts


def integers(name: str, value: Any) -> tuple[int, ...]:
    if not _is_list(value):
        raise wrong(name, value, "it must be a list of whole numbers")
    return tuple(entry if type(entry) is int else integer(f"{name}[{i}]", entry) for i, entry in enumerate(value))


def ends(name: str, ids: Any) -> tuple[int, int]:
    """The least and the greatest of token ids, at least one; numpy looks at their types."""
    with contextlib.suppress(ValueError, OverflowError):  # of what numpy makes no array
        array = np.asarray(ids)
        if array.dtype.kind in "iu" and array.ndim == 1:
            return int(array.min()), int(array.max())
    read = integers(name, ids)
    return min(read), max(read)


def biases(name: str, value: Any) -> dict[int, float]:
    """By token id. One below -MAX_BIAS bans its token, as -inf does."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "it must map token ids to numbers")
    out = {}
    for token, bias in value.items():
        token = integer(f"a token of {name}", token)
        entry = f"{name}[{token}]"
        bias = number(entry, bias)
        if token < 0 or not bias <= MAX_BIAS:  # NaN is not
            raise wrong(entry, bias, f"the token must be an id and the bias a number of at most {MAX_BIAS:g}")
        out[token] = bias if bias >= -MAX_BIAS else -math.inf
    return out


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping))
