"""Compiled programs that bring pages and STATE slots to the host, and back.

A page on the host is a tuple of arrays [stages, layers, *page], whole over the devices that share it: a CSA page's
values, side words where it has them, then its index keys' the same way; a STATE slot is [stages, layers, values] of
each kind of state. With `host_cache_dtype=int8` float entries travel, and stay on the host, in the int8 format of
`entry_format`, rounded on the device: a quarter of the bytes, with rotary channels in bfloat16. STATE is never rounded.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsjax.axes import DATA, KV, STAGE
from dsjax.cache.moves import Arrays, BlobKey, Download, Upload
from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.cache.state import CacheState
from dsjax.errors import ConfigError
from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.pool import Pool, decode, encode, floats

NUM_PAGES = 4  # of a kind and data shard that one call moves
DOWNLOAD, UPLOAD = "download", "upload"

Kept = tuple[Any, ...]  # the pools, or the STATE arrays, that a kind's pages or slots consist of
Ticket = tuple[int, int, BlobKey]  # data shard, place in the call, key


class Transfers:
    """Of one runner. Programs are named "download <kind>" and "upload <kind>"."""

    def __init__(self, spec: CacheSpec, mesh: Mesh, host_dtype: str):
        """Raises ConfigError if entries cannot be rounded to `host_dtype`, which is auto or int8."""
        self.spec, self.mesh = spec, mesh
        self.kinds = (*spec.pool_kinds, EntryKind.STATE)
        self._hosts: dict[EntryKind, list[jax.ShapeDtypeStruct]] = {}
        self.rounded: dict[EntryKind, EntryFormat] = {}  # what float entries of a kind are on the host
        if host_dtype == "int8":
            for kind, kind_spec in spec.kinds.items():
                form = kind_spec.format
                if form.quantised:
                    continue
                try:
                    self.rounded[kind] = EntryFormat("int8", form.width, form.rope)
                except ValueError as error:
                    raise ConfigError(f"host_cache_dtype='int8' does not fit {kind.value} entries: {error}") from error

    @property
    def programs(self) -> list[str]:
        return [f"{direction} {kind.value}" for direction in (DOWNLOAD, UPLOAD) for kind in self.kinds]

    def kept(self, cache: CacheState, kind: EntryKind) -> Kept:
        if kind is EntryKind.STATE:
            return tuple(cache.states.values())
        return tuple(cache.pools[k] for k in self._pools(kind))

    def replaced(self, cache: CacheState, kind: EntryKind, kept: Kept) -> CacheState:
        """The cache with other arrays of a kind."""
        if kind is EntryKind.STATE:
            return CacheState(cache.pools, dict(zip(cache.states, kept, strict=True)))
        return CacheState({**cache.pools, **dict(zip(self._pools(kind), kept, strict=True))}, cache.states)

    def _pools(self, kind: EntryKind) -> tuple[EntryKind, ...]:
        return (EntryKind.CSA, EntryKind.INDEX_KEY) if kind is EntryKind.CSA else (kind,)

    # --- compiling -----------------------------------------------------------------------------

    def lower(self, name: str, cache: CacheState) -> jax.stages.Lowered:
        """A program as JAX lowered it; arrays need only be abstract."""
        direction, kind = parse(name)
        kept = self.kept(cache, kind)
        index = self._index_shape()
        if direction == DOWNLOAD:
            return jax.jit(self._mapped_read(kind, kept)).lower(kept, index)
        hosts = self.host_shapes(kind, cache)
        function = functools.partial(_write, self._per_layer(kind), self._forms(kind))
        specs = self._specs(kept)
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(DATA), *(x.sharding.spec for x in hosts)),
            out_specs=specs,
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0).lower(kept, index, *hosts)

    def host_shapes(self, kind: EntryKind, cache: CacheState) -> list[jax.ShapeDtypeStruct]:
        """What one call moves: arrays [data shards, NUM_PAGES, stages, layers, *page]."""
        if kind not in self._hosts:
            kept = self.kept(cache, kind)
            shapes = jax.eval_shape(self._mapped_read(kind, kept), kept, self._index_shape())
            sharding = NamedSharding(self.mesh, self._host_spec(kind))
            self._hosts[kind] = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
        return self._hosts[kind]

    def shardings(self, name: str, cache: CacheState) -> list[NamedSharding]:
        """Of the arrays that the host sends with a call."""
        direction, kind = parse(name)
        index = NamedSharding(self.mesh, PartitionSpec(DATA))
        if direction == DOWNLOAD:
            return [index]
        return [index, *(x.sharding for x in self.host_shapes(kind, cache))]

    def _mapped_read(self, kind: EntryKind, kept: Kept):
        return jax.shard_map(
            functools.partial(_read, self._per_layer(kind), self._forms(kind)),
            mesh=self.mesh,
            in_specs=(self._specs(kept), PartitionSpec(DATA)),
            out_specs=self._host_spec(kind),
            check_vma=False,
        )

    def _index_shape(self) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, PartitionSpec(DATA))
        return jax.ShapeDtypeStruct((self.mesh.shape[DATA], NUM_PAGES), jnp.int32, sharding=sharding)

    def _per_layer(self, kind: EntryKind) -> int:
        return self.spec.num_state_slots if kind is EntryKind.STATE else self.spec.kinds[kind].num_pages

    def _forms(self, kind: EntryKind) -> tuple[EntryFormat | None, ...]:
        """Of each of a kind's pools what its entries are rounded to; None where they stay."""
        return () if kind is EntryKind.STATE else tuple(self.rounded.get(k) for k in self._pools(kind))

    @staticmethod
    def _specs(kept: Kept) -> Any:
        return jax.tree.map(lambda x: x.sharding.spec, kept)

    @staticmethod
    def _host_spec(kind: EntryKind) -> PartitionSpec:
        whole = (DATA, None, STAGE, None)
        return PartitionSpec(*whole) if kind is EntryKind.STATE else PartitionSpec(*whole, KV)

    # --- what one call takes --------------------------------------------------------------------

    def download_calls(self, downloads: Sequence[Sequence[Download]]) -> Iterator[tuple[str, np.ndarray, list[Ticket]]]:
        """Program, index array and tickets of each call, for the downloads of every data shard."""
        for kind in self.kinds:
            for batch in _batches([[d for d in part if d.kind is kind] for part in downloads]):
                index = np.full((len(downloads), NUM_PAGES), NOWHERE, np.int32)
                for shard, place, download in batch:
                    index[shard, place] = download.src
                yield f"{DOWNLOAD} {kind.value}", index, [(shard, place, d.key) for shard, place, d in batch]

    def upload_calls(
        self, uploads: Sequence[Sequence[Upload]], cache: CacheState
    ) -> Iterator[tuple[str, list[np.ndarray]]]:
        """Program and host arrays of each call."""
        for kind in self.kinds:
            for batch in _batches([[u for u in part if u.kind is kind] for part in uploads]):
                index = np.full((len(uploads), NUM_PAGES), NOWHERE, np.int32)
                hosts = [np.zeros(x.shape, x.dtype) for x in self.host_shapes(kind, cache)]
                for shard, place, upload in batch:
                    index[shard, place] = upload.dst
                    for host, array in zip(hosts, upload.arrays, strict=True):
                        host[shard, place] = array
                yield f"{UPLOAD} {kind.value}", [index, *hosts]


