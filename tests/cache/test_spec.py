"""Shapes, pool sizes and bytes of the cache, counted by hand."""

from __future__ import annotations

import pytest

from configs.models import MODELS
from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.config import CacheConfig, LayerKind, SchedulerConfig
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
    state = (4 + 16) * (2 * 6 * (16 + 8) + 3 * 16)
    assert spec.state_values == 2 * 6 * 24 + 48
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
    full, small = cache_spec(), cache_spec(memory_bytes=68_480)
    assert full.num_bytes() > 68_480 >= small.num_bytes()
    assert small.num_bytes() == 67_712  # 26,880 of STATE; of the rest each pool gets 27 to 30 % of its full size
    assert {k: small.kinds[k].num_pages for k in small.pool_kinds} == {
        EntryKind.WINDOW: 12,
        EntryKind.CSA: 9,
        EntryKind.HCA: 19,
    }
    assert small.max_chunk_tokens == 32
    assert small.max_request_tokens == 256


def test_memory_limit_shrinks_what_long_requests_need_before_what_all_need():
    """A million tokens a request at most is no reason to have window pages for few requests."""
    full, small = (cache_spec(max_model_len=4096, memory_bytes=bytes) for bytes in (1 << 30, 240_000))
    pages = [{k: spec.kinds[k].num_pages for k in spec.pool_kinds} for spec in (full, small)]
    # 26,880 bytes of STATE; 48 window pages of 2,048 bytes; the rest is an eighth of what the others would take.
    assert pages == [
        {EntryKind.WINDOW: 48, EntryKind.CSA: 512, EntryKind.HCA: 1024},
        {EntryKind.WINDOW: 48, EntryKind.CSA: 64, EntryKind.HCA: 128},
    ]
    assert small.num_bytes() <= 240_000


def test_how_many_requests_fit_and_what_bounds_them():
    spec = cache_spec(num_blocks=24, window=128, hca_ratio=128, page=64, unit=128, num_seqs=8, max_model_len=1024)
    assert {k: spec.kinds[k].num_pages for k in spec.pool_kinds} == {
        EntryKind.WINDOW: 24,
        EntryKind.CSA: 6,
        EntryKind.HCA: 1,
    }
    # A CSA page holds 256 tokens, an HCA page 2,048.
    found = [spec.num_requests(num_tokens) for num_tokens in (1024, 256, 127)]
    assert found == [(1, EntryKind.CSA), (1, EntryKind.HCA), (6, EntryKind.CSA)]  # 127 tokens complete no HCA entry
    assert spec.describe(1024) == (
        "requests that fit at once: 1 of max_model_len=1024 tokens (csa pages) or 1 of 128 tokens (hca pages); "
        "pages: 24 window, 6 csa, 1 hca"
    )
    roomy = cache_spec(num_seqs=3)
    assert roomy.num_requests(256)[0] == 3 and "3 of max_model_len=256 tokens (max_num_seqs=3)" in roomy.describe(256)
    spec_of_few = cache_spec(num_blocks=24, window=128, page=64, num_seqs=8, max_model_len=1024)
    assert spec_of_few.can_hold([256] * spec_of_few.num_requests(256)[0])


def test_memory_limit_below_one_chunk_names_the_knobs():
    with pytest.raises(ConfigError, match=r"cache_memory_bytes=28480 is too small.*max_num_seqs=4, num_snapshots=16"):
        cache_spec(memory_bytes=28_480)


def test_without_prefix_caching_there_are_no_snapshots():
    assert cache_spec(prefix=False).num_snapshots == 0


@pytest.mark.parametrize("page", [1, 3, 8, 64])
@pytest.mark.parametrize("window", [1, 2, 8, 100])
def test_default_pools_hold_a_chunk_of_one_request(page, window):
    spec = cache_spec(layer_kinds=MIXED, page=page, window=window, num_seqs=1, num_snapshots=0, max_model_len=40)
    assert spec.max_chunk_tokens == 32
    assert spec.max_request_tokens == 40


FLASH_BYTES = {"bfloat16": 6880, "fp8": 3850, "fp8_fp4": 3514}  # a token, counted by hand from the release's entries


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize(("form", "theory"), FLASH_BYTES.items())
def test_a_token_of_flash_takes_what_its_entries_do(form, theory, num_parts, tiled):
    """21 layers an entry and a key for 4 tokens, 20 layers an entry for 128: at most 1.05 times the theory."""
    spec = CacheSpec.of(
        MODELS["deepseek-v4-flash"](),
        CacheConfig(kv_cache_dtype=form, cache_memory_bytes=1 << 36),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        32768,
        num_parts=num_parts,
        tiled=tiled,
    )
    assert theory <= num_parts * spec.bytes_per_token() <= 1.05 * theory
    full = 4 * 32768 * spec.bytes_per_token()
    pages = sum(k.num_pages * k.page_bytes for k in spec.kinds.values() if k.window is None)
    assert pages == full


def test_each_kind_of_entry_may_have_its_own_format():
    spec = cache_spec(index=32, kv_cache_dtype="fp8", window_cache_dtype="bfloat16", index_cache_dtype="fp4")
    assert [spec.kinds[k].format.name for k in EntryKind if k in spec.kinds] == ["bfloat16", "fp8", "fp4", "fp8"]
    spec = cache_spec(dtype="bfloat16", window_cache_dtype="int8")
    assert [spec.kinds[k].format.name for k in EntryKind if k in spec.kinds] == ["int8", *["bfloat16"] * 3]


def test_a_format_that_cannot_hold_the_model_s_entries_is_refused():
    with pytest.raises(ConfigError, match=r"index_key entries.*fp4 takes keys of 32, 64 or 128 channels, not 8"):
        cache_spec(kv_cache_dtype="fp8_fp4")


def test_bytes_of_quantised_pages_by_hand():
    spec = cache_spec(kv_cache_dtype="fp8")
    # 16 channels of which 8 are rotary: 16 bytes of values, 2 words of low bytes and one of scales in units of 4 words
    assert [spec.kinds[k].page_bytes for k in EntryKind if k in spec.kinds] == [
        4 * 8 * (16 + 16),
        2 * 8 * (16 + 16),
        2 * 8 * (8 + 4),
        2 * (16 + 16),
    ]
