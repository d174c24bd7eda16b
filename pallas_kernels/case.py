"""A named shape of an operation, for tests, ahead-of-time compilation and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from pallas_kernels.chosen import MaskShape
from pallas_kernels.pool import PoolShape
from pallas_kernels.target import CPU, Target


@dataclass(frozen=True, kw_only=True)
class Case:
    """`call(target, **arrays)` runs the operation; `arrays` are its inputs, nested as they come.

    An input is a jax.ShapeDtypeStruct where any values will do, a numpy array where they say what work there is, or
    what a target's own form depends on: a PoolShape or a MaskShape.
    """

    name: str
    call: Callable[..., Any]
    arrays: dict[str, Any]
    updated: str = ""  # the array that the operation gives back changed, in the same memory

    def inputs(self, target: Target = CPU) -> dict[str, Any]:
        """The arrays as a target has them: pages that a TPU's kernels read are tiled, masks are bits."""

        def abstract(x: Any) -> Any:
            if isinstance(x, PoolShape):
                return x.abstract(target.has_tpu_kernels and x.format.can_tile())
            return x.abstract(target.has_tpu_kernels) if isinstance(x, MaskShape) else x

        return jax.tree.map(abstract, self.arrays, is_leaf=lambda x: isinstance(x, PoolShape | MaskShape))

    def lower(self, device: Any) -> jax.stages.Lowered:
        """For compilation on a device that need not be there."""
        return self.stages(device)[1]

    def stages(self, device: Any) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
        """The traced program, whose kernels say what they cost, and as `lower` gives it."""
        target, sharding = Target.of(device), SingleDeviceSharding(device)
        arrays = jax.tree.map(lambda s: _placed(s, sharding), self.inputs(target))
        if target.platform == "gpu":  # "gpu" is no compiler's name
            kind = AbstractDevice(device.device_kind, None, platform="cuda")
        else:
            kind = AbstractDevice(device.device_kind, getattr(device, "num_cores", 1), platform=device.platform)
        mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=kind)
        # Pallas asks the mesh what it lowers for; the precision is the one that the engine's step has.
        with jax.sharding.use_abstract_mesh(mesh), jax.default_matmul_precision("highest"):
            traced = self.program(target).trace(*self.split(arrays))
            return traced, traced.lower()

    def program(self, target: Target) -> Any:
        """Jitted, of what `split` makes of the inputs; the first is donated."""
        return jax.jit(lambda given, arrays: self.call(target, **given, **arrays), donate_argnums=0)

    def split(self, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The inputs that the operation gives back changed, and the others."""
        given = {name: x for name, x in arrays.items() if name == self.updated}
        return given, {name: x for name, x in arrays.items() if name not in given}

    def random(self, target: Target = CPU, seed: int = 0) -> dict[str, Any]:
        """Inputs to run with: normal floats, small codes, side words whose scales are ordinary, the values given."""
        rng = np.random.default_rng(seed)
        floats, codes = rng.standard_normal(1 << 16, np.float32), rng.integers(0, 100, 1 << 16)

        def fill(leaf: Any) -> np.ndarray:
            if isinstance(leaf, np.ndarray):
                return leaf
            if leaf.dtype == jnp.uint32:
                return np.full(leaf.shape, 0x3F803F80, np.uint32)  # 1.0 as float32, 2**-64 or 2 as a byte's exponent
            some = floats if jnp.issubdtype(leaf.dtype, jnp.floating) else codes % 2 if leaf.dtype == bool else codes
            return np.resize(some.astype(leaf.dtype), leaf.shape)  # pools are gigabytes

        return jax.tree.map(fill, self.inputs(target))


def _placed(s: jax.ShapeDtypeStruct, sharding: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    """On a device. Tables are cut out of one packed array in the engine's step, so that the compiler lays them out as
    their readers want; as an input of its own a narrow one would be transposed, and copied to be read."""
    is_table = s.ndim == 2 and s.dtype == jnp.int32
    return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=Format(Layout((0, 1)), sharding) if is_table else sharding)


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