class Arriving:
    """Downloads on their way: a thread waits for each and gives it memory of its own."""

    def __init__(self):
        self._pool: ThreadPoolExecutor | None = None
        self._due: deque[Future[list[tuple[BlobKey, Arrays]]]] = deque()
        self.bytes_per_s = 0.0  # of the latest, from when the device had gathered them; 0 before the first

    def __len__(self) -> int:
        return len(self._due)

    def add(self, arrays: Sequence[jax.Array], tickets: list[Ticket]) -> None:
        for array in arrays:
            array.copy_to_host_async()
        self._pool = self._pool or ThreadPoolExecutor(1, "dsjax-download")
        self._due.append(self._pool.submit(self._to_host, arrays, tickets))

    def _to_host(self, arrays: Sequence[jax.Array], tickets: list[Ticket]) -> list[tuple[BlobKey, Arrays]]:
        jax.block_until_ready(arrays)
        start = time.monotonic()
        whole = [np.asarray(array) for array in arrays]
        out = [(key, tuple(np.array(x[shard, place]) for x in whole)) for shard, place, key in tickets]
        self.bytes_per_s = sum(x.nbytes for x in whole) / max(1e-6, time.monotonic() - start)
        return out

    def take(self, wait: bool = False) -> list[tuple[BlobKey, Arrays]]:
        """Those that have arrived, in order; with `wait` all."""
        out: list[tuple[BlobKey, Arrays]] = []
        while self._due and (wait or self._due[0].done()):
            out += self._due.popleft().result()
        return out


