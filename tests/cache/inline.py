"""Executors for tests, whose work is done when the test says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Inline(Executor):
    """Does everything at once, or with `held` not before `release`."""

    def __init__(self, held: bool = False):
        self.held = held
        self._due: list[tuple[Future, Callable[[], Any]]] = []

    def submit(self, fn, /, *args, **kwargs) -> Future:
        future: Future = Future()
        self._due.append((future, lambda: fn(*args, **kwargs)))
        if not self.held:
            self.release()
        return future

    def release(self) -> None:
        due, self._due = self._due, []
        for future, work in due:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.release()
