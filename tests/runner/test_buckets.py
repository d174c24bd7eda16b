"""Whatever rows a step has, some bucket holds its tokens, rows, blocks of queries and pieces of windows."""

import random

import pytest

from dsjax.config import SchedulerConfig
from dsjax.runner.buckets import BLOCK_QUERIES, Bucket, Buckets


def grid(max_num_seqs, budget, min_rows=1):
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Buckets(config, min_rows)


def test_the_grid_of_the_defaults():
    buckets = grid(16, 256)
    assert [b.num_rows for b in buckets.decode] == [1, 2, 4, 8, 16]
    assert all(b.num_tokens == b.num_rows and b.is_decode for b in buckets.decode)
    assert buckets.mixed == [Bucket(t, 16, 16) for t in (16, 64, 256)]
    assert len(buckets) == len(list(buckets)) == 8


def test_many_rows_make_buckets_of_few_rows_too():
    buckets = grid(32, 256)
    assert [b.num_rows for b in buckets.decode] == [1, 2, 4, 8, 16, 32]
    assert buckets.mixed == [Bucket(t, r, 16) for t, r in ((16, 8), (16, 16), (64, 8), (64, 32), (256, 8), (256, 32))]


def test_small_limits_make_small_grids():
    assert list(grid(1, 1)) == [Bucket(1, 1, 1), Bucket(1, 1, 1)]
    assert list(grid(3, 5)) == [Bucket(1, 1, 1), Bucket(2, 2, 1), Bucket(3, 3, 1), Bucket(5, 3, 5)]
    assert grid(1, 8, min_rows=2).decode == [Bucket(2, 2, 1)]


@pytest.mark.parametrize(
    ("num_new", "bucket"),
    [
        ([1], Bucket(1, 1, 1)),
        ([1] * 3, Bucket(4, 4, 1)),
        ([1] * 16, Bucket(16, 16, 1)),
        ([2], Bucket(16, 16, 16)),
        ([16], Bucket(16, 16, 16)),
        ([17], Bucket(64, 16, 16)),
        ([1] * 7 + [9], Bucket(16, 16, 16)),
        ([1] * 8 + [8], Bucket(16, 16, 16)),
        ([1] * 15 + [241], Bucket(256, 16, 16)),
        ([256], Bucket(256, 16, 16)),
    ],
)
def test_the_smallest_bucket_is_chosen(num_new, bucket):
    assert grid(16, 256).choose([(len(num_new), sum(num_new))]) == bucket


@pytest.mark.parametrize(
    ("max_num_seqs", "budget"), [(1, 1), (1, 7), (3, 5), (4, 4), (8, 16), (16, 256), (64, 64), (64, 100), (5, 33)]
)
def test_blocks_and_pieces_of_random_rows_fit(max_num_seqs, budget):
    buckets, rng = grid(max_num_seqs, budget), random.Random(budget)
    for _ in range(2000):
        rows = rng.randint(1, max_num_seqs)
        spare = budget - rows
        num_new = []
        for _ in range(rows):
            extra = rng.choice([0, rng.randint(0, spare), min(spare, rng.choice([3, 14, 15, 16]))])
            spare -= extra
            num_new.append(1 + extra)
        bucket = buckets.choose([(rows, sum(num_new))])
        assert bucket.num_tokens >= sum(num_new) and bucket.num_rows >= rows
        assert sum(-(-n // bucket.block) for n in num_new) <= bucket.num_blocks
        for ratio in (2, 4, 8, 128):
            pieces = 0
            for n in num_new:
                start = rng.randint(0, 3 * ratio)
                pieces += (start + n - 1) // ratio - start // ratio + 1
            assert pieces <= bucket.num_pieces(ratio)


def test_a_row_of_one_block_more_than_fits_evenly():
    # 64 tokens as 7 rows of one and one of 57: 4 blocks, of which the last has 9
    bucket = grid(8, 64).choose([(8, 64)])
    assert bucket.block == BLOCK_QUERIES
    assert (bucket.num_blocks, 7 + 4) == (12, 11)
