"""Page ids: free, used, cached, and who may release what."""

from __future__ import annotations

import pytest

from dsjax.cache.pool import PagePool


def test_allocates_in_order_and_reuses_late():
    pool = PagePool(4)
    assert pool.allocate(2) == [0, 1]
    pool.release(0)
    assert pool.allocate(3) == [2, 3, 0]
    assert (pool.num_free, pool.num_cached, pool.num_used) == (0, 0, 4)


def test_too_many_pages_take_nothing():
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(ValueError, match="2 pages wanted, 1 of 2 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_page_is_free_after_its_last_reference():
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.retain(page)
    pool.release(page)
    assert pool.num_free == 0
    pool.release(page)
    assert pool.num_free == 1


def test_double_free_raises():
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    pool.release(page)
    with pytest.raises(ValueError, match="page 0 has no reference of a request"):
        pool.release(page)
    with pytest.raises(ValueError, match="page 0 is free"):
        pool.retain(page)


def test_a_holder_cannot_drop_the_other_holders_reference():
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    with pytest.raises(ValueError, match="no reference of the prefix cache"):
        pool.release(page, cache=True)
    pool.retain(page, cache=True)
    pool.release(page)
    with pytest.raises(ValueError, match="no reference of a request"):
        pool.release(page)


def test_cached_is_what_only_the_prefix_cache_holds():
    pool = PagePool(3)
    page, _ = pool.allocate(2)
    pool.retain(page, cache=True)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 2)
    pool.release(page)
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (1, 1, 1, 2)
    pool.retain(page)  # a hit
    assert (pool.num_cached, pool.num_used) == (0, 2)
    pool.check([0, 1], [0])


def test_check_finds_a_leak():
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="page 0"):
        pool.check([], [])
