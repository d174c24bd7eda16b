"""A named shape of an operation, for tests, ahead-of-time compilation and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from pallas_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Case:
    """`call(target, **arrays)` runs the operation; `arrays` are the shapes of its inputs, nested as they come."""

    name: str
    call: Callable[..., Any]
    arrays: dict[str, Any]  # trees of jax.ShapeDtypeStruct

    def lower(self, device: Any) -> jax.stages.Lowered:
        """For compilation on a device that need not be there."""
        target, sharding = Target.of(device), SingleDeviceSharding(device)
        arrays = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), self.arrays)
        if target.platform == "gpu":  # "gpu" is no compiler's name
            kind = AbstractDevice(device.device_kind, None, platform="cuda")
        else:
            kind = AbstractDevice(device.device_kind, getattr(device, "num_cores", 1), platform=device.platform)
        mesh = AbstractMesh((1,), ("_",), abstract_device=kind)
        # Pallas asks the mesh what it lowers for; the precision is the one that the engine's step has.
        with jax.sharding.use_abstract_mesh(mesh), jax.default_matmul_precision("highest"):
            return jax.jit(lambda arrays: self.call(target, **arrays)).lower(arrays)


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
