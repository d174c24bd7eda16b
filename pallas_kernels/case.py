"""A named shape of an operation, for tests, ahead-of-time compilation and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Case:
    """`call(target, **arrays)` runs the operation; `arrays` are the shapes of its inputs, nested as they come."""

    name: str
    call: Callable[..., Any]
    arrays: dict[str, Any]  # trees of jax.ShapeDtypeStruct
    pool: tuple[int, ...] = ()  # shape of the largest cache array it reads, which must never be copied

    def abstract(self, sharding: jax.sharding.Sharding) -> dict[str, Any]:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), self.arrays)

    def lower(self, target: Target, sharding: jax.sharding.Sharding) -> jax.stages.Lowered:
        """For compilation on the devices of `sharding`, which need not be there."""
        with jax.default_matmul_precision("highest"):  # as the engine's step has it
            return jax.jit(lambda arrays: self.call(target, **arrays)).lower(self.abstract(sharding))


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
