"""A product of few rows is the product of many; each takes the form that is meant for it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import native
from pallas_kernels.matmul import matmul
from pallas_kernels.target import CPU, Target, traced_for

RNG = np.random.default_rng(0)
HERE = Target("cpu", "host")


def operands(rows, k, n, dtype, stack=()):
    return (
        jnp.asarray(RNG.normal(size=(*stack, rows, k)), dtype),
        jnp.asarray(RNG.normal(size=(*stack, k, n)), dtype),
    )


def compiled(x, weights, target=HERE):
    def run(x, weights):
        with traced_for(target):
            return matmul(x, weights)

    return jax.jit(run).lower(x, weights).compile()


WITH_AMX, WITH_PAIRS, WITHOUT = {"avx512bf16", "amx-bf16"}, {"avx512bf16"}, set()


@pytest.mark.parametrize(
    ("rows", "n", "dtype", "features", "is_native"),
    [
        (1, 32, "float32", WITHOUT, True),
        (128, 32, "float32", WITH_AMX, True),
        (129, 32, "float32", WITH_PAIRS, False),
        (128, 32, "bfloat16", WITH_PAIRS, True),
        (129, 32, "bfloat16", WITH_PAIRS, False),
        (4, 32, "bfloat16", WITH_AMX, True),
        (5, 32, "bfloat16", WITH_AMX, False),
        (4, 32, "bfloat16", WITHOUT, True),
        (5, 32, "bfloat16", WITHOUT, False),
        (4, 24, "float32", WITH_PAIRS, False),  # columns that are no whole vectors
    ],
)
def test_form(rows, n, dtype, features, is_native, monkeypatch):
    monkeypatch.setattr(native, "has_feature", features.__contains__)  # how native code multiplies is this CPU's
    x, weights = operands(rows, 16, n, dtype)
    program = compiled(x, weights)
    assert ("dsjax.grouped_product" in (program.as_text() or "")) == is_native
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    got = program(x, weights)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_plain_jax_is_what_it_says():
    assert "grouped_product" not in (compiled(*operands(1, 16, 32, "float32"), target=CPU).as_text() or "")
    compiled(*operands(1, 16, 32, "float32"))
    assert "grouped_product" not in jax.jit(matmul).lower(*operands(1, 16, 32, "float32")).as_text()  # outside


def test_stacks():
    x, weights = operands(3, 16, 32, "float32", stack=(2,))
    want = np.einsum("gtk,gkn->gtn", np.asarray(x, np.float64), np.asarray(weights, np.float64))
    np.testing.assert_allclose(compiled(x, weights)(x, weights), want, atol=1e-4)


def test_rows_may_have_several_axes():
    x, weights = operands(3, 16, 32, "float32")
    x = jnp.stack([x, -x, 2 * x])
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    np.testing.assert_allclose(compiled(x, weights)(x, weights), want, atol=1e-4)


def test_groups_of_bfloat16_are_not_widened():
    """Where groups come out of a transposition, as they do in the model, XLA's CPU made float32 copies of all of them
    and of the weights, which took longer than the products."""
    x, weights = operands(200, 32, 48, jnp.bfloat16, (3,))

    def run(x, weights):
        with traced_for(HERE):
            return matmul(x.transpose(1, 0, 2), weights).transpose(1, 0, 2)

    program = jax.jit(run).lower(x.transpose(1, 0, 2), weights).compile()
    wide = r"= f32\[(3,32,48|3,200,32|200,3,32)\]\S* fusion\("
    assert not re.findall(wide, program.as_text() or "")
    got = np.asarray(program(x.transpose(1, 0, 2), weights)).transpose(1, 0, 2)
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ np.asarray(weights, np.float64), rtol=1e-3, atol=1e-3)
