"""From when each token arrived to the figures of a serving benchmark, with the names of `vllm bench serve`.  [no jax]

ttft  time to first token: from sending a request to its first token
tpot  time per output token after the first, of one request: (latency - ttft) / (tokens - 1)
itl   inter-token latency: between two messages with tokens
e2el  end-to-end latency: from sending a request to its last token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)
PADDING = [f"num_{kind}_{what}_tokens" for kind in ("decode", "mixed") for what in ("bucket", "padded")]


@dataclass(kw_only=True)
class Record:
    """What happened to one request. Times are seconds of one clock."""

    id: int
    prompt_len: int
    start_s: float  # when it was sent
    token_times_s: list[float] = field(default_factory=list)  # when each message with tokens came
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    error: str = ""  # "" is success

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.token_ids)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.start_s

    @property
    def latency_s(self) -> float:
        return self.token_times_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        return (self.latency_s - self.ttft_s) / (len(self.token_ids) - 1) if len(self.token_ids) > 1 else None

    @property
    def itls_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times_s[:-1], self.token_times_s[1:], strict=True)]


def summarize(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """The figures of one run that took `duration_s`; failed requests are counted and left out of all else."""
    done = [r for r in records if r.ok]
    num_in, num_out = sum(r.prompt_len for r in done), sum(len(r.token_ids) for r in done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "total_cached_tokens": sum(r.cached_tokens for r in done),
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
        "max_concurrent_requests": max_concurrent(done),
    }
    series = {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done if r.tpot_s is not None],
        "itl": [x for r in done for x in r.itls_s],
        "e2el": [r.latency_s for r in done],
    }
    for name, seconds in series.items():
        ms = 1000.0 * np.asarray(seconds or [0.0])  # vLLM also reports 0 where there is nothing to report
        result[f"mean_{name}_ms"] = float(ms.mean())
        result[f"median_{name}_ms"] = float(np.median(ms))
        result[f"std_{name}_ms"] = float(ms.std())
        for p in PERCENTILES:
            result[f"p{p}_{name}_ms"] = float(np.percentile(ms, p))
    return result


def details(records: Sequence[Record]) -> dict[str, Any]:
    """One entry a request, in the order of `records`: `vllm bench serve --save-detailed`."""
    begin = min((r.start_s for r in records), default=0.0)
    return {
        "input_lens": [r.prompt_len for r in records],
        "output_lens": [len(r.token_ids) for r in records],
        "start_times": [r.start_s - begin for r in records],
        "ttfts": [r.ttft_s if r.ok else 0.0 for r in records],
        "itls": [r.itls_s for r in records],
        "errors": [r.error for r in records],
    }


def max_concurrent(records: Sequence[Record]) -> int:
    """The largest number of requests that were being served at one time."""
    # at equal times an end comes before a start
    changes = sorted([(r.start_s, 1) for r in records] + [(r.token_times_s[-1], -1) for r in records])
    peak = live = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def padded_shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Padding in the steps between two readings of an engine's counters (`dsjax/runner/padding.py`), of their buckets'
    tokens: of decode steps, of mixed ones and of all; 0 where there were none."""
    grown = {name: after[name] - before[name] for name in PADDING}
    bucket = {kind: grown[f"num_{kind}_bucket_tokens"] for kind in ("decode", "mixed")}
    padded = {kind: grown[f"num_{kind}_padded_tokens"] for kind in bucket}
    shares = {f"{kind}_padded_share": padded[kind] / max(1, bucket[kind]) for kind in bucket}
    return {**shares, "padded_share": sum(padded.values()) / max(1, sum(bucket.values()))}


def compare(records: Sequence[Record], reference: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """How many answers begin like, and are equal to, the reference tokens {id as text: ids}, of those it has."""
    known = [(r.token_ids, list(reference[str(r.id)])) for r in records if str(r.id) in reference]
    return {
        "match_first": sum(got[:1] == want[:1] for got, want in known),
        "match_all": sum(got == want for got, want in known),
        "match_of": len(known),
        "mismatched_ids": [
            r.id for r in records if str(r.id) in reference and r.token_ids != list(reference[str(r.id)])
        ],
    }


def report(result: Mapping[str, Any]) -> str:
    """The lines of `vllm bench serve` that people look for."""
    rows: list[tuple[str, str]] = [
        ("Successful requests:", f"{result['completed']}"),
        ("Failed requests:", f"{result['failed']}"),
        ("Benchmark duration (s):", f"{result['duration']:.2f}"),
        ("Total input tokens:", f"{result['total_input_tokens']}"),
        ("Total generated tokens:", f"{result['total_output_tokens']}"),
        ("Prompt tokens from the prefix cache:", f"{result['total_cached_tokens']}"),
        ("Request throughput (req/s):", f"{result['request_throughput']:.2f}"),
        ("Output token throughput (tok/s):", f"{result['output_throughput']:.2f}"),
        ("Total token throughput (tok/s):", f"{result['total_token_throughput']:.2f}"),
    ]
    if "padded_share" in result:
        rows.append(("Padding in the steps (decode; mixed):", _padding(result)))
    for name in ("ttft", "tpot", "itl", "e2el"):
        rows += [
            (f"{label} {name.upper()} (ms):", f"{result[f'{key}_{name}_ms']:.2f}")
            for label, key in (("Mean", "mean"), ("Median", "median"), ("P99", "p99"))
        ]
    if "match_of" in result:
        rows.append(("First token = reference:", f"{result['match_first']} of {result['match_of']}"))
        rows.append(("All tokens = reference:", f"{result['match_all']} of {result['match_of']}"))
    return "\n".join(f"{label:<40}{value:>12}" for label, value in rows)


def _padding(result: Mapping[str, Any]) -> str:
    return f"{result['padded_share']:.1%} ({result['decode_padded_share']:.1%}; {result['mixed_padded_share']:.1%})"
