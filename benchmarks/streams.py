"""Many streams at once against a server process of its own: none lost, each as when alone, first tokens in order.

    python -m benchmarks.streams --num_streams=300 --output=result.json -- --max_num_seqs=64

What follows `--` are flags of dsjax-serve. Prints one line of JSON; exits 1 if a stream was lost or differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import machine, metrics, online, workloads
from benchmarks.metrics import Record
from benchmarks.workloads import WorkItem
from dsjax.errors import ConfigError
from servers import flags as server_flags
from servers.proto.dsjax.v1 import inference_pb2 as pb

PROGRAM = "benchmarks.streams"
USAGE = f"python -m {PROGRAM} [--num_streams=300] [--input_len=32] [--output_len=32] [-- FLAGS OF dsjax-serve]"
READY = "dsjax-serve ready on "


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_integer("num_streams", 300, "requests sent at once", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("input_len", 32, "mean prompt length; prompts differ by half", flag_values=values)
    flags.DEFINE_integer("output_len", 32, "tokens of an answer", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the prompts", flag_values=values)
    flags.DEFINE_string("output", "", "file for the result", flag_values=values)
    serve = server_flags.parse(values, argv, USAGE, positional=True)
    result = measure(
        num_streams=values.num_streams,
        input_len=values.input_len,
        output_len=values.output_len,
        seed=values.seed,
        serve_flags=serve or ("--config=nano",),
    )
    text = json.dumps(result)
    print(text)
    if values.output:
        Path(values.output).write_text(text + "\n", encoding="utf-8")
    return 1 if result["lost"] or result["different_from_solo"] else 0


def measure(
    *,
    num_streams: int = 300,
    input_len: int = 32,
    output_len: int = 32,
    seed: int = 0,
    serve_flags: Sequence[str] = ("--config=nano",),
) -> dict[str, Any]:
    """Serves with `serve_flags`, sends all requests one by one, then all at once, and compares.

    Besides the figures of `metrics.summarize` for the streams at once: `lost` (ended early or with an error),
    `different_from_solo`, `most_overtaken` (of any stream: how many that were sent later had their first token sooner)
    and `solo_p99_ttft_ms`.
    """
    with serving(serve_flags) as (address, pid):
        _, model = asyncio.run(online.server_info(address))
        items = workloads.make_random(
            num_prompts=num_streams,
            input_len=input_len,
            output_len=output_len,
            vocab_size=model.vocab_size,
            range_ratio=0.5,
            seed=seed,
        )
        items = [WorkItem(id=item.id, prompt=item.prompt, max_tokens=output_len) for item in items]
        alone, alone_s = _send(address, items, salt="solo", max_concurrency=1)
        cpu_before = machine.cpu_time_s(pid)
        records, duration_s = _send(address, items, salt="streams", max_concurrency=None)
        cpu_after = machine.cpu_time_s(pid)
    solo = {str(record.id): record.token_ids for record in alone}
    result = {
        **machine.describe(),
        "model_id": model.model,
        "num_streams": num_streams,
        "serve_flags": list(serve_flags),
        "lost": sum(not (r.ok and len(r.token_ids) == output_len) for r in records),
        "different_from_solo": num_streams - metrics.compare(records, solo)["match_all"],
        "most_overtaken": most_overtaken(records),
        "solo_p99_ttft_ms": metrics.summarize(alone, alone_s)["p99_ttft_ms"],
        **metrics.summarize(records, duration_s),
    }
    if cpu_before is not None and cpu_after is not None:
        result["cpu_s"] = cpu_after - cpu_before
    return result


def most_overtaken(records: Sequence[Record]) -> int:
    """The most later requests, of any request, that had their first token before it. Records are as they were sent."""
    first = [record.token_times_s[0] for record in records if record.ok]
    return max((sum(later < own for later in first[i + 1 :]) for i, own in enumerate(first)), default=0)


def _send(address: str, items: list[WorkItem], salt: str, max_concurrency: int | None) -> tuple[list[Record], float]:
    def params(item: WorkItem) -> pb.SamplingParams:
        return pb.SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)

    arrivals = [0.0] * len(items)
    return asyncio.run(
        online.run(address, items, arrivals=arrivals, max_concurrency=max_concurrency, params=params, cache_salt=salt)
    )


@contextlib.contextmanager
def serving(serve_flags: Sequence[str], program: Sequence[str] = ("servers.main",)) -> Iterator[tuple[str, int]]:
    """(HOST:PORT, process id) of a warm server, which ends with the block: `program` is its module and what comes
    before the flags. Raises ConfigError if it does not start."""
    command = [sys.executable, "-m", *program, "--port=0", "--grace_period_s=5", *serve_flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # its log goes to our stderr
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(READY):
                raise ConfigError(f"serve_flags={list(serve_flags)} start no server: see its log above")
            yield line.removeprefix(READY).strip(), process.pid
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
