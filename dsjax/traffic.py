"""What a compiled program sends between devices, read from XLA's text of it.  [no jax]"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "f8e4m3fn": 8, "f8e8m0fnu": 8, "s4": 4, "u4": 4}
_OP = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"(\d+)"\}')
_LESS = re.compile(r"\s*ROOT .* compare\(%[\w.\-]+, %([\w.\-]+)\), direction=LT")


@dataclass(frozen=True)
class Collective:
    """One collective of the program, on each device."""

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, dimensions) of its results
    group: int  # devices that take part together
    times: int  # runs in one call, by the loops around it; a loop of unknown length counts once
    conditional: bool  # in a branch that may not be taken
    scope: str  # where in the model: JAX's op_name

    @property
    def result_bytes(self) -> int:
        return sum(_bits(dtype) * math.prod(dims) // 8 for dtype, dims in self.shapes)

    @property
    def sent_bytes(self) -> int:
        """Bytes a device sends in one call, by the best known way (a ring): it receives as many."""
        n, size = self.group, self.result_bytes
        once = {
            "all-reduce": 2 * size * (n - 1) / n,
            "all-gather": size * (n - 1) / n,
            "reduce-scatter": size * (n - 1),
            "all-to-all": size * (n - 1) / n,
            "collective-permute": size,
        }[self.kind]
        return round(once) * self.times


def collectives(text: str) -> list[Collective]:
    """Every collective of a program (`compiled.as_text()`) among more than one device."""
    bodies = dict(_computations(text))
    times, branches = _times(bodies)
    found = []
    for name, lines in bodies.items():
        for line in lines:
            match = _OP.match(line)
            if match is None or times[name] == 0:
                continue
            kind, shapes = match[2], _shapes(match[1])
            if match[3] and (kind != "all-reduce" or match[1].startswith("((")):
                shapes = shapes[len(shapes) // 2 :]  # an asynchronous start's tuple has the operands first
            group = 2 if kind == "collective-permute" else _group(line)
            if group > 1:
                found.append(Collective(kind, tuple(shapes), group, times[name], name in branches, _scope(line)))
    return found


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", []
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            name, lines = ("ENTRY" if start[1] else start[2]), []
        elif line.startswith("}") and name:
            yield name, lines
            name = ""
        else:
            lines.append(line)


def _times(bodies: dict[str, list[str]]) -> tuple[dict[str, int], set[str]]:
    """How often each computation runs in one call of the program, and which may not run."""
    times: dict[str, int] = dict.fromkeys(bodies, 0)
    conditional: set[str] = set()

    def visit(name: str, count: int, in_branch: bool) -> None:
        times[name] += count
        if in_branch:
            conditional.add(name)
        for line in bodies[name]:
            called = [(how, other) for how, other in _CALLED.findall(line)]
            for group in _BRANCHES.findall(line):
                called += [("branch", other.strip().lstrip("%")) for other in group.split(",")]
            for how, other in called:
                if other in bodies:
                    trips = _trips(line, bodies) if how == "body" else 1
                    branch = in_branch or how in ("branch", "true_computation", "false_computation")
                    visit(other, count * trips, branch)

    visit("ENTRY", 1, False)
    return times, conditional


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """How often the body of a while op runs; 1 where the text does not tell.

    The CPU's and the GPU's compiler write it down. The TPU's does not, but the condition of a loop of fixed length is
    `i < constant` there, and JAX's loops count from 0.
    """
    if known := _TRIPS.search(line):
        return int(known[1])
    name = re.search(r"condition=%?([\w.\-]+)", line)
    condition = bodies.get(name[1], []) if name else []
    compared = next((m for op in condition if (m := _LESS.match(op))), None)
    if compared is None:
        return 1
    limit = re.compile(rf"\s*%{re.escape(compared[1])} = s32\[\]\S* constant\((\d+)\)")
    return next((int(m[1]) for op in condition if (m := limit.match(op))), 1)


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(text)]


def _group(line: str) -> int:
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):  # by the names of axes: JAX 0.12
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        return math.prod(sizes[name] for name in re.findall(r"'([^']*)'", match[2]))
    return 1


def _scope(line: str) -> str:
    match = re.search(r'op_name="([^"]*)"', line)
    return match[1] if match else ""


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.fullmatch(r"[a-z]+(\d+)", dtype)
    if match is None:
        raise ValueError(f"unknown dtype {dtype!r} in a program's text")
    return int(match[1])
