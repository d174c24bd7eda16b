"""What a compiled program sends between devices, read from its text.  [no jax]"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: how many a device takes part in, and the bytes of their results on it."""

    count: int
    num_bytes: int


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def collectives(text: str) -> dict[str, Traffic]:
    """{kind: traffic} of one run of a compiled program's text.

    What is in a loop counts as often as the compiler knows it to run, once where it does not; of a conditional's
    branches the one that sends most counts.
    """
    computations = _computations(text)
    entry = next(name for name, (is_entry, _) in computations.items() if is_entry)
    seen: dict[str, Counter] = {}

    def total(name: str) -> Counter:
        if name not in seen:
            seen[name] = sum((_of_line(line) for line in computations[name][1]), Counter())
        return seen[name]

    def _of_line(line: str) -> Counter:
        match = _OP.match(line)
        if not match:
            return Counter()
        result, op, rest = match.groups()
        found: Counter = Counter()
        kind = op.removesuffix("-start")
        if kind in KINDS:
            found[kind, "count"] += 1
            found[kind, "bytes"] += _result_bytes(result, op)
            return found
        if op == "conditional":
            branches = _BRANCHES.search(rest)
            names = [n.strip().lstrip("%") for n in branches[1].split(",")] if branches else []
            names += [name for role, name in _CALLED.findall(rest) if role.endswith("_computation")]
            return max(
                (total(name) for name in names), key=lambda c: sum(n for (_, what), n in c.items() if what == "bytes")
            )
        trips = _TRIPS.search(rest)
        times = int(trips[1]) if op == "while" and trips else 1
        for role, name in _CALLED.findall(rest):
            if role in ("body", "condition", "calls") or (role == "to_apply" and op == "call"):
                for key, n in total(name).items():
                    found[key] += times * n
        return found

    counts = total(entry)
    return {k: Traffic(counts[k, "count"], counts[k, "bytes"]) for k in KINDS if counts[k, "count"]}


def _computations(text: str) -> dict[str, tuple[bool, list[str]]]:
    """{name: (whether it is where the program begins, its lines)}."""
    out: dict[str, tuple[bool, list[str]]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match and not line.startswith(" "):
            lines = []
            out[match[1]] = line.startswith("ENTRY "), lines
        else:
            lines.append(line)
    return out


def _result_bytes(result: str, op: str) -> int:
    """Of an op's result; that of a started op also has its operands, and it is their last array that counts."""
    shapes = [_bytes(dtype, dims) for dtype, dims in _SHAPE.findall(result)]
    if not op.endswith("-start") or not result.startswith("("):
        return sum(shapes)
    return max(shapes)


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    size = 1
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size * bits // 8
