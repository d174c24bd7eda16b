"""Counts XLA compilations in this process, so that one after warm-up cannot go unseen."""

from __future__ import annotations

import threading

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX reports it for each program it compiles or loads
_LOADED = "/jax/compilation_cache/cache_hits"  # for each that its persistent cache has


class CompileCounter:
    """`total` counts since the start, `after_warm_up` since the last warm-up ended."""

    def __init__(self):
        self.total = 0
        self._at_warm_up: int | None = None
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_compiled)
        jax.monitoring.register_event_listener(self._on_loaded)

    def _on_compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            self.total += 1

    def _on_loaded(self, event: str, **kwargs: str | int) -> None:
        if event == _LOADED:
            self._thread.num_loaded = self.num_loaded_here + 1

    @property
    def num_loaded_here(self) -> int:
        """Of the programs that this thread compiled, those that JAX's persistent cache had."""
        return getattr(self._thread, "num_loaded", 0)

    def mark_warm(self) -> None:
        self._at_warm_up = self.total

    @property
    def after_warm_up(self) -> int:
        return 0 if self._at_warm_up is None else self.total - self._at_warm_up


COMPILES = CompileCounter()  # one a process, since JAX's listeners are global
