"""Shapes, pool sizes and bytes of the cache, counted by hand."""

from __future__ import annotations

import pytest

from dsjax.cache.spec import EntryKind
from dsjax.config import LayerKind
from dsjax.errors import ConfigError
from tests.cache.specs import MIXED, cache_spec


def test_kinds_of_a_mixed_model():
    spec = cache_spec()
    window, csa, key, hca = (
        spec.kinds[k] for k in (EntryKind.WINDOW, EntryKind.CSA, EntryKind.INDEX_KEY, EntryKind.HCA)
    )
    assert spec.pool_kinds == (EntryKind.WINDOW, EntryKind.CSA, EntryKind.HCA)
    assert spec.compressed_kinds == (EntryKind.CSA, EntryKind.HCA)
    assert [k.num_layers for k in (window, csa, key, hca)] == [4, 2, 2, 1]
    assert [k.format.width for k in (window, csa, key, hca)] == [16, 16, 8, 16]
    assert [k.ratio for k in (window, csa, key, hca)] == [1, 4, 4, 8]
    assert [k.entries_per_page for k in (window, csa, key, hca)] == [8, 8, 8, 2]
    # 7 rows before a chunk of 32 are 5 pages, and 2; 64 CSA entries; 32 HCA entries
    assert [k.table_width for k in (window, csa, key, hca)] == [7, 8, 8, 16]
    # window: 4 requests of 3 pages, 4 for a chunk, 16 snapshots of 2
    assert [k.num_pages for k in (window, csa, key, hca)] == [48, 32, 32, 64]
    assert csa.num_pages == key.num_pages
    assert spec.max_request_tokens == 256
    assert spec.max_chunk_tokens == 32


def test_bytes_are_those_of_the_arrays():
    spec = cache_spec()
    pages = 4 * 48 * 8 * 16 + 2 * 32 * 8 * (16 + 8) + 64 * 2 * 16
    state = (4 + 16) * (2 * 9 * (16 + 8) + 3 * 16)
    assert spec.state_values == 2 * 9 * 24 + 48
    assert spec.num_bytes() == 4 * (pages + state)


def test_sliding_only_model_has_window_pages_alone():
    spec = cache_spec(layer_kinds=(LayerKind.SLIDING,))
    assert list(spec.kinds) == [EntryKind.WINDOW]
    assert spec.state_values == 0
    assert spec.max_request_tokens == 256


def test_flash_shapes():
    spec = cache_spec(window=128, hca_ratio=128, page=64, unit=128, budget=256, max_model_len=8192)
    assert spec.kinds[EntryKind.HCA].entries_per_page == 16  # 2,048 tokens
    assert spec.kinds[EntryKind.HCA].table_width == 4
    assert spec.kinds[EntryKind.CSA].table_width == 32
    assert spec.kinds[EntryKind.WINDOW].table_width == 8


def test_override_fixes_the_pools():
    spec = cache_spec(num_blocks=6)  # 48 tokens: 12 CSA entries, 6 HCA entries
    assert {k: spec.kinds[k].num_pages for k in spec.pool_kinds} == {
        EntryKind.WINDOW: 6,
        EntryKind.CSA: 2,
        EntryKind.HCA: 3,
    }
    assert spec.max_request_tokens == 6 * 8 + 7  # HCA's 6 entries and a window not yet full
    assert spec.max_chunk_tokens == 32


def test_few_window_pages_limit_the_chunk():
    spec = cache_spec(num_blocks=2)
    # 2 pages hold 7 rows and a chunk of 2 wherever they begin: 9 rows from place 7 on are 1 + 8
    assert spec.max_chunk_tokens == 2


def test_override_too_small_for_a_window():
    with pytest.raises(ConfigError, match="num_gpu_blocks_override=1 must be at least 2"):
        cache_spec(num_blocks=1)


def test_memory_limit_shrinks_all_pools():
    full, small = cache_spec(), cache_spec(memory_bytes=80_000)
    assert full.num_bytes() > 80_000 >= small.num_bytes()
    assert small.num_bytes() == 79_232  # 38,400 of STATE; of the rest each pool gets 27 to 30 % of its full size
    assert {k: small.kinds[k].num_pages for k in small.pool_kinds} == {
        EntryKind.WINDOW: 12,
        EntryKind.CSA: 9,
        EntryKind.HCA: 19,
    }
    assert small.max_chunk_tokens == 32
    assert small.max_request_tokens == 256


def test_memory_limit_below_one_chunk_names_the_knobs():
    with pytest.raises(ConfigError, match=r"cache_memory_bytes=40000 is too small.*max_num_seqs=4, num_snapshots=16"):
        cache_spec(memory_bytes=40_000)


def test_without_prefix_caching_there_are_no_snapshots():
    assert cache_spec(prefix=False).num_snapshots == 0


@pytest.mark.parametrize("page", [1, 3, 8, 64])
@pytest.mark.parametrize("window", [1, 2, 8, 100])
def test_default_pools_hold_a_chunk_of_one_request(page, window):
    spec = cache_spec(layer_kinds=MIXED, page=page, window=window, num_seqs=1, num_snapshots=0, max_model_len=40)
    assert spec.max_chunk_tokens == 32
    assert spec.max_request_tokens == 40
