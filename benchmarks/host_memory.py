"""Memory on the host: what a request takes while it waits and runs, and whether many leave something behind."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks.host_engine import make_engine
from dsjax.request import Request, SamplingParams

PROMPT_LEN = 128
WARM = 10_000  # requests after which the memory is not to grow: caches of the tokenizer and the allocator are full


def bytes_a_request(num: int, num_running: int = 256) -> dict[str, float]:
    """Bytes of Python and numpy objects, without the prompt's own list of ids, which the caller brings."""
    engine = make_engine(num_running)
    engine.add(_request(0, 4))
    while engine.has_work():
        engine.step()
    running = [_request(number, 1000) for number in range(1, 1 + num_running)]
    waiting = [_request(number, 1000) for number in range(1 + num_running, 1 + num_running + num)]
    tracemalloc.start()
    try:
        before = _traced()
        for request in running:
            engine.add(request)
        for _ in range(64):
            engine.step()
        middle = _traced()
        for request in waiting:
            engine.add(request)
        engine.step()
        after = _traced()
    finally:
        tracemalloc.stop()
    return {
        f"bytes_a_running_request_of_{PROMPT_LEN + 64}_tokens": (middle - before) / num_running,
        f"bytes_a_waiting_request_of_{PROMPT_LEN}_tokens": (after - middle) / num,
    }


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _request(number: int, output_len: int) -> Request:
    prompt = [number % 7919, number // 7919, *range(PROMPT_LEN - 2)]
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=output_len, ignore_eos=True)
    return Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params, session_id=f"s{number}")


def watch(num_requests: int, every: int = 10_000) -> list[dict[str, Any]]:
    """Sends short requests, each with a prompt and a session of its own; prints the resident memory meanwhile."""
    engine, rows, sent, ended = make_engine(64), [], 0, 0
    while ended < num_requests:
        while sent < num_requests and engine.stats().num_waiting < 64:
            engine.add(_request(sent, 2))
            sent += 1
        before = ended
        ended += sum(event.finished for event in engine.step())
        if before // every < ended // every:
            gc.collect()
            rows.append({"num_requests": ended, "rss_bytes": rss_bytes()})
            print(f"{ended:>8} requests{rows[-1]['rss_bytes'] / 2**20:>10.1f} MiB", flush=True)
    return rows


def rss_bytes() -> int:
    """Resident memory of this process, where /proc tells; else 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
