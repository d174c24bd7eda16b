"""What a result must say to be repeated: the machine, the versions, the commit.  [no jax]"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = "dsjax jax jaxlib libtpu jax-cuda13-plugin flax numpy grpcio protobuf tokenizers".split()


def describe() -> dict[str, Any]:
    """{"date", "machine", "versions", "commit"}; the commit ends in "+" where the work tree differs from it."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "machine": {
            "cpu": _cpu_name(),
            "cores": num_cores(),
            "memory_gib": _memory_gib(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": versions,
        "commit": _commit(),
    }


def busy_s() -> float | None:
    """CPU seconds that all cores of the machine have worked, since it started; None where /proc does not tell."""
    try:
        fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]))
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_time_s(pid: int) -> float | None:
    """CPU seconds (user and system) that process `pid` has used, or None where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _commit() -> str:
    root = Path(__file__).parent.parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
