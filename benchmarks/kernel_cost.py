"""What the Pallas kernels of a traced program say of themselves: bytes, flops, the fast memory of a GPU's.

A kernel's cost is its own `pl.CostEstimate`, read from the program for TPU and GPU alike: the CUDA compiler reports
none for a device that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One call of a kernel."""

    name: str
    bytes_moved: int  # to and from the device's memory
    flops: int
    shared_bytes: int  # of a GPU's shared memory for a block of threads; 0 on a TPU, whose compiler counts VMEM


def kernels(jaxpr: Any) -> list[Kernel]:
    """Those of a jaxpr, closed or not, in order. Raises ValueError for one without a cost estimate."""
    found = []
    for eqn in _equations(jaxpr):
        if "cost_estimate" not in eqn.params:
            continue
        name, cost = eqn.params["name"], eqn.params["cost_estimate"]
        if cost is None:
            raise ValueError(f"kernel {name} has no cost estimate")
        bodies = eqn.params.get("jaxprs", ())  # one each kind of core: a TPU's kernel has `jaxpr` instead
        shared = sum(_shared_bytes(body, [v.aval for v in _open(body).invars]) for body in bodies)
        found.append(Kernel(name=name, bytes_moved=cost.bytes_accessed, flops=cost.flops, shared_bytes=shared))
    return found


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Of the program and what it calls; a kernel's own are not among them."""
    for eqn in _open(jaxpr).eqns:
        yield eqn
        if "cost_estimate" not in eqn.params:
            for inner in _bodies(eqn) * eqn.params.get("length", 1):  # a scan's rounds
                yield from _equations(inner)


def _shared_bytes(jaxpr: Any, avals: list[Any]) -> int:
    """Of the kernel's own references and, of the scopes within it, the largest at any one time."""
    own = sum(_size(aval) for aval in avals if str(getattr(aval, "memory_space", "")).endswith("smem"))
    inner = 0
    for eqn in _open(jaxpr).eqns:
        scoped = eqn.primitive.name == "run_scoped"
        for body in _bodies(eqn):
            inner = max(inner, _shared_bytes(body, [v.aval for v in _open(body).invars] if scoped else []))
    return own + inner


def _size(aval: Any) -> int:
    content = aval.inner_aval
    return math.prod(content.shape) * getattr(content.dtype, "itemsize", 8)  # a barrier has 8 bytes


def _bodies(eqn: Any) -> list[Any]:
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(_open(x), "eqns"))
    return [leaf for leaf in leaves if hasattr(_open(leaf), "eqns")]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