def parse(name: str) -> tuple[str, EntryKind]:
    """Direction and kind of a program."""
    direction, _, kind = name.partition(" ")
    return direction, EntryKind(kind)


def _batches(parts: list[list[Any]]) -> Iterator[list[tuple[int, int, Any]]]:
    """Lists of (data shard, place, move), with at most NUM_PAGES of a shard in each."""
    for first in range(0, max(map(len, parts)), NUM_PAGES):
        yield [
            (shard, place, move)
            for shard, part in enumerate(parts)
            for place, move in enumerate(part[first : first + NUM_PAGES])
        ]


def _read(
    per_layer: int,
    forms: tuple[EntryFormat | None, ...],
    kept: Kept,  # pools, or STATE arrays [layers * slots, values]
    index: jax.Array,  # [1, n]
) -> tuple[jax.Array, ...]:
    """Pages or slots of all layers, each array [1, n, 1, layers, *page]."""

    def take(x: jax.Array) -> jax.Array:
        pages = jnp.minimum(index[0], per_layer - 1)[:, None]
        return jnp.take(x, pages + jnp.arange(x.shape[0] // per_layer) * per_layer, axis=0)

    out = []
    for item, form in zip(kept, forms or (None,) * len(kept), strict=True):
        arrays = tuple(map(take, jax.tree.leaves(item)))
        if form is not None:
            assert isinstance(item, Pool)
            (page,) = arrays
            values, side = encode(floats(page, item.format).reshape(-1, form.width), form)
            assert side is not None
            # [n, layers, entries, ...], whether or not the pool's entries are in rows of lanes
            arrays = tuple(x.reshape(*page.shape[:3], -1) for x in (values, side))
        out += arrays
    return tuple(x[None, :, None] for x in out)


def _write(
    per_layer: int,
    forms: tuple[EntryFormat | None, ...],
    kept: Kept,
    index: jax.Array,  # [1, n]; NOWHERE for none
    *hosts: jax.Array,  # as `_read` returns them
) -> Kept:
    given = iter(hosts)

    def put(x: jax.Array, pages: jax.Array) -> jax.Array:
        at = index[0][:, None] + jnp.arange(x.shape[0] // per_layer) * per_layer
        return x.at[at].set(pages.reshape(*at.shape, *x.shape[1:]), mode="drop")

    out = []
    for item, form in zip(kept, forms or (None,) * len(kept), strict=True):
        if form is None:
            out.append(jax.tree.map(lambda x: put(x, next(given)), item))
        else:
            assert isinstance(item, Pool)
            values, side = next(given), next(given)
            plain = item.format
            entries = decode(
                values.reshape(-1, values.shape[-1]), side.reshape(-1, side.shape[-1]), form, jnp.dtype(plain.name)
            )
            out.append(dataclasses.replace(item, values=put(item.values, encode(entries, plain)[0])))
    return tuple(out)
