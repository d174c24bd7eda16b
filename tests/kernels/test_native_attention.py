"""Native attention beyond what the attention tests ask of every target: bfloat16, several items, and its limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.indexer_topk import native as index
from pallas_kernels.indexer_topk.reference import index_scores
from pallas_kernels.native_attention import supports
from pallas_kernels.pool import Pool
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import CPU, HOST, Target

NATIVE = Target("cpu", HOST)


def rows(num_rows: int, heads: int, width: int, dtype: jnp.dtype, epp: int = 8, pages: int = 6):
    """Queries, blocks and pages with all entries written."""
    rng = np.random.default_rng(num_rows)
    num = num_rows * pages
    pool = jnp.asarray(rng.normal(size=(num, epp, width)), dtype)
    if dtype == jnp.bfloat16:
        pool = jax.lax.bitcast_convert_type(pool, jnp.uint16)
    form = EntryFormat(jnp.dtype(dtype).name, width, as_bits=dtype == jnp.bfloat16)
    table = jnp.asarray(rng.permutation(num).reshape(num_rows, pages), jnp.int32)
    position = jnp.asarray(rng.integers(0, epp * pages, num_rows), jnp.int32)
    blocks = QueryBlocks(jnp.arange(num_rows), position, jnp.ones(num_rows, jnp.int32))
    q = jnp.asarray(rng.normal(size=(num_rows, 1, heads, width)), dtype)
    return q, blocks, Pages(Pool(pool, None, form), table, 0, num)


@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize(("heads", "width"), [(4, 48), (8, 128)])
def test_many_rows_equal_the_reference(heads, width, dtype, atol):
    q, blocks, pages = rows(9, heads, width, dtype)
    sink = jnp.linspace(-1, 2, heads)
    assert supports(q, [pages, pages], NATIVE)
    want, got = (
        hca_attention(q, blocks, pages, pages, sink, window=20, ratio=3, scale=width**-0.5, target=target)
        for target in (CPU, NATIVE)
    )
    np.testing.assert_allclose(got, want, atol=atol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_scores_equal_plain_ones(dtype):
    q, blocks, pages = rows(5, 8, 32, dtype, epp=64)  # 384 keys: more than a run of them
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(5, 1, 8)), jnp.float32)
    got = index.scores(q, weights, blocks, pages, ratio=1)
    keys = pages.read_pages(blocks.row, jnp.int32(0), 6, dtype)
    want = jax.vmap(index_scores)(q, weights, keys)
    visible = jnp.arange(384) < blocks.position[:, None, None] + 1
    np.testing.assert_allclose(got, jnp.where(visible, want, -jnp.inf), rtol=1e-4, atol=1e-4)


def test_what_was_never_written_shows_where_it_is_read():
    q, blocks, pages = rows(2, 4, 16, jnp.float32)
    page, entry = pages.table[0, blocks.position[0] // 8], blocks.position[0] % 8
    pool = Pool.plain(pages.pool.values.at[page, entry].set(jnp.nan))
    pages = pages._replace(pool=pool)
    got = swa_attention(q, blocks, pages, jnp.zeros(4), window=8, scale=0.25, target=NATIVE)
    assert np.isnan(got[0]).any() and np.isfinite(got[1]).all()
    scores = np.asarray(index.scores(q, jnp.ones((2, 1, 4)), blocks, pages, ratio=1))
    assert np.isnan(scores[0, 0]).sum() == 1 and not np.isnan(scores[1]).any()


def test_what_it_takes():
    q, _, pages = rows(2, 4, 16, jnp.float32)
    assert supports(q, [pages], NATIVE) and not supports(q, [pages], CPU)
    assert not supports(jnp.repeat(q, 2, axis=1), [pages], NATIVE)  # blocks of queries
    assert not supports(q[:, :, :3], [pages], NATIVE)
    assert not supports(q.astype(jnp.bfloat16), [pages], NATIVE)
