"""Measures every claim and prints the table.

    python -m benchmarks.claims [--only=mix,prefix] [--model=dsjax-nano] [--output=benchmarks/results/claims.jsonl]

Rows are measured on the engine in this process with the model's CPU-sized settings of `bench.py`, or simulated, as the
table says. One line of JSON a row, with the machine, the versions and the configuration, is appended to --output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from absl import flags
from tqdm import tqdm

from benchmarks.claims.bench import Bench, Row
from benchmarks.machine import describe
from dsjax.errors import ConfigError
from servers import flags as server_flags

PROGRAM = "benchmarks.claims"
RESULTS = Path(__file__).parents[1] / "results" / "claims.jsonl"


def claims() -> dict[str, Callable[[Bench], Iterator[Row]]]:
    """By the name that --only takes, in the order of the table."""
    from benchmarks.claims import feedback, latency, memory, throughput

    measures = (
        throughput.mix,
        throughput.long_context,
        memory.pressure,
        feedback.load,
        latency.short_first,
        throughput.paged,
        latency.users,
        latency.streams,
        memory.prefix,
    )
    return {measure.__name__: measure for measure in measures}


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    known = claims()
    flags.DEFINE_list("only", list(known), "claims to measure", flag_values=values)
    flags.DEFINE_string("model", "dsjax-nano", "of the engine in this process", flag_values=values)
    flags.DEFINE_string(
        "compilation_cache_dir", "~/.cache/dsjax/xla", "where compiled programs are kept", flag_values=values
    )
    flags.DEFINE_string("output", str(RESULTS), "append lines of JSON to this file; empty: none", flag_values=values)
    server_flags.parse(values, argv, f"python -m {PROGRAM} [--only={','.join(known)}] [--output=FILE]")
    for name in values.only:
        if name not in known:
            raise ConfigError(f"only={name!r} must be one of {', '.join(known)}")
    bench = Bench(values.model, values.compilation_cache_dir)
    rows: list[Row] = []
    machine, begin = describe(), time.perf_counter()
    with tqdm(values.only, desc="claims", unit="claim") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            for row in known[name](bench):
                rows.append(row)
                if values.output:
                    with open(values.output, "a", encoding="utf-8") as file:
                        file.write(json.dumps({**machine, "model": values.model, **asdict(row)}, default=str) + "\n")
    print(table(rows))
    print(f"\n{len(rows)} rows in {time.perf_counter() - begin:.0f} s")
    return 0


def table(rows: Sequence[Row]) -> str:
    """In Markdown, a line a row."""
    lines = ["| claim | measured on | measure | bar | measured | met |", "|---|---|---|---|---|---|"]
    for row in rows:
        met = {True: "yes", False: "no", None: "-"}[row.met]
        lines.append(f"| {row.claim} | {row.where} | {row.measure} | {row.bar} | {row.measured} | {met} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
