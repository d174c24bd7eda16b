"""Compiles every kernel for accelerators that are not there, or times what this machine runs in their place.

    python -m benchmarks.kernels --compile [--target=v6e,h100] [--only=csa]
    python -m benchmarks.kernels [--only=decode]

`--compile` asks the vendors' own compilers and exits with 1 if any case is refused. What a kernel moves and computes is
its own estimate, at the longest context of the case; the roofline time is the least that its device takes for that.
Without it this machine's device runs the cases: an accelerator all of them, a CPU the small ones, on its jnp path.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from benchmarks.machine import describe
from benchmarks.roofline import ROOFS
from dsjax.errors import ConfigError
from servers import flags as server_flags

PROGRAM = "benchmarks.kernels"
USAGE = f"python -m {PROGRAM} [--compile [--target=v6e,h100]] [--only=SUBSTRING] [--output=FILE]"


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_bool("compile", False, "compile for `target` instead of timing this machine", flag_values=values)
    flags.DEFINE_list("target", list(ROOFS), "devices to compile for", flag_values=values)
    flags.DEFINE_string("only", "", "only cases whose names contain this", flag_values=values)
    flags.DEFINE_integer("repeat", 7, "timed runs of a case", lower_bound=1, flag_values=values)
    flags.DEFINE_string("output", "", "file to write the results to, as lines of JSON", flag_values=values)
    server_flags.parse(values, argv, USAGE)
    for name in values.target:
        if name not in ROOFS:
            raise ConfigError(f"target={name!r} must be one of {', '.join(ROOFS)}")
    if values["target"].present and not values.compile:
        raise ConfigError("target is for --compile: what is timed is this machine's own device")
    if values.compile:
        os.environ["JAX_PLATFORMS"] = "cpu"  # devices are described, none is needed
        rows = _compile(values.target, values.only)
        print(compiled_table(rows))
    else:
        rows = _time(values.only, values.repeat)
        print(timed_table(rows))
    failed = [row for row in rows if row["error"]]
    for row in failed:
        print(f"{PROGRAM}: {row['name']} on {row['target']} failed: {row['error']}", file=sys.stderr)
    if values.output:
        records = [describe(), *rows]
        Path(values.output).write_text("".join(json.dumps(record) + "\n" for record in records))
    return 1 if failed else 0


def _compile(targets: list[str], only: str) -> list[dict[str, Any]]:
    import jax

    from benchmarks.kernel_compile import compile_apart
    from dsjax.aot import CHIPS, missing_packages
    from pallas_kernels import all_cases

    for name in targets:
        if missing := missing_packages(CHIPS[name]):
            raise ConfigError(f"target={name} needs the packages {', '.join(missing)}: pip install {' '.join(missing)}")
        if CHIPS[name].platform == "cuda" and jax.__version_info__ < (0, 12):
            raise ConfigError(f"target={name} needs JAX 0.12 on Python 3.12 or newer, this is JAX {jax.__version__}")
    count = sum(only in case.name for case in all_cases.cases())
    if not count:
        raise ConfigError(f"only={only!r} is in no case's name")
    rows = []
    with tqdm(total=count * len(targets), desc="cases") as bar:
        for name in targets:
            for result in compile_apart(name, only):
                rows.append(with_roof(dataclasses.asdict(result)))
                bar.set_postfix_str(f"{name} {result.name}")
                bar.update()
    return rows


def with_roof(row: dict[str, Any]) -> dict[str, Any]:
    """A compiled case, with the time its target takes at least and what bounds it, for kernels alone."""
    roof, work = ROOFS[row["target"]], (row["bytes_moved"], row["flops"])
    known = bool(row["kernels"]) and not row["error"]
    return row | {
        "roofline_us": roof.seconds(*work) * 1e6 if known else None,
        "bound": roof.bound(*work) if known else "",
    }


def compiled_table(rows: list[dict[str, Any]]) -> str:
    """One line a case and target, in Markdown."""
    lines = [
        "| case | target | result | MiB moved | GFLOP | roofline µs | bound by | VMEM or shared KiB | registers"
        " | spilled B | temp KiB | compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['name']} | {row['target']} |"
        if row["error"] or not row["kernels"]:
            lines.append(f"{start} {'REFUSED' if row['error'] else 'jnp path'} |" + " |" * 9)
            continue
        gpu = bool(row["architectures"])
        cells = (
            "compiles",
            f"{row['bytes_moved'] / 2**20:.1f}",
            f"{row['flops'] / 1e9:.2f}",
            f"{row['roofline_us']:.1f}",
            row["bound"],
            f"{row['fast_bytes'] / 2**10:.0f}",
            str(row["registers"]) if gpu else "",
            str(row["spill_bytes"]) if gpu else "",
            f"{row['temp_bytes'] / 2**10:.0f}",
            f"{row['compile_s']:.1f}",
        )
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(only: str, repeat: int) -> list[dict[str, Any]]:
    import jax

    from benchmarks.kernel_timing import time_case
    from pallas_kernels import all_cases

    device = jax.devices()[0]
    cases = all_cases.small_cases() if device.platform == "cpu" else all_cases.cases()
    cases = [case for case in cases if only in case.name]
    if not cases:
        raise ConfigError(f"only={only!r} is in no case's name")
    return [dataclasses.asdict(time_case(case, device, repeat)) for case in tqdm(cases, desc="cases")]


def timed_table(rows: list[dict[str, Any]]) -> str:
    """One line a case, in Markdown."""
    lines = [
        "| case | device | path | MiB moved | GFLOP | ms (range) | GB/s | GFLOP/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['name']} | {row['target']} |"
        if row["error"]:
            lines.append(f"{start} FAILED |" + " |" * 5)
            continue
        low, high = row["range_ms"]
        cells = (
            ", ".join(row["kernels"]) or "jnp",
            f"{row['bytes_moved'] / 2**20:.1f}",
            f"{row['flops'] / 1e9:.2f}",
            f"{row['median_ms']:.2f} ({low:.2f}-{high:.2f})",
            f"{row['bytes_moved'] / row['median_ms'] / 1e6:.1f}",
            f"{row['flops'] / row['median_ms'] / 1e6:.1f}",
        )
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
