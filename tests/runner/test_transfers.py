"""Pages and STATE slots to the host and back, on meshes of every axis, as they are and rounded."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsjax.cache.moves import BlobKey, Download, Upload
from dsjax.cache.spec import EntryKind
from dsjax.cache.state import CacheState
from dsjax.config import ParallelConfig
from dsjax.errors import ConfigError
from dsjax.runner.transfers import NUM_PAGES, Arriving, Transfers, parse
from dsjax.sharding import make_mesh
from tests.cache.specs import cache_spec, model_config

MESHES = ["data:1", "data:2", "model:2", "stage:2", "data:2,model:2 kv"]


def parts(mesh_name: str, **spec):
    name, _, kv = mesh_name.partition(" ")
    parallel = ParallelConfig.of(name, kv_parallel=2 if kv else 1)
    mesh = make_mesh(parallel, jax.devices()[: parallel.num_devices])
    return mesh, cache_spec(num_blocks=24, num_snapshots=3, num_seqs=2, num_parts=parallel.kv_parallel, **spec)


def filled(spec, mesh, seed: int) -> CacheState:
    """Random numbers on every device."""
    rng = np.random.default_rng(seed)

    def new(x):
        if x.dtype == jnp.uint16:
            values = rng.normal(size=x.shape).astype(jnp.bfloat16).view(np.uint16)
        elif jnp.issubdtype(x.dtype, jnp.floating):
            values = rng.normal(size=x.shape).astype(x.dtype)
        else:
            values = rng.integers(0, 100, x.shape).astype(x.dtype)
        return jax.device_put(values, x.sharding)

    return jax.tree.map(new, CacheState.abstract(spec, model_config(), mesh))


def run(transfers: Transfers, cache: CacheState, calls) -> list:
    out = []
    for name, arrays in calls:
        program, kept = transfers.lower(name, cache).compile(), transfers.kept(cache, parse(name)[1])
        out.append(program(kept, *jax.device_put(list(arrays), transfers.shardings(name, cache))))
    return out


def download(transfers: Transfers, cache: CacheState, downloads) -> dict[BlobKey, tuple]:
    arriving = Arriving()
    for name, index, tickets in transfers.download_calls(downloads):
        arriving.add(run(transfers, cache, [(name, (index,))])[0], tickets)
    assert len(arriving) > 0
    return dict(arriving.take(wait=True))


def upload(transfers: Transfers, cache: CacheState, uploads) -> CacheState:
    for name, arrays in transfers.upload_calls(uploads, cache):
        kept = run(transfers, cache, [(name, arrays)])[0]
        cache = transfers.replaced(cache, parse(name)[1], kept)
    return cache


def rows(spec, mesh, cache: CacheState, kind: EntryKind, shard: int, index: int) -> list[np.ndarray]:
    """A page or slot in the arrays of every kind that it has, stage by stage."""
    per_layer = spec.num_state_slots if kind is EntryKind.STATE else spec.kinds[kind].num_pages
    if kind is EntryKind.STATE:
        arrays = list(cache.states.values())
    else:
        arrays = jax.tree.leaves([cache.pools[k] for k in (kind, EntryKind.INDEX_KEY)[: 1 + (kind is EntryKind.CSA)]])
    stages, shards = mesh.shape["stage"], mesh.shape["data"]
    found = []
    for array in map(np.asarray, arrays):
        by_layer = array.reshape(stages, shards, -1, per_layer, *array.shape[1:])
        found.append(by_layer[:, shard, :, index])
    return found


@pytest.mark.parametrize(
    ("mesh_name", "form"),
    [
        (MESHES[0], "float32"),
        *(
            pytest.param(name, form, marks=pytest.mark.slow)  # each compiles its programs
            for name, form in (
                *((name, "float32") for name in MESHES[1:]),
                (MESHES[-1], "bfloat16"),
                (MESHES[-1], "int8"),
            )
        ),
    ],
)
def test_bits_go_down_and_up(mesh_name, form):
    mesh, spec = parts(mesh_name, kv_cache_dtype=form)
    transfers = Transfers(spec, mesh, "auto")
    cache, shards = filled(spec, mesh, 0), mesh.shape["data"]
    kinds = (*spec.pool_kinds, EntryKind.STATE)
    # More than a call takes, another number of each data shard.
    sources = {shard: [(shard + i) % 3 + 1 for i in range(NUM_PAGES + 1 + shard)] for shard in range(shards)}
    downloads = [
        [Download(kind, src, BlobKey(kind, i, bytes([shard]))) for kind in kinds for i, src in enumerate(some)]
        for shard, some in sources.items()
    ]
    blobs = download(transfers, cache, downloads)
    assert len(blobs) == sum(map(len, downloads))
    for shard, some in sources.items():
        for kind in kinds:
            for i, src in enumerate(some):
                want = rows(spec, mesh, cache, kind, shard, src)
                for got, array in zip(blobs[BlobKey(kind, i, bytes([shard]))], want, strict=True):
                    np.testing.assert_array_equal(got, array)
    # Up to other places of a cache of other numbers: those are as they were, all else is untouched.
    other = filled(spec, mesh, 1)
    before = jax.tree.map(np.asarray, other)
    after = upload(
        transfers,
        other,
        [[Upload(kind, blobs[BlobKey(kind, 0, bytes([shard]))], 0) for kind in kinds] for shard in range(shards)],
    )
    for kind in kinds:
        for shard, some in sources.items():
            for place in range(3):
                want = rows(spec, mesh, before if place else cache, kind, shard, place or some[0])
                for got, array in zip(rows(spec, mesh, after, kind, shard, place), want, strict=True):
                    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(("dtype", "as_bits"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_rounded_on_the_host(dtype, as_bits):
    """Within half a step of each entry's scale; rotary channels in bfloat16, STATE exactly."""
    mesh, spec = parts("data:1", dtype=dtype, as_bits=as_bits)
    transfers, cache = Transfers(spec, mesh, "int8"), filled(spec, mesh, 0)
    kinds = (*spec.pool_kinds, EntryKind.STATE)
    blobs = download(transfers, cache, [[Download(kind, 1, BlobKey(kind, 0, b"")) for kind in kinds]])
    assert {x.dtype.name for kind in spec.pool_kinds for x in blobs[BlobKey(kind, 0, b"")]} == {"uint8", "uint32"}
    before = jax.tree.map(np.asarray, cache)
    after = upload(transfers, cache, [[Upload(kind, blobs[BlobKey(kind, 0, b"")], 2) for kind in kinds]])
    for kind in kinds:
        pairs = zip(rows(spec, mesh, after, kind, 0, 2), rows(spec, mesh, before, kind, 0, 1), strict=True)
        for number, (got, want) in enumerate(pairs):
            got, want = (x.view(jnp.bfloat16) if x.dtype == np.uint16 else x for x in (got, want))
            got, want = got.astype(np.float32), want.astype(np.float32)
            if kind is EntryKind.STATE:
                np.testing.assert_array_equal(got, want)
                continue
            rope = 0 if number else 8
            codes = want.shape[-1] - rope
            step = np.abs(want[..., :codes]).max(-1, keepdims=True) / 127
            slack = 2**-8 * np.abs(want[..., :codes]) if dtype == "bfloat16" else 1e-6
            assert (np.abs(got - want)[..., :codes] <= step * 0.51 + slack).all()
            np.testing.assert_allclose(got[..., codes:], want[..., codes:], rtol=2**-8)


def test_an_entry_that_cannot_be_rounded_is_an_error():
    mesh, spec = parts("data:1")
    kinds = dict(spec.kinds)
    form = dataclasses.replace(kinds[EntryKind.HCA].format, rope=6)
    kinds[EntryKind.HCA] = dataclasses.replace(kinds[EntryKind.HCA], format=form)
    with pytest.raises(ConfigError, match="host_cache_dtype='int8' does not fit hca entries"):
        Transfers(dataclasses.replace(spec, kinds=kinds), mesh, "int8")
