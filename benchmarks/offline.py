"""Runs a workload on an engine in this process: the engine alone, without the server and its client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.metrics import Record
from benchmarks.workloads import WorkItem
from dsjax.errors import RequestError
from dsjax.request import Request, SamplingParams

if TYPE_CHECKING:
    from dsjax.engine import Engine


def run(
    engine: Engine,
    items: Sequence[WorkItem],
    *,
    arrivals: Sequence[float],  # seconds from the start, ascending
    max_concurrency: int | None,
    params: Callable[[WorkItem], SamplingParams],
    cache_salt: str = "",
    on_finish: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[list[Record], float]:
    """Returns a record for each item, in order, and the seconds from the start to the last token.

    A request's time starts when it is given to the engine: with `max_concurrency` the wait before that does not count,
    as in `vllm bench serve`. A refused request becomes a record with an error.
    """
    records = {str(item.id): Record(id=item.id, prompt_len=len(item.prompt), start_s=0.0) for item in items}
    waiting = deque(zip(items, arrivals, strict=True))
    live: set[str] = set()
    begin = clock()
    while waiting or live:
        now = clock()
        while waiting and now - begin >= waiting[0][1] and (max_concurrency is None or len(live) < max_concurrency):
            item, _ = waiting.popleft()
            name = str(item.id)
            records[name].start_s = now
            try:
                engine.add(
                    Request(
                        request_id=name,
                        prompt_token_ids=list(item.prompt),
                        params=params(item),
                        cache_salt=cache_salt,
                        arrival_s=time.monotonic(),
                    )
                )
                live.add(name)
            except RequestError as error:
                records[name].error = f"{error.code.value}: {error.message}"
                on_finish()
        if not live:
            if waiting:
                sleep(max(0.0, waiting[0][1] - (clock() - begin)))
            continue
        events = engine.step()
        now = clock()
        for event in events:
            record = records[event.request_id]
            if event.token_ids:
                record.token_times_s.append(now)
                record.token_ids.extend(event.token_ids)
            record.cached_tokens = max(record.cached_tokens, event.num_cached_tokens)
            if event.finished:
                if event.error is not None:
                    record.error = f"{event.error.code.value}: {event.error.message}"
                live.discard(event.request_id)
                on_finish()
    duration = clock() - begin
    while engine.has_work():  # a step sent ahead of the last tokens
        engine.step()
    return list(records.values()), duration
