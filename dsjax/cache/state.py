"""The cache's device arrays. The runner owns them: every step takes them donated and returns them updated."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsjax import sharding
from dsjax.axes import DATA, STAGE
from dsjax.cache.spec import CacheSpec, EntryKind, KindSpec
from dsjax.config import LayerKind, ModelConfig
from pallas_kernels.pool import Pool, PoolShape


class CacheState(NamedTuple):
    """Pools of pages and STATE [layers * slots, values] float32, by kind.

    What the values of STATE are is said in `pallas_kernels.compress.api`.
    On a mesh the leading axes of all stages and data shards are joined, so that a device's part has the shapes above.
    """

    pools: dict[EntryKind, Pool]
    states: dict[EntryKind, jax.Array]

    @classmethod
    def abstract(cls, spec: CacheSpec, config: ModelConfig, mesh: Mesh | None = None) -> CacheState:
        """The arrays' shapes on a mesh (or on the default device), without allocating any."""
        parts = mesh.shape[STAGE] * mesh.shape[DATA] if mesh else 1
        num_csa, num_hca = config.layer_kinds.count(LayerKind.CSA), config.layer_kinds.count(LayerKind.HCA)
        layouts = {
            EntryKind.CSA: (num_csa, 6 * config.head_dim),
            EntryKind.INDEX_KEY: (num_csa, 6 * config.index_head_dim),
            EntryKind.HCA: (num_hca, 3 * config.head_dim),
        }

        def pool(kind_spec: KindSpec) -> Pool:
            pages, entries = kind_spec.num_layers * kind_spec.num_pages, kind_spec.local_entries
            here = PoolShape(kind_spec.format, pages, entries, kind_spec.gathered).abstract(kind_spec.tiled)

            def whole(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
                # What a device has, times the devices along the axes that the arrays are split over.
                shape = parts * x.shape[0], kind_spec.num_parts * x.shape[1], *x.shape[2:]
                return jax.ShapeDtypeStruct(shape, x.dtype, sharding=mesh and sharding.pools(mesh))

            return jax.tree.map(whole, here)

        pools = {kind: pool(kind_spec) for kind, kind_spec in spec.kinds.items()}
        states = {
            kind: jax.ShapeDtypeStruct(
                (parts * layers * spec.num_state_slots, values),
                jnp.float32,
                sharding=mesh and sharding.states(mesh),
            )
            for kind, (layers, values) in layouts.items()
            if layers
        }
        return cls(pools, states)  # type: ignore[arg-type]  # shapes in place of arrays

    @classmethod
    def create(cls, spec: CacheSpec, config: ModelConfig, fill: float = 0.0, mesh: Mesh | None = None) -> CacheState:
        """Fresh arrays; tests fill them with NaN, so that a read of something unwritten shows."""

        def new(x: jax.ShapeDtypeStruct) -> jax.Array:
            # Codes and scales of all ones are NaN or infinite in every format whose codes can be.
            value = fill if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).max * math.isnan(fill)
            return jnp.full(x.shape, value, x.dtype, device=x.sharding)

        return jax.tree.map(new, cls.abstract(spec, config, mesh))
