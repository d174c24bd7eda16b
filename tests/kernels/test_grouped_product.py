"""The native product against numpy: every block of rows, every width, several threads and callers at once."""

from __future__ import annotations

import concurrent.futures
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

from pallas_kernels.grouped_matmul import native
from pallas_kernels.grouped_matmul.blocks import Singly
from pallas_kernels.grouped_matmul.native import grouped_product
from pallas_kernels.native.machine_code import Operation

RNG = np.random.default_rng(0)
BLOCKS, (DEPTH, _), FEW = native._BLOCKS, native._PACKED, max(native._FEW.values())


def operands(counts, k, n, dtype="float32", num_matrices=None):
    """x, weights and starts of groups with so many rows."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    x = np.asarray(RNG.normal(size=(starts[-1], k)), jnp.dtype(dtype))
    weights = jnp.asarray(RNG.normal(size=(num_matrices or len(counts), k, n)), dtype)
    return x, weights, starts


def product_of(multiply):
    """`grouped_product`, whatever this CPU is best at."""
    operation = Operation(f"test.product.{type(multiply).__name__}", functools.partial(native._emit, multiply=multiply))

    def run(x, weights, starts):
        shape = jax.ShapeDtypeStruct((x.shape[0], weights.shape[2]), jnp.float32)
        return operation(weights.dtype, shape, x, weights, starts, np.zeros(1, np.int32))

    return run


# two bfloat16 numbers at once, and one: this CPU does one or the other of itself
FORMS = {"chosen": grouped_product, "singly": product_of(Singly())}


def want(x, weights, starts, first=0):
    matrices = np.asarray(weights, np.float64)[first + np.repeat(np.arange(len(starts) - 1), np.diff(starts))]
    return np.einsum("rk,rkn->rn", x.astype(np.float64), matrices)


# blocks of every size; more than are few; none; K odd, or no multiple of the depth; columns with and without strips
@pytest.mark.parametrize(("form", "dtype"), [("chosen", "float32"), ("chosen", "bfloat16"), ("singly", "bfloat16")])
@pytest.mark.parametrize("n", [16, 80, 192, 1104])
@pytest.mark.parametrize("k", [1, 7, 2 * DEPTH - 1, 2 * DEPTH + 6])
def test_product(k, n, form, dtype):
    x, weights, starts = operands([0, *range(1, 14), 0, FEW, FEW + 1, FEW + 30, 0], k, n, dtype)
    got = jax.jit(FORMS[form])(x, weights, starts)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want(x, weights, starts), atol=1e-4)


def test_one_group_is_a_matrix_product():
    for rows in (1, 2, 5, 64):
        x, weights, starts = operands([rows], 24, 208)
        np.testing.assert_allclose(jax.jit(grouped_product)(x, weights, starts), x @ np.asarray(weights[0]), atol=1e-4)


def test_first_chooses_among_the_matrices_of_several_rounds():
    x, weights, starts = operands([2, 0, 3], 8, 32, num_matrices=9)
    run = jax.jit(grouped_product)
    for first in (0, 3, 6):
        np.testing.assert_allclose(run(x, weights, starts, first), want(x, weights, starts, first), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [40, DEPTH + 21])
def test_a_rows_result_does_not_depend_on_its_company(k, form, dtype):
    """To the last bit: blocks of every size, few rows and many, an even number of products and an odd one."""
    x, weights, _ = operands([70], k, 96, dtype)
    run = jax.jit(FORMS[form])
    alone = [np.asarray(run(x[i : i + 1], weights, np.array([0, 1], np.int32))) for i in range(8)]
    for rows in (*BLOCKS, 3, 5, FEW, FEW + 1, 70):
        got = np.asarray(run(x[:rows], weights, np.array([0, rows], np.int32)))
        for i in range(min(rows, 8)):
            np.testing.assert_array_equal(got[i], alone[i][0])


def test_rows_without_a_group_are_not_touched():
    x, weights, starts = operands([3, 2], 8, 32)
    x = np.concatenate([x, np.full((4, 8), np.nan, np.float32)])
    got = jax.jit(lambda *args: grouped_product(*args)[:5])(x, weights, starts)
    np.testing.assert_allclose(got, want(x[:5], weights, starts), atol=1e-5)


def test_callers_at_once_do_not_mix():
    """More callers than cores, which share the threads that help them."""
    cases = [operands(RNG.integers(0, 9, size=5), 64, 128) for _ in range(6)]
    run = jax.jit(grouped_product)
    wants = [want(*case) for case in cases]
    start = threading.Barrier(len(cases))

    def calls(case, right):
        start.wait()
        for _ in range(20):
            np.testing.assert_allclose(run(*case), right, atol=1e-4)

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        for future in [pool.submit(calls, *pair) for pair in zip(cases, wants, strict=True)]:
            future.result()


def test_a_program_that_was_stored_runs():
    x, weights, starts = operands([4], 8, 32)
    program = jax.jit(grouped_product).lower(x, weights, starts).compile()
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(program), execution_devices=jax.devices()[:1]
    )
    np.testing.assert_array_equal(loaded(x, weights, starts), program(x, weights, starts))


@pytest.mark.parametrize(
    ("x", "weights", "error"),
    [
        ((3, 8), (2, 9, 32), r"x \(3, 8\) and weights \(2, 9, 32\) must be \[R, K\] and \[G, K, N\]"),
        ((3, 8), (8, 32), "must be"),
        ((3, 8), (2, 8, 24), r"weights \(2, 8, 24\) of float32 must be of .* and have a multiple of 16 columns"),
    ],
)
def test_shapes_that_do_not_fit(x, weights, error):
    with pytest.raises(ValueError, match=error):
        grouped_product(jnp.zeros(x), jnp.zeros(weights), jnp.zeros(3, jnp.int32))


def test_x_of_another_type_than_the_weights():
    with pytest.raises(ValueError, match="x of float32 must be of the weights' type, bfloat16"):
        grouped_product(jnp.zeros((3, 8)), jnp.zeros((2, 8, 16), jnp.bfloat16), jnp.zeros(3, jnp.int32))


def test_more_groups_than_matrices():
    with pytest.raises(ValueError, match=r"starts \(4,\) are of more groups than weights \(2, 8, 16\) has"):
        grouped_product(jnp.zeros((3, 8)), jnp.zeros((2, 8, 16)), jnp.zeros(4, jnp.int32))


def test_weights_of_another_type():
    with pytest.raises(ValueError, match="of float16 must be of float32 or bfloat16"):
        grouped_product(jnp.zeros((3, 8)), jnp.zeros((2, 8, 16), jnp.float16), jnp.zeros(3, jnp.int32))
