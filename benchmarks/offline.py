"""Runs a workload on an engine in this process: the engine alone, without the server and its client."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.metrics import Record
from benchmarks.workloads import WorkItem
from dsjax.errors import RequestError
from dsjax.request import Request, SamplingParams

if TYPE_CHECKING:
    from dsjax.engine import Engine


Follow = Callable[[WorkItem, Record], tuple[float, WorkItem] | None]


def run(
    engine: Engine,
    items: Sequence[WorkItem],
    *,
    arrivals: Sequence[float],  # seconds from the start, ascending
    max_concurrency: int | None = None,
    static_batch: int = 0,
    until_s: float = math.inf,
    params: Callable[[WorkItem], SamplingParams],
    follow: Follow = lambda item, record: None,
    cache_salt: str = "",
    on_finish: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[list[Record], float]:
    """Returns a record for each item, in order of arrival, and the seconds from the start to the last token.

    A request's time starts when it arrives; with `max_concurrency` when it is given to the engine, as in
    `vllm bench serve`. A refused request becomes a record with an error. `static_batch` is the old way of serving: an
    engine that is idle gets so many requests, and no others until all of them have ended. `follow` is called with each
    request that ended and may name another that arrives so many seconds later. After `until_s` seconds what is live is
    cancelled, its record as it is then.
    """
    begin = clock()
    ahead = [(begin + at, number, item) for number, (at, item) in enumerate(zip(arrivals, items, strict=True))]
    heapq.heapify(ahead)
    records: dict[str, Record] = {}
    live: dict[str, WorkItem] = {}

    def end(item: WorkItem, record: Record, now: float) -> None:
        live.pop(str(item.id), None)
        on_finish()
        following = follow(item, record)
        if following is not None:
            heapq.heappush(ahead, (now + following[0], len(records) + len(ahead), following[1]))

    def give(now: float) -> None:
        arrival, _, item = heapq.heappop(ahead)
        name = str(item.id)
        record = Record(id=item.id, prompt_len=len(item.prompt), start_s=now if max_concurrency else arrival)
        records[name] = record
        request = Request(
            request_id=name,
            prompt_token_ids=list(item.prompt),
            params=params(item),
            cache_salt=cache_salt,
            arrival_s=engine.clock() - (now - arrival),
        )
        try:
            engine.add(request)
            live[name] = item
        except RequestError as error:
            record.error = f"{error.code.value}: {error.message}"
            end(item, record, now)

    while ahead or live:
        now = clock()
        if now - begin >= until_s:
            for name in live:
                engine.cancel(name)
            break
        room = max_concurrency - len(live) if max_concurrency else len(ahead)
        if static_batch:
            room = 0 if live else static_batch
        while room > 0 and ahead and ahead[0][0] <= now:
            give(now)
            room -= 1
        if not live:
            if ahead:
                sleep(max(0.0, ahead[0][0] - clock()))
            continue
        events = engine.step()
        wake_s = engine.wake_s()
        if wake_s is not None:  # it waits for company
            until = min(wake_s - engine.clock(), ahead[0][0] - clock() if ahead else math.inf)
            sleep(max(0.0, until))
            continue
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
                end(live[event.request_id], record, now)
    duration = clock() - begin
    while engine.has_work():  # a step sent ahead of the last tokens
        engine.step()
    return list(records.values()), duration
