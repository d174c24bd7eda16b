"""Counts XLA compilations in this process, so that one after warm-up cannot go unseen."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"  # JAX reports it for each program it compiles or loads


class CompileCounter:
    """`total` counts since the start, `after_warm_up` since the last warm-up ended."""

    def __init__(self):
        self.total = 0
        self._at_warm_up: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            self.total += 1

    def mark_warm(self) -> None:
        self._at_warm_up = self.total

    @property
    def after_warm_up(self) -> int:
        return 0 if self._at_warm_up is None else self.total - self._at_warm_up


COMPILES = CompileCounter()  # one a process, since JAX's listeners are global
