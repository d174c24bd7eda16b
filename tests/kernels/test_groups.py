"""Blocks taken in groups give what all of them give at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import QueryBlocks
from pallas_kernels.groups import GROUP_BLOCKS, by_groups

NUM_BLOCKS, BLOCK = 2 * GROUP_BLOCKS + 8, 4


def body(blocks: QueryBlocks, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Something of every block's own numbers, in two shapes and types."""
    return {"sum": x + blocks.position[:, None, None], "less": (y < blocks.row[:, None])[..., None]}


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [1],
        [BLOCK],
        [BLOCK] * NUM_BLOCKS,
        [1] * NUM_BLOCKS,
        [BLOCK] * GROUP_BLOCKS + [1],
        [BLOCK] * (GROUP_BLOCKS - 1) + [2] + [1] * GROUP_BLOCKS,
        [BLOCK] * (GROUP_BLOCKS + 3) + [1] * 20,
        [1, 0, 3, 1, BLOCK, 0, 0, 1] * 5,
        [0] * (NUM_BLOCKS - 1) + [2],
    ],
)
def test_groups_give_what_all_blocks_give(lengths: list[int]):
    length = np.array(lengths + [0] * (NUM_BLOCKS - len(lengths)), np.int32)
    rng = np.random.default_rng(0)
    blocks = QueryBlocks(*(jnp.asarray(v) for v in (rng.integers(9, size=NUM_BLOCKS), np.arange(NUM_BLOCKS), length)))
    x = jnp.asarray(rng.normal(size=(NUM_BLOCKS, BLOCK, 3)), jnp.float32)
    y = jnp.asarray(rng.integers(9, size=(NUM_BLOCKS, BLOCK)))
    actual, expected = jax.jit(lambda: by_groups(body, blocks, x, y))(), body(blocks, x, y)
    used = np.arange(BLOCK) < length[:, None]
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(actual[name])[used], np.asarray(value)[used])


def test_what_is_not_in_use_is_not_computed():
    """Past the last group with a block of several queries, only first queries are; past the last block, nothing."""
    length = np.zeros(NUM_BLOCKS, np.int32)
    length[:3], length[3 : GROUP_BLOCKS + 1] = BLOCK, 1
    blocks = QueryBlocks(jnp.zeros(NUM_BLOCKS, jnp.int32), jnp.zeros(NUM_BLOCKS, jnp.int32), jnp.asarray(length))
    ones = jnp.ones((NUM_BLOCKS, BLOCK))
    actual = np.asarray(jax.jit(lambda: by_groups(lambda blocks, x: x, blocks, ones))())
    expected = np.zeros((NUM_BLOCKS, BLOCK))
    expected[:GROUP_BLOCKS] = 1
    expected[GROUP_BLOCKS : 2 * GROUP_BLOCKS, 0] = 1
    np.testing.assert_array_equal(actual, expected)


def test_few_blocks_are_one_call():
    blocks = QueryBlocks(*(jnp.zeros(GROUP_BLOCKS, jnp.int32) for _ in range(3)))
    text = (
        jax.jit(lambda x: by_groups(lambda blocks, x: x * 2, blocks, x))
        .lower(jnp.ones((GROUP_BLOCKS, BLOCK)))
        .as_text()
    )
    assert "while" not in text
