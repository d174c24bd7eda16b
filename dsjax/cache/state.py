"""The cache's device arrays. The runner owns them: every step takes them donated and returns them updated."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsjax import sharding
from dsjax.axes import DATA, STAGE
from dsjax.cache.spec import CacheSpec, EntryKind, KindSpec
from dsjax.config import LayerKind, ModelConfig
from pallas_kernels.target import CPU, Target


class CacheState(NamedTuple):
    """Pools [layers * pages, entries_per_page, width] and STATE [layers * slots, 3, channels] float32, by kind.

    An entry's width may be in two axes, see `entry_shape`. STATE's middle axis is (maximum, denominator, weighted
    sum); its channels are those of `pallas_kernels.compress`.
    On a mesh the leading axes of all stages and data shards are joined, so that a device's part has the shapes above.
    """

    pools: dict[EntryKind, jax.Array]
    states: dict[EntryKind, jax.Array]

    @classmethod
    def abstract(
        cls,
        spec: CacheSpec,
        config: ModelConfig,
        dtype: jnp.dtype,
        mesh: Mesh | None = None,
        target: Target = CPU,
    ) -> CacheState:
        """The arrays' shapes on a mesh (or on the default device), without allocating any."""
        parts = mesh.shape[STAGE] * mesh.shape[DATA] if mesh else 1
        num_csa, num_hca = config.layer_kinds.count(LayerKind.CSA), config.layer_kinds.count(LayerKind.HCA)
        layouts = {
            EntryKind.CSA: (num_csa, 3 * config.head_dim),
            EntryKind.INDEX_KEY: (num_csa, 3 * config.index_head_dim),
            EntryKind.HCA: (num_hca, config.head_dim),
        }
        pools = {
            kind: jax.ShapeDtypeStruct(
                (parts * kind_spec.shape[0], kind_spec.shape[1], *entry_shape(kind_spec, target)),
                dtype,
                sharding=mesh and sharding.pools(mesh),
            )
            for kind, kind_spec in spec.kinds.items()
        }
        states = {
            kind: jax.ShapeDtypeStruct(
                (parts * layers * spec.num_state_slots, 3, channels),
                jnp.float32,
                sharding=mesh and sharding.states(mesh),
            )
            for kind, (layers, channels) in layouts.items()
            if layers
        }
        return cls(pools, states)  # type: ignore[arg-type]  # shapes in place of arrays

    @classmethod
    def create(
        cls,
        spec: CacheSpec,
        config: ModelConfig,
        dtype: jnp.dtype,
        fill: float = 0.0,
        mesh: Mesh | None = None,
        target: Target = CPU,
    ) -> CacheState:
        """Fresh arrays; tests fill them with NaN, so that a read of something unwritten shows."""
        return jax.tree.map(
            lambda x: jnp.full(x.shape, fill, x.dtype, device=x.sharding),
            cls.abstract(spec, config, dtype, mesh, target),
        )


def entry_shape(spec: KindSpec, target: Target) -> tuple[int, ...]:
    """How an entry's values lie: a TPU copies a single one only where it is whole tiles, [width / 128, 128]."""
    if spec.gathered and target.has_tpu_kernels and not target.interpret:
        return spec.width // 128, 128
    return (spec.width,)
