"""Native attention beyond what the attention tests ask of every target: blocks, bfloat16, several items, its limits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.groups import GROUP_BLOCKS, by_groups
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.indexer_topk import native as index
from pallas_kernels.indexer_topk.reference import index_scores
from pallas_kernels.native import machine_code, tiles
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native_attention import api, kernel, supports
from pallas_kernels.pool import Pool
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import CPU, HOST, Target

NATIVE = Target("cpu", HOST)


def rows(num_rows: int, heads: int, width: int, dtype: jnp.dtype, epp: int = 8, pages: int = 6, block: int = 1):
    """Queries, blocks of up to `block` queries, one of a row, and pages with all entries written."""
    rng = np.random.default_rng(num_rows)
    num = num_rows * pages
    pool = jnp.asarray(rng.normal(size=(num, epp, width)), dtype)
    if dtype == jnp.bfloat16:
        pool = jax.lax.bitcast_convert_type(pool, jnp.uint16)
    form = EntryFormat(jnp.dtype(dtype).name, width, as_bits=dtype == jnp.bfloat16)
    table = jnp.asarray(rng.permutation(num).reshape(num_rows, pages), jnp.int32)
    position = jnp.asarray(rng.integers(0, epp * pages - block + 1, num_rows), jnp.int32)
    length = jnp.asarray(
        [block, 1, 0, *rng.integers(1, block + 1, num_rows)][:num_rows] if block > 1 else [1] * num_rows
    )
    blocks = QueryBlocks(jnp.arange(num_rows), position, length)
    q = jnp.asarray(rng.normal(size=(num_rows, block, heads, width)), dtype)
    return q, blocks, Pages(Pool(pool, None, form), table, 0, num)


TYPES = pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["f32", "bf16"])


def in_use(x: jax.Array, blocks: QueryBlocks) -> np.ndarray:
    """Zeros for queries that are not."""
    used = jnp.arange(x.shape[1]) < blocks.length[:, None]
    return np.asarray(jnp.where(used.reshape(used.shape + (1,) * (x.ndim - 2)), x, 0), np.float32)


@TYPES
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize(("heads", "width"), [(3, 64), (8, 128), (16, 32)])
def test_blocks_equal_the_reference(heads, width, block, dtype, atol):
    q, blocks, pages = rows(9, heads, width, dtype, epp=16, block=block)
    sink = jnp.linspace(-1, 2, heads)
    assert supports(q, blocks, [pages, pages], NATIVE)
    want, got = (
        hca_attention(q, blocks, pages, pages, sink, window=20, ratio=3, scale=width**-0.5, target=target)
        for target in (CPU, NATIVE)
    )
    np.testing.assert_allclose(np.asarray(got, np.float32), in_use(want, blocks), atol=atol)


@pytest.fixture
def without_pairs(monkeypatch):
    """The code for CPUs that do not multiply pairs of bfloat16 numbers, which this one may."""
    monkeypatch.setattr(tiles, "in_pairs", lambda kind: False)
    monkeypatch.setattr(api, "ATTEND", Operation("test.attend", kernel._attend))
    machine_code.register()


@pytest.mark.usefixtures("without_pairs")
def test_bfloat16_on_a_cpu_without_products_of_pairs():
    test_blocks_equal_the_reference(8, 128, 16, jnp.bfloat16, 2e-2)


@TYPES
def test_chosen_entries_of_a_block(dtype, atol):
    """Over 64 of them, and of what no query chose nothing is read: it is NaN."""
    q, blocks, pages = rows(9, 8, 64, dtype, epp=32, block=16)
    rng = np.random.default_rng(1)
    place = jnp.arange(192)
    chosen = jnp.asarray(rng.random((9, 16, 192)) < 0.1) & (place % 3 > 0)
    chosen &= place < blocks.position[:, None, None] + jnp.arange(16)[:, None] + 1
    unused = pages.table[:, place // 32], place % 32, slice(None)
    nan = jnp.uint16(0x7FC0) if dtype == jnp.bfloat16 else jnp.nan
    values = pages.pool.values.at[unused].set(jnp.where((place % 3 > 0)[:, None], pages.pool.values[unused], nan))
    chosen_pages = pages._replace(pool=dataclasses.replace(pages.pool, values=values))
    want, got = (
        csa_attention(q, blocks, pages, of, chosen, jnp.ones(8), window=8, ratio=1, scale=0.125, target=target)
        for target, of in ((CPU, pages), (NATIVE, chosen_pages))
    )
    np.testing.assert_allclose(np.asarray(got, np.float32), in_use(want, blocks), atol=atol)


def scores(q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages) -> jax.Array:
    flat = q.reshape(-1, *q.shape[2:]), weights.reshape(-1, weights.shape[-1])
    return index.scores(*flat, blocks.tokens(q), blocks, pages, ratio=1)


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_scores_equal_plain_ones(dtype, block):
    q, blocks, pages = rows(5, 8, 32, dtype, epp=64, block=block)  # 384 keys: more than a run of them
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(5, block, 8)), jnp.float32)
    got = scores(q, weights, blocks, pages)
    keys = pages.read_pages(blocks.row, jnp.int32(0), 6, dtype)
    want = jax.vmap(index_scores)(q, weights, keys)
    query = jnp.arange(block)[:, None]
    visible = jnp.arange(384) < (blocks.position[:, None, None] + query + 1)
    visible &= query < blocks.length[:, None, None]
    np.testing.assert_allclose(got, jnp.where(visible, want, -jnp.inf), rtol=1e-4, atol=1e-4)


def test_scores_of_the_first_query_of_longer_blocks():
    """Groups of single queries may begin among blocks of several: the others' queries are not to be touched."""
    q, blocks, pages = rows(40, 8, 32, jnp.float32, epp=64, block=16)
    several = jnp.arange(40) < 2 * GROUP_BLOCKS  # then 8 of one query, in a group that begins 8 blocks earlier
    blocks = blocks._replace(length=jnp.where(several, 16, 1))
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(40, 16, 8)), jnp.float32)
    flat, token = (q.reshape(-1, 8, 32), weights.reshape(-1, 8)), blocks.tokens(q)

    def of_group(blocks: QueryBlocks, token: jax.Array) -> jax.Array:
        return index.scores(*flat, token, blocks, pages, ratio=1)

    got = by_groups(of_group, blocks, token)
    np.testing.assert_array_equal(got[:, 0], of_group(blocks, token)[:, 0])


def test_what_was_never_written_shows_where_it_is_read():
    q, blocks, pages = rows(2, 4, 16, jnp.float32)
    page, entry = pages.table[0, blocks.position[0] // 8], blocks.position[0] % 8
    pool = Pool.plain(pages.pool.values.at[page, entry].set(jnp.nan))
    pages = pages._replace(pool=pool)
    got = swa_attention(q, blocks, pages, jnp.zeros(4), window=8, scale=0.25, target=NATIVE)
    assert np.isnan(got[0]).any() and np.isfinite(got[1]).all()
    found = np.asarray(scores(q, jnp.ones((2, 1, 4)), blocks, pages))
    assert np.isnan(found[0, 0]).sum() == 1 and not np.isnan(found[1]).any()


def test_what_it_takes():
    q, blocks, pages = rows(2, 4, 16, jnp.float32)
    assert supports(q, blocks, [pages], NATIVE) and not supports(q, blocks, [pages], CPU)
    assert not supports(q[..., :8], blocks, [pages], NATIVE)
    assert not supports(q.astype(jnp.bfloat16), blocks, [pages], NATIVE)
