"""The device mesh, and which parameters it splits how.

The engine's step is one program under `jax.shard_map`, so every collective is written down in the model. What a layer
sends, per data shard of T tokens (tests count them in the compiled text; an axis of one device sends nothing):

    attention, output      all-reduce      [T, D]            over the axes of its heads
    CSA, indexer queries   all-gather      [T, HI, dI]       over model, kv
    MoE, all experts       all-reduce      [T, D]            over model, kv
    cache split (kv):      all-gather      [T, N, H]         queries, where heads are split over kv too
                           all-reduce max  [T, N]            the softmax's maximum
                           reduce-scatter  [T, N, H + 1]     its sums (all-reduce where heads are not split over kv)
    CSA, cache split       all-gather      [T, k, 2]         candidates of the top-k
    experts over the mesh  all-gather and reduce-scatter, or twice all-to-all: see model/exchange.py

And once a step: the embedding all-reduces [T, D] and the logits all-gather [R, V] over model, kv; results gather over
data. Nothing ever gathers a cache or a weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsjax.axes import ALL, DATA, KV, MESH_AXES, MODEL, SHARD, STAGE
from dsjax.config import LayerKind, ModelConfig, ParallelConfig
from dsjax.errors import ConfigError

# Logical axes that every device has whole; `Rules` names all others.
WHOLE = ("embed", "q_lora", "kv", "layer")
# Axes that hold two halves, gate and up, of which each device gets a part.
HALVES = ("gate_up", "expert_gate_up")


def make_mesh(parallel: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The first `num_devices` of the devices (default: all of every process). Raises ConfigError where they do not
    divide."""
    devices = jax.devices() if devices is None else devices
    num = parallel.num_devices
    if len(devices) % num or (jax.process_count() > 1 and num != len(devices)):
        sizes = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
        if jax.process_count() > 1:
            sizes = [len(devices)]
        hint = ""
        if devices[0].platform == "cpu" and num > len(devices):
            hint = f", or have {num} with XLA_FLAGS=--xla_force_host_platform_device_count={num}"
        raise ConfigError(
            f"mesh stage:{parallel.pipeline_parallel_size},data:{parallel.data_parallel_size},"
            f"model:{parallel.tensor_parallel_size} takes {num} devices and there are {len(devices)}: choose sizes "
            f"whose product is {' or '.join(map(str, sizes))}{hint}"
        )
    shape = (
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
        parallel.tensor_parallel_size // parallel.kv_parallel,
        parallel.kv_parallel,
    )
    return Mesh(np.array(devices[:num]).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Mesh axes that split each logical axis of a parameter, none where every device has it whole."""

    heads: tuple[str, ...] = ()
    group: tuple[str, ...] = ()  # of heads, in the output projection
    index_heads: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    gate_up: tuple[str, ...] = ()  # the shared expert's
    ffn: tuple[str, ...] = ()
    expert: tuple[str, ...] = ()
    expert_gate_up: tuple[str, ...] = ()  # the routed experts'
    expert_ffn: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig) -> Rules:
        """The rules of a mesh. Raises ConfigError, with the sizes that would do, where the model does not divide."""
        shard, kv = parallel.tensor_parallel_size, parallel.kv_parallel
        whole = shard * parallel.data_parallel_size
        # Where the heads do not divide by the whole shard but do without the devices that share a cache, these have
        # the same heads.
        heads = SHARD
        if kv > 1 and (model.num_attention_heads % shard or model.o_groups % shard):
            heads = (MODEL,)
        _check(model, shard if heads == SHARD else shard // kv, "num_attention_heads o_groups", parallel)
        _check(model, shard, "vocab_size moe_intermediate_size", parallel)
        if LayerKind.CSA in model.layer_kinds:
            _check(model, shard, "index_n_heads", parallel)
        if parallel.expert_parallel and model.n_routed_experts % whole:
            raise ConfigError(
                f"expert_parallel splits n_routed_experts={model.n_routed_experts} over data_parallel_size x "
                f"tensor_parallel_size = {whole} devices, which does not divide it: choose a product of "
                f"{_divisors(model.n_routed_experts, whole)}, or expert_parallel=false"
            )
        ep = parallel.expert_parallel
        return cls(
            heads=heads,
            group=heads,
            index_heads=SHARD,
            vocab=SHARD,
            gate_up=SHARD,
            ffn=SHARD,
            expert=ALL if ep else (),
            expert_gate_up=() if ep else SHARD,
            expert_ffn=() if ep else SHARD,
        )

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """How an array with these logical axes is split. Raises ConfigError if two would be on one mesh axis."""
        split = [self.mesh_axes(name) for name in axes]
        used = [name for names in split for name in names]
        if len(set(used)) != len(used):
            raise ConfigError(f"logical axes {tuple(axes)} of one array would be split over one mesh axis: {split}")
        return PartitionSpec(*split)

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        """Of a logical axis. Raises ValueError for a name nobody knows, which must not mean "whole"."""
        if name is None or name in WHOLE:
            return ()
        if name not in _NAMES:
            raise ValueError(f"logical axis {name!r} is neither in WHOLE nor in Rules: {', '.join(sorted(_NAMES))}")
        return getattr(self, name)


_NAMES = frozenset(f.name for f in dataclasses.fields(Rules))


def _check(model: ModelConfig, parts: int, names: str, parallel: ParallelConfig) -> None:
    for name in names.split():
        value = getattr(model, name)
        if value % parts:
            raise ConfigError(
                f"tensor_parallel_size={parallel.tensor_parallel_size} with kv_parallel={parallel.kv_parallel} splits "
                f"{name}={value} into {parts} parts, which does not divide it: it can be {_divisors(value, parts)}"
            )


def _divisors(value: int, limit: int) -> str:
    return " or ".join(str(n) for n in range(1, max(limit, 1) + 1) if value % n == 0)


class Placement:
    """Puts host arrays on the devices of a mesh."""

    def __init__(self, mesh: Mesh, rules: Rules):
        self.mesh, self.rules = mesh, rules

    def sharding(self, axes: Sequence[str | None]) -> NamedSharding:
        """Of a parameter, whose first axis the stages are joined along."""
        _, *others = self.rules.spec(axes)
        return NamedSharding(self.mesh, PartitionSpec((STAGE, *self.rules.mesh_axes(axes[0])), *others))

    def abstract(self, axes: Sequence[str | None], shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        """What `put` makes of every stage's array of this shape. Raises ConfigError where it does not divide."""
        for name, size in zip(axes, shape, strict=True):
            self._split(name, size)
        whole = (self.mesh.shape[STAGE] * shape[0], *shape[1:])
        return jax.ShapeDtypeStruct(whole, dtype, sharding=self.sharding(axes))

    def put(self, axes: Sequence[str | None], stages: Sequence[np.ndarray]) -> jax.Array:
        """One parameter of every stage -> an array of which each device holds its part of its stage's.

        The array's global order means nothing: each device's part is what its stage's model takes.
        """
        shape = stages[0].shape
        parts = [self._split(name, size) for name, size in zip(axes, shape, strict=True)]

        def of_device(index: Any) -> np.ndarray:  # a slice of each axis
            stage, start = divmod(index[0].start or 0, shape[0])
            array = stages[stage]
            for axis, (at, part) in enumerate(zip(index, parts, strict=True)):
                array = np.take(array, part(start if axis == 0 else at.start or 0), axis) if part else array
            return array

        whole = (len(stages) * shape[0], *shape[1:])
        return jax.make_array_from_callback(whole, self.sharding(axes), of_device)

    def _split(self, name: str | None, size: int) -> Callable[[int], np.ndarray] | None:
        """From the start of a device's slice to the positions it gets; None if it gets all."""
        count = int(np.prod([self.mesh.shape[axis] for axis in self.rules.mesh_axes(name)], initial=1))
        if count == 1:
            return None
        if size % count:
            raise ConfigError(f"an array's axis {name!r} of {size} cannot be split over {count} devices")
        if name in HALVES:
            half = size // 2 // count
            if half * 2 * count != size:
                raise ConfigError(f"an array's axis {name!r} of 2 x {size // 2} cannot be split over {count} devices")
            return lambda start: np.concatenate([np.arange(half) + start // 2, np.arange(half) + (start + size) // 2])
        return lambda start: np.arange(start, start + size // count)


def by_shard(mesh: Mesh) -> NamedSharding:
    """Of arrays that the host sends: the leading axis is the data shard."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def pools(mesh: Mesh) -> NamedSharding:
    """Of cache pools [stages * shards * layers * pages, a page's entries or rows of them, ...]."""
    return NamedSharding(mesh, PartitionSpec((STAGE, DATA), KV))


def states(mesh: Mesh) -> NamedSharding:
    """Of STATE [stages * shards * layers * slots, values]: whole on each device of a shard."""
    return NamedSharding(mesh, PartitionSpec((STAGE, DATA)))
