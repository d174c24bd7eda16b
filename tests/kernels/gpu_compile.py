"""Compiles the GPU kernels' cases for one GPU, which need not be there: python -m tests.kernels.gpu_compile h100

A process each, since Mosaic GPU keeps the first architecture it saw and would pass everything for a second one.
Prints a line of JSON a case: its name, temporary bytes, and the error, empty where it compiled. ptxas says on stderr,
for each kernel, its architecture, registers and spills.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WGMMA = "wgmma, of Hopper alone"  # a case that a Blackwell GPU must refuse
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One case. The last three are of its kernel, empty or 0 where none was compiled."""

    name: str
    temp_bytes: int
    error: str
    architecture: str
    registers: int
    spill_bytes: int


def has_compiler() -> bool:
    packages = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13")
    return all(_installed(package) for package in packages)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent
        return False


def compile_all(gpu: str, only: str = "") -> list[Compiled]:
    """For one of dsjax.aot.GPUS, the cases whose names contain `only`, in a process of their own."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", "tests.kernels.gpu_compile", gpu, only]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {gpu} failed:\n{done.stdout[-4000:]}")
    results, since = [], ""
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            since += line + "\n"
            continue
        results.append(
            Compiled(
                **json.loads(line),
                architecture=",".join(sorted(set(re.findall(r"mosaic_gpu_kernel' for '(\w+)'", since)))),
                registers=max(map(int, re.findall(r"Used (\d+) registers", since)), default=0),
                spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill stores", since))),
            )
        )
        since = ""
    return results


def main(gpu: str, only: str) -> None:
    from dsjax import aot
    from tests.kernels.gpu_cases import cases

    device = aot.devices(aot.GPUS[gpu](1))[0]
    for case in cases():
        if only not in case.name:
            continue
        temp_bytes, error = 0, ""
        try:
            compiled = case.lower(device).compile()
            temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        except Exception as refused:  # Mosaic, XLA and ptxas each have their own kind
            error = str(refused)
        print(json.dumps({"name": case.name, "temp_bytes": temp_bytes, "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
