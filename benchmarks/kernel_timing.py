"""Times one case on a device of this machine."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_cost import Kernel, kernels
from pallas_kernels.case import Case
from pallas_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One case."""

    target: str  # the device's kind
    name: str
    kernels: list[str]  # none: the jnp path
    bytes_moved: int = 0  # as the kernels estimate it; for the jnp path, as a TPU's kernels would at these sizes
    flops: int = 0
    median_ms: float = 0.0
    range_ms: tuple[float, float] = (0.0, 0.0)
    error: str = ""


def time_case(case: Case, device: Any, repeat: int) -> Timed:
    """The median of `repeat` runs after one that does not count."""
    known: dict[str, Any] = {"target": device.device_kind, "name": case.name, "kernels": []}
    try:
        arrays = jax.device_put(case.random(Target.of(device)), device)
        found = _kernels(case, Target.of(device))
        work = found or _kernels(case, Target("tpu", "v6e"))
        known |= {
            "kernels": [k.name for k in found],
            "bytes_moved": sum(k.bytes_moved for k in work),
            "flops": sum(k.flops for k in work),
        }
        run, (given, arrays) = case.program(Target.of(device)), case.split(arrays)
        times = []
        with jax.default_matmul_precision("highest"):  # as in the engine's step
            for _ in range(repeat + 1):
                fresh = jax.block_until_ready(jax.tree.map(jnp.copy, given))  # which the run takes over
                start = time.perf_counter()
                jax.block_until_ready(run(fresh, arrays))
                times.append((time.perf_counter() - start) * 1e3)
        times = times[1:]
        return Timed(**known, median_ms=statistics.median(times), range_ms=(min(times), max(times)))
    except Exception as error:  # the table has a line for each case, and the program fails at its end
        return Timed(**known, error=f"{type(error).__name__}: {error}")


def _kernels(case: Case, target: Target) -> list[Kernel]:
    return kernels(jax.make_jaxpr(lambda arrays: case.call(target, **arrays))(case.inputs(target)))
