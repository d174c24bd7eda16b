"""What native code does around the experts' products, by the formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import clamped_swiglu, native, swiglu
from pallas_kernels.target import CPU, HOST, Target, traced_for

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def chosen(num_tokens: int, k: int, num_experts: int) -> np.ndarray:
    """Experts of tokens, of which a fifth is none; no token chooses the middle one."""
    rng = np.random.default_rng(num_tokens)
    experts = rng.integers(0, num_experts, (num_tokens, k)).astype(np.int32)
    experts[(rng.random(experts.shape) < 0.2) | (experts == num_experts // 2)] = num_experts
    return experts


def check_sorted(experts: np.ndarray, num_experts: int, dtype: str) -> None:
    num_tokens, k = experts.shape
    width = 128
    x = jnp.asarray(np.random.default_rng(0).normal(size=(num_tokens, width)), dtype)
    starts, place, rows = jax.jit(native.sort, static_argnums=2)(experts, x, num_experts)
    flat = experts.ravel()
    order = np.argsort(flat, kind="stable")[: np.sum(flat < num_experts)]
    np.testing.assert_array_equal(starts, np.searchsorted(flat[order], np.arange(num_experts + 1)))
    want = np.full(num_tokens * k, num_tokens * k)
    want[order] = np.arange(len(order))
    np.testing.assert_array_equal(place, want)
    np.testing.assert_array_equal(rows[: len(order)], x[order // k])


@DTYPES
@pytest.mark.parametrize(("num_tokens", "k", "num_experts"), [(1, 4, 16), (3, 5, 3), (40, 1, 7), (700, 4, 256)])
def test_assignments_are_sorted_by_expert(num_tokens, k, num_experts, dtype):
    """The last one is of several items."""
    check_sorted(chosen(num_tokens, k, num_experts), num_experts, dtype)


@pytest.mark.parametrize("num_tokens", [1, 1100])
@pytest.mark.parametrize("expert", [0, 4, 5], ids=["first", "last", "none"])
def test_all_assignments_are_of_one_expert(expert, num_tokens):
    check_sorted(np.full((num_tokens, 2), expert, np.int32), 5, "float32")


def gates(num_rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(0, 3, (num_rows, 2 * width)).astype(np.float32)


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 2**-8)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (7, 48), (300, 256)])
def test_activation_is_the_formula(num_rows, width, dtype, rtol, limit):
    x = gates(num_rows, width)
    used = num_rows - num_rows // 3
    got = native.activate(jnp.asarray(x), np.array([0, used], np.int32), limit, jnp.dtype(dtype))
    assert got.dtype == dtype and got.shape == (num_rows, width)
    gate, up = np.split(x[:used].astype(np.float64), 2, axis=1)
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    np.testing.assert_allclose(np.asarray(got[:used], np.float64), gate / (1 + np.exp(-gate)) * up, rtol=rtol)


def test_activation_of_what_is_not_a_number_and_of_large_numbers():
    gate, up = np.zeros((2, 16), np.float32)
    gate[:6], up[:6] = (np.nan, 1, 1e30, -1e30, -200, 3), (1, np.nan, 1, 1, 1, np.inf)
    for limit in (0.0, 2.0):
        got = native.activate(jnp.asarray([[*gate, *up]]), np.array([1], np.int32), limit, jnp.dtype("float32"))[0]
        want = np.asarray(clamped_swiglu(jnp.asarray([*gate, *up]), limit))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@DTYPES
def test_the_activation_that_is_traced_for_a_cpu_with_native_code_is_plain_jaxs(dtype):
    x = jnp.asarray(gates(9, 32))

    def of(target: Target, x: jax.Array) -> tuple[jax.Array, str]:
        def run(x):
            with traced_for(target):
                return swiglu(x, 1.0, jnp.dtype(dtype))

        lowered = jax.jit(run).lower(x)
        return lowered.compile()(x), lowered.as_text()

    (got, code), (want, plain) = of(Target("cpu", HOST), x), of(CPU, x)
    assert "dsjax.clamped_swiglu" in code and "dsjax.clamped_swiglu" not in plain
    assert "dsjax.clamped_swiglu" not in of(Target("cpu", HOST), x[:, :40])[1]  # not of whole vectors
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize(("num_tokens", "k", "width"), [(1, 1, 16), (1, 4, 48), (9, 5, 64), (300, 4, 256)])
def test_results_are_weighted_and_added_in_the_order_of_choices(num_tokens, k, width):
    rng = np.random.default_rng(num_tokens)
    num_rows = num_tokens * k
    out = rng.normal(size=(num_rows, width)).astype(np.float32)
    weights = rng.normal(size=(num_tokens, k)).astype(np.float32)
    place = rng.permutation(num_rows).astype(np.int32)
    none = rng.random(num_rows) < 0.3
    out[place[none]] = np.nan  # is nobody's place
    place[none] = num_rows
    got = np.asarray(native.combine(jnp.asarray(out), jnp.asarray(place), jnp.asarray(weights)))
    assert got.dtype == np.float32
    rows = np.vstack([out, np.zeros((1, width), np.float32)])[place].reshape(num_tokens, k, width)
    total = np.zeros((num_tokens, width), np.float32)
    for j in range(k):  # each product is rounded with the sum
        total = (rows[:, j].astype(np.float64) * weights[:, j, None] + total).astype(np.float32)
    np.testing.assert_allclose(got, total, rtol=1e-6, atol=1e-7)


def test_no_result_depends_on_the_other_tokens():
    experts, weights = chosen(40, 4, 8), np.random.default_rng(0).uniform(size=(40, 4)).astype(np.float32)
    x = jnp.asarray(gates(40, 32))

    @jax.jit
    def run(experts, weights, x):
        starts, place, rows = native.sort(experts, x, 8)
        hidden = native.activate(rows, starts, 1.0, jnp.dtype("float32"))
        return native.combine(hidden, place, weights)

    whole = run(experts, weights, x)
    for some in (slice(0, 1), slice(5, 17)):
        np.testing.assert_array_equal(run(experts[some], weights[some], x[some]), whole[some])
