"""Compiles cases of kernels for one target, which need not be there.

    python -m benchmarks.kernel_compile h100 pallas_kernels.all_cases [SUBSTRING]

A process each (`compile_apart` starts it), since Mosaic GPU keeps the first architecture it saw and would pass
everything for a second one. It prints a line of JSON a case; between them ptxas says what each new GPU kernel takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES = "pallas_kernels.all_cases"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One case on one target; nothing was compiled where the target has no kernel for it."""

    target: str
    name: str
    kernels: list[str]  # none: the target takes the jnp path
    bytes_moved: int = 0  # by all kernels together, as they estimate it
    flops: int = 0
    fast_bytes: int = 0  # of VMEM, or of a block's shared memory, of the kernel that takes most
    temp_bytes: int = 0  # that the program keeps beside its inputs and results
    compile_s: float = 0.0
    error: str = ""  # what the compiler said where it refused
    # Of GPU kernels, as ptxas says:
    architectures: list[str] = field(default_factory=list)
    registers: int = 0  # a thread, of the kernel that takes most
    spill_bytes: int = 0


def compile_apart(target: str, only: str = "", cases: str = "") -> Iterator[Compiled]:
    """For one of dsjax.aot.CHIPS, the cases of module `cases` (all) whose names contain `only`, as they are done."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", "benchmarks.kernel_compile", target, cases or CASES, only]
    said: list[str] = []
    known: dict[str, dict[str, Any]] = {}  # what ptxas said, by the kernel: one that two cases share is compiled once
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        since = 0
        for line in process.stdout:
            if line.startswith('{"target"'):
                record = json.loads(line)
                programs = record.pop("programs")
                if ptxas := _ptxas("".join(said[since:])):
                    known[programs] = ptxas
                yield Compiled(**record, **known.get(programs, {}))
                since = len(said)
            else:
                said.append(line)
    if process.returncode:
        raise RuntimeError(f"compiling for {target} failed:\n{''.join(said)[-4000:]}")


def _ptxas(text: str) -> dict[str, Any]:
    found = re.findall(r"mosaic_gpu_kernel' for '(\w+)'", text)
    if not found:
        return {}
    return {
        "architectures": sorted(set(found)),
        "registers": max(map(int, re.findall(r"Used (\d+) registers", text)), default=0),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", text))),
    }


def main(target: str, module: str, only: str = "") -> None:
    from dsjax import aot

    device = aot.devices(aot.CHIPS[target])[0]
    for case in importlib.import_module(module).cases():
        if only in case.name:
            report, programs = compile_case(target, case, device)
            record = {k: v for k, v in dataclasses.asdict(report).items() if k not in _OF_PTXAS}
            print(json.dumps(record | {"programs": programs}), flush=True)


_OF_PTXAS = ("architectures", "registers", "spill_bytes")


def compile_case(target: str, case: Any, device: Any) -> tuple[Compiled, str]:
    """Also the GPU kernels' hashes, by which a compiled one is known again."""
    from benchmarks.kernel_cost import kernels

    start = time.monotonic()
    known: dict[str, Any] = {"target": target, "name": case.name, "kernels": []}
    programs = ""
    try:
        traced, lowered = case.stages(device)
        found = kernels(traced.jaxpr)
        known |= {
            "kernels": [k.name for k in found],
            "bytes_moved": sum(k.bytes_moved for k in found),
            "flops": sum(k.flops for k in found),
        }
        if not found:
            return Compiled(**known), programs
        hashes = re.findall(r'kernel_hash = "([^"]*)"', lowered.as_text() or "")
        programs = hashlib.sha256("".join(hashes).encode()).hexdigest()
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        assert memory is not None  # every compiler here gives it
        scoped = re.findall(r'"used_scoped_memory_configs":(\[[^]]*\])', compiled.as_text() or "")
        vmem = [int(c["size"]) for text in scoped for c in json.loads(text) if c["memory_space"] == "1"]
        return Compiled(
            **known,
            fast_bytes=max([*vmem, *(k.shared_bytes for k in found)]),
            temp_bytes=memory.temp_size_in_bytes,
            compile_s=time.monotonic() - start,
        ), programs
    except Exception as refused:  # Mosaic, XLA and ptxas each have their own kind
        return Compiled(
            **known, error=f"{type(refused).__name__}: {refused}", compile_s=time.monotonic() - start
        ), programs


if __name__ == "__main__":
    main(*sys.argv[1:])
