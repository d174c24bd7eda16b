"""The tile plan and the grouped matmul against a plain loop over assignments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.dequantize import dequantize
from pallas_kernels.grouped_matmul import group_tiles, grouped_matmul, reference
from pallas_kernels.target import CPU, Target

TARGETS = pytest.mark.parametrize("target", [CPU, Target("tpu", "v6e", interpret=True)], ids=["jnp", "tpu"])


@pytest.mark.parametrize(
    ("num_tokens", "k", "groups", "used"),
    [(1, 2, 6, 1), (1, 6, 16, 1), (8, 4, 16, 5), (40, 2, 6, 40), (300, 4, 16, 290), (16, 2, 4, 0)],
)
@pytest.mark.parametrize("one_group", [False, True])
@TARGETS
def test_every_assignment_gets_its_groups_product(num_tokens, k, groups, used, one_group, target):
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(groups)[:k] for _ in range(num_tokens)]).astype(np.int32)
    if one_group:  # all tokens on the same experts, all others empty
        chosen[:] = chosen[0]
    x = rng.normal(size=(num_tokens, 32)).astype(np.float32)
    weights = rng.normal(size=(groups, 32, 24)).astype(np.float32)

    @jax.jit
    def run(x, chosen, used, weights):
        chosen = jnp.where(jnp.arange(num_tokens)[:, None] < used, chosen, groups)
        tiles = group_tiles(chosen, groups, target=target)
        rows = jnp.take(x, tiles.source // k, axis=0, mode="fill", fill_value=0)
        out = grouped_matmul(rows, weights, tiles, target=target)
        got = jnp.take(out, tiles.destination, axis=0, mode="fill", fill_value=0)
        return out, reference.grouped_matmul(rows, weights, tiles.group, tiles.num_tiles), got

    out, expected, got = run(x, chosen, jnp.int32(used), weights)
    np.testing.assert_allclose(out, expected, atol=1e-4)
    got = np.asarray(got).reshape(num_tokens, k, -1)
    want = np.einsum("td,tkdf->tkf", x, weights[chosen])
    want[used:] = 0
    np.testing.assert_allclose(got, want, atol=1e-4)  # sums of 32 products in another order


@pytest.mark.parametrize("num_tokens", [1, 40])  # a gather, and a loop over tiles
@pytest.mark.parametrize("form", ["fp4", "fp8"])
@TARGETS
def test_stored_weights_give_what_widened_ones_give(num_tokens, form, target):
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(6)[:2] for _ in range(num_tokens)]).astype(np.int32)
    x = rng.normal(size=(num_tokens, 64)).astype(np.float32)
    if form == "fp4":
        codes, scale = rng.integers(-128, 128, (6, 32, 24)).astype(np.int8), rng.integers(110, 140, (6, 2, 24))
        scale = scale.astype(np.uint8)
    else:
        codes = rng.normal(size=(6, 64, 24)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.1, 1, (6, 1, 1)).astype(np.float32)

    @jax.jit
    def run(weights, scale):
        tiles = group_tiles(chosen, 6, target=target)
        rows = jnp.take(x, tiles.source // 2, axis=0, mode="fill", fill_value=0)
        return grouped_matmul(rows, weights, tiles, scale, target)

    widened = dequantize(jnp.asarray(codes), jnp.asarray(scale), jnp.float32)
    got, want = run(codes, scale), run(widened, None)
    assert np.abs(want).max() > 1
    if target == CPU:
        np.testing.assert_array_equal(got, want)
    else:  # FP4's even and odd rows are summed apart
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_work_is_proportional_to_the_tokens_in_use():
    def tiles(used):
        chosen = jnp.zeros((256, 2), jnp.int32).at[:, 1].set(1)
        return group_tiles(jnp.where(jnp.arange(256)[:, None] < used, chosen, 4), 4)

    assert int(tiles(256).num_tiles) == 2 * 256 // tiles(256).tile_rows
    assert int(tiles(1).num_tiles) == 2
    assert int(tiles(0).num_tiles) == 0


def test_shapes_are_checked():
    tiles = group_tiles(jnp.zeros((4, 2), jnp.int32), 2)
    rows = tiles.source.shape[0]
    with pytest.raises(ValueError, match="must have the plan's"):
        grouped_matmul(jnp.zeros((rows + 1, 8)), jnp.zeros((2, 8, 4)), tiles)
    with pytest.raises(ValueError, match="do not fit x"):
        grouped_matmul(jnp.zeros((rows, 8)), jnp.zeros((2, 9, 4)), tiles)
