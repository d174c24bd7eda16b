"""What each format of the KV cache costs in quality, and what it saves.

    python -m benchmarks.cache_quality [--measure=logits,text,needles,bytes] [--corpus=DIR] [--output=FILE]

logits   error of random models' logits against recorded ones of an independent float32 implementation, at every
         position of every golden prompt and its continuation
text     bits per byte of the embedded model on its held-out text, as `training.evaluate` counts them
needles  how many tokens of a passage the embedded model continues rightly that stood at some depth of a long context
bytes    that a token takes in full pages of the Flash model, against what its format needs at least

The first three run the engine's own steps in float32, so that the cache's format is all that differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.machine import describe
from dsjax.errors import ConfigError
from servers import flags as server_flags

PROGRAM = "benchmarks.cache_quality"
MEASURES = ("logits", "text", "needles", "bytes")
DTYPES = ("float32", "bfloat16", "int8", "fp8", "fp8_fp4")
ROOT = Path(__file__).parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_list("measure", list(MEASURES), f"of {', '.join(MEASURES)}", flag_values=values)
    flags.DEFINE_list("kv_cache_dtype", list(DTYPES), "formats to measure", flag_values=values)
    flags.DEFINE_list(
        "golden", [], "folders of golden sets; default those of tests/golden and shared/golden", flag_values=values
    )
    flags.DEFINE_string(
        "corpus", "training_cache", "folder of the training text, fetched if missing", flag_values=values
    )
    flags.DEFINE_integer("documents", 0, "held-out chapters to measure on, at most; 0 is all", flag_values=values)
    flags.DEFINE_list("context", ["1024", "4088"], "tokens around a needle", flag_values=values)
    flags.DEFINE_integer("needles", 8, "of each depth and context", lower_bound=1, flag_values=values)
    flags.DEFINE_string("output", "", "file to write the results to, as lines of JSON", flag_values=values)
    server_flags.parse(values, argv, f"python -m {PROGRAM} [--measure={','.join(MEASURES)}] [--output=FILE]")
    _one_of("measure", values.measure, MEASURES)
    _one_of("kv_cache_dtype", values.kv_cache_dtype, DTYPES)
    from benchmarks import quality_scores as scores

    dtypes = values.kv_cache_dtype
    golden = [Path(folder) for folder in values.golden] or golden_folders()
    documents = _documents(values) if {"text", "needles"} & set(values.measure) else []
    contexts = list(map(int, values.context))
    runs: dict[str, tuple[Callable[[], list[dict[str, Any]]], Callable[[list[dict[str, Any]]], str]]] = {
        "logits": (lambda: scores.logits(golden, dtypes), logits_table),
        "text": (lambda: scores.text(documents, dtypes), text_table),
        "needles": (lambda: scores.needles(documents, contexts, values.needles, dtypes), needles_table),
        "bytes": (lambda: scores.bytes_a_token(dtypes), bytes_table),
    }
    records = [describe()]
    for name in values.measure:
        measure, table = runs[name]
        rows = measure()
        print(f"{table(rows)}\n", flush=True)
        records += [{"measure": name, **row} for row in rows]
    if values.output:
        Path(values.output).write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0


def _one_of(flag: str, given: list[str], allowed: Sequence[str]) -> None:
    for value in given:
        if value not in allowed:
            raise ConfigError(f"{flag}={value!r} must be one of {', '.join(allowed)}")


def golden_folders() -> list[Path]:
    """Of every golden set beside this checkout, by name."""
    found = {c.parent.name: c.parent for c in (ROOT.parent / "shared" / "golden").glob("*/golden.npz")}
    found |= {c.parent.name: c.parent for c in (ROOT / "tests" / "golden").glob("*/golden.npz")}
    return [found[name] for name in sorted(found)]


def _documents(values: flags.FlagValues) -> list[Any]:
    from training import corpus

    documents = corpus.split(corpus.load(Path(values.corpus).resolve()))[1]
    count = values.documents or len(documents)
    return documents[:: -(-len(documents) // count)]  # over all books


def _table(titles: str, rows: list[tuple[str, ...]]) -> str:
    lines = [titles, "|" + "---|" * (titles.count("|") - 1)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def logits_table(rows: list[dict[str, Any]]) -> str:
    """One line a format and golden set; logits there are of order `logit RMS`."""
    return _table(
        "| kv_cache_dtype | golden set | positions | logit RMS | RMS error | largest error | top-1 agreement |",
        [
            (
                row["kv_cache_dtype"],
                row["set"],
                str(row["positions"]),
                f"{row['logit_rms']:.3f}",
                f"{row['rms_error']:.1e}",
                f"{row['max_error']:.1e}",
                f"{100 * row['agreement']:.2f} %",
            )
            for row in rows
        ],
    )


def text_table(rows: list[dict[str, Any]]) -> str:
    """One line a format."""
    return _table(
        "| kv_cache_dtype | bits per byte | against the first | tokens | top-1 right |",
        [
            (
                row["kv_cache_dtype"],
                f"{row['bits_per_byte']:.5f}",
                f"{row['bits_per_byte'] - rows[0]['bits_per_byte']:+.5f}",
                str(row["tokens"]),
                f"{100 * row['top1']:.2f} %",
            )
            for row in rows
        ],
    )


def needles_table(rows: list[dict[str, Any]]) -> str:
    """One line a format, context and depth."""
    return _table(
        "| kv_cache_dtype | context | depth | recall | without the needle | nats a token | same token as the first |",
        [
            (
                row["kv_cache_dtype"],
                str(row["context"]),
                f"{row['depth']:.2f}",
                f"{100 * row['recall']:.1f} %",
                f"{100 * row['recall_without']:.1f} %",
                f"{row['nats']:.3f}",
                f"{100 * row['same']:.1f} %",
            )
            for row in rows
        ],
    )


def bytes_table(rows: list[dict[str, Any]]) -> str:
    """One line a format."""
    return _table(
        "| kv_cache_dtype | bytes a token | in a TPU's tiles | at least | ratio |",
        [
            (
                row["kv_cache_dtype"],
                f"{row['bytes']:,.1f}",
                f"{row['tiled_bytes']:,.1f}",
                f"{row['theory']:,.2f}",
                f"{max(row['bytes'], row['tiled_bytes']) / row['theory']:.3f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
