"""How often many streams together are handed what came: tokens wait for their stream's turn.  [no jax]

A message costs the server 60 to 100 us of a core however many tokens it holds, so under load they share messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Pacer(Generic[T]):
    """Gives turns in the order in which they were asked for, at most `max_per_s` a second (0: no limit).

    One of n waits at most n / max_per_s seconds, and until somebody asks whose turn it is. Turns that nobody wanted
    are not kept. Times are seconds of one clock.
    """

    def __init__(self, max_per_s: float):
        self._max_per_s = max_per_s
        self._queue: deque[T] = deque()
        self._asked_s = float("-inf")
        self._left = 0.0  # part of a turn, in [0, 1)

    @property
    def is_limited(self) -> bool:
        return self._max_per_s > 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, waiting: T) -> None:
        self._queue.append(waiting)

    def turns(self, now_s: float) -> Iterator[T]:
        """Those whose turn has come since the last call."""
        num = len(self._queue)
        if self._max_per_s:
            earned = (now_s - self._asked_s) * self._max_per_s + self._left
            num, self._left = (num, 0.0) if earned >= num else (int(earned), earned % 1)
        self._asked_s = now_s
        return (self._queue.popleft() for _ in range(num))

    def all(self) -> Iterator[T]:
        """Everybody's turn."""
        return (self._queue.popleft() for _ in range(len(self._queue)))
