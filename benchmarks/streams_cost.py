"""What many slow streams cost the server's process, and how long a first token takes to reach its client.

    python -m benchmarks.streams_cost --num_streams=1,300 --output=results.jsonl -- --max_messages_per_s=0

For each number of streams a server process of its own (`benchmarks.paced`: the real server, engine and tokenizer, on
a device that is not there), and a client process that keeps so many streams running, each a token a step. This process
asks for short answers one after the other and times their first tokens: from the return of the engine's step to the
client's hands. What follows `--` are flags of dsjax-serve.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from benchmarks import machine, streams, streams_load
from benchmarks.streams_load import Load
from dsjax.config import ModelConfig
from dsjax.detokenizer import Detokenizer
from dsjax.load import model_dir
from dsjax.request import SamplingParams
from dsjax.tokenizer import Tokenizer
from servers import flags as server_flags

PROGRAM = "benchmarks.streams_cost"
USAGE = f"python -m {PROGRAM} [--num_streams=1,300] [--duration_s=15] [-- FLAGS OF dsjax-serve]"
WARM_S = 5.0  # before what is measured: the load's ramp, and connections
MODEL = "dsjax-nano"  # its tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values: Any = flags.FlagValues()
    flags.DEFINE_list("num_streams", ["1", "300"], "streams at a time, a run each", flag_values=values)
    flags.DEFINE_float("step_ms", 1000 / 30, "of a step: every stream's time a token", 0.1, flag_values=values)
    flags.DEFINE_integer("output_len", 900, "tokens of a stream, after which another begins", 1, flag_values=values)
    flags.DEFINE_integer("stream_interval", 0, "that the streams ask for; 0 asks for none", 0, flag_values=values)
    flags.DEFINE_float("duration_s", 15.0, "that is measured", 0.1, flag_values=values)
    flags.DEFINE_string("output", "", "append each result as a line of JSON to this file", flag_values=values)
    serve_flags = server_flags.parse(values, argv, USAGE, positional=True)
    print(HEADER)
    for num_streams in map(int, values.num_streams):
        result = measure(
            num_streams=num_streams,
            step_ms=values.step_ms,
            output_len=values.output_len,
            stream_interval=values.stream_interval,
            duration_s=values.duration_s,
            serve_flags=serve_flags,
        )
        print(row(result), flush=True)
        if values.output:
            with Path(values.output).open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    return 0


COLUMNS = (
    ("streams", "{num_streams}"),
    ("tokens/s", "{tokens_per_s:.0f}"),
    ("messages/s", "{messages_per_s:.0f}"),
    ("front end, of a core", "{cpu[front_end]:.1%}"),
    ("event loop", "{cpu[event_loop]:.1%}"),
    ("gRPC's threads", "{cpu[grpc_threads]:.1%}"),
    ("hand-over", "{cpu[hand_over]:.1%}"),
    ("detokenising", "{cpu[detokenizing]:.1%}"),
    ("engine's steps", "{cpu[engine_steps]:.1%}"),
    ("first token, ms after the step: median", "{p50_first_token_ms:.2f}"),
    ("P99", "{p99_first_token_ms:.2f}"),
    ("step's host part after the device, ms", "{p50_in_engine_ms:.2f}"),
    ("first tokens", "{num_first_tokens}"),
)
HEADER = f"| {' | '.join(name for name, _ in COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def row(result: dict[str, Any]) -> str:
    return f"| {' | '.join(text.format(**result) for _, text in COLUMNS)} |"


def measure(
    *,
    num_streams: int,
    step_ms: float = 1000 / 30,
    output_len: int = 900,
    stream_interval: int = 0,
    duration_s: float = 15.0,
    serve_flags: Sequence[str] = (),
) -> dict[str, Any]:
    """One server under the load of `num_streams` (1: the short answers alone). Raises ConfigError.

    "cpu" has shares of a core; `front_end` is the process without the engine's steps, but with their detokenising.
    """
    path = model_dir(MODEL)
    vocab_size = ModelConfig.from_dir(path).vocab_size
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients,
    ):
        log_path = Path(folder) / "log.json"
        program = ["benchmarks.paced", f"--step_ms={step_ms}", f"--log={log_path}", "--", "--config=nano"]
        program += [f"--max_num_seqs={num_streams}", "--max_num_batched_tokens=2048"]
        with streams.serving(["--grace_period_s=0", *serve_flags], program) as (address, pid):  # it has then ended
            begin_s = time.monotonic() + WARM_S
            load = Load(
                address=address,
                vocab_size=vocab_size,
                num_streams=num_streams - 1,
                output_len=output_len,
                stream_interval=stream_interval,
                begin_s=begin_s,
                end_s=begin_s + duration_s,
            )
            counted = clients.submit(streams_load.run, load) if num_streams > 1 else None
            time.sleep(max(0.0, begin_s - time.monotonic()))
            before_s, before = time.monotonic(), thread_times_s(pid)
            received = streams_load.time_first_tokens(load, "first-")
            after_s, after = time.monotonic(), thread_times_s(pid)
            counts = counted.result() if counted else {"messages": 0, "tokens": 0, "streams": 0, "wrong": 0}
        log = json.loads(log_path.read_text(encoding="utf-8"))
    if counts["wrong"]:
        raise RuntimeError(f"{counts['wrong']} of {counts['streams']} streams had wrong tokens")
    seconds = after_s - before_s
    used = {thread: (after[thread] - before.get(thread, 0.0)) / seconds for thread in after}
    tokens_per_s = counts["tokens"] / duration_s
    cpu = {
        "process": sum(used.values()),
        "event_loop": used[pid],
        "engine_steps": sum(cpu_s for end_s, cpu_s in log["steps"] if before_s <= end_s < after_s) / seconds,
        "detokenizing": tokens_per_s * detokenize_s(Tokenizer.from_path(path), vocab_size),
    }
    cpu["hand_over"] = used[log["thread_id"]] - cpu["engine_steps"]
    cpu["grpc_threads"] = cpu["process"] - used[pid] - used[log["thread_id"]]
    cpu["front_end"] = cpu["process"] - cpu["engine_steps"] + cpu["detokenizing"]
    at = {request_id: log["first_tokens"][request_id] for request_id in received}
    latency_ms = [1e3 * (received[i] - returned_s) for i, (_, returned_s) in at.items()]
    return {
        **machine.describe(),
        "num_streams": num_streams,
        "step_ms": step_ms,
        "output_len": output_len,
        "stream_interval": stream_interval,
        "serve_flags": list(serve_flags),
        "tokens_per_s": tokens_per_s,
        "messages_per_s": counts["messages"] / duration_s,
        "cpu": cpu,
        "p50_first_token_ms": float(np.percentile(latency_ms, 50)),
        "p99_first_token_ms": float(np.percentile(latency_ms, 99)),
        "p50_in_engine_ms": float(
            np.percentile([1e3 * (returned_s - read_s) for read_s, returned_s in at.values()], 50)
        ),
        "num_first_tokens": len(latency_ms),
    }


def detokenize_s(tokenizer: Tokenizer, vocab_size: int, num_tokens: int = 30_000) -> float:
    """CPU seconds a token."""
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    for token in range(vocab_size):  # each token's text is kept
        detokenizer.add(token)
    begin_s = time.thread_time()
    for number in range(num_tokens):
        detokenizer.add(number % vocab_size)
    return (time.thread_time() - begin_s) / num_tokens


def thread_times_s(pid: int) -> dict[int, float]:
    """CPU seconds that each thread of a process has used, by thread id; the first thread's is the process's."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            times[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times


if __name__ == "__main__":
    sys.exit(main())
