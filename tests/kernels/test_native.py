"""What native operations are made of: vectors' functions, and their compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import FLOAT, HALF, LANES, LONG, POINTER, VECTOR, VOID, Builder, long
from pallas_kernels.native.machine_code import Operation, has_feature
from pallas_kernels.native.operands import data, dim, items, result


def _function(module: ir.Module, name: str, kind: ir.Type, of: Callable) -> None:
    """x [16 * n] -> of(x), rounded to `kind`. A unit is a vector."""
    b, frame, first, stop = items(
        module, name, lambda b, frame: b.udiv(dim(b, frame, 0, 0), long(LANES)), size=3, most=4
    )

    def unit(i) -> None:
        at = b.mul(i, ir.Constant(LONG, LANES))
        x = b.vector(b.element(data(b, frame, 0), at, kind), kind)
        numbers.store(b, of(b, x), b.element(result(b, frame, 0), at, kind), kind)

    b.loop(first, lambda i: b.icmp_signed("<", i, stop), 1, unit)
    b.ret_void()


EXP = Operation("test.exp", functools.partial(_function, of=numbers.exp))
LOG1P = Operation("test.log1p", functools.partial(_function, of=numbers.log1p), ("float32",))


def test_exp_in_items_of_several_threads():
    x = jnp.linspace(-86, 87, 16 * 1001)
    got = np.asarray(EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    np.testing.assert_allclose(got, np.exp(np.asarray(x, np.float64)), rtol=3e-7)


def test_exp_at_its_ends():
    x = jnp.asarray([-jnp.inf, -1e30, -100, 0, 100, jnp.inf, jnp.nan, 1.0] * 2, jnp.float32)
    got = np.asarray(EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x))[:8]
    assert (got[:3] < 2e-38).all() and got[3] == 1 and (got[4:6] > 1e38).all() and np.isfinite(got[4:6]).all()
    assert np.isnan(got[6]) and got[7] == np.float32(np.e)


def test_log1p():
    x = jnp.concatenate([jnp.linspace(0, 1, 16 * 1000), jnp.logspace(-37, 0, 16 * 1000)])
    got = np.asarray(LOG1P(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    np.testing.assert_allclose(got, np.log1p(np.asarray(x, np.float64)), rtol=3e-7)


def test_bfloat16_is_rounded_to_the_nearest_even():
    x = jnp.linspace(-5, 5, 64).astype(jnp.bfloat16)
    got = EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    np.testing.assert_array_equal(got, jnp.exp(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_a_small_call_is_one_item_and_others_are_cut():
    for num in (1, 4, 5, 7):
        x = jnp.linspace(-1, 1, 16 * num)
        got = EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        np.testing.assert_allclose(got, jnp.exp(x), rtol=3e-7)


def _pairs(module: ir.Module, name: str, kind: ir.Type) -> None:
    """x and y [32] bfloat16, sums [16] -> the sums of the products of pairs, [16]."""
    function = ir.Function(module, ir.FunctionType(LONG, [POINTER, LONG]), f"{name}.count")
    Builder(function).ret(long(1))
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, LONG, LONG]), f"{name}.item")
    b, frame = Builder(function), function.args[0]
    x, y = (b.load(data(b, frame, i), align=2, typ=ir.VectorType(HALF, 2 * LANES)) for i in (0, 1))
    sums = b.load(data(b, frame, 2), align=4, typ=VECTOR)
    numbers.store(b, b.add_products_of_pairs(x, y, sums), result(b, frame, 0), FLOAT)
    b.ret_void()


@pytest.mark.skipif(not has_feature("avx512bf16"), reason="a CPU without it")
def test_products_of_pairs():
    pairs = Operation("test.pairs", _pairs)
    x, y = (jax.random.normal(jax.random.key(i), (32,)).astype(jnp.bfloat16) for i in (0, 1))
    sums = jnp.arange(16.0)
    got = pairs(jnp.dtype("float32"), jax.ShapeDtypeStruct((16,), jnp.float32), x, y, sums)
    products = np.asarray(x, np.float64) * np.asarray(y, np.float64)
    np.testing.assert_allclose(got, sums + products.reshape(16, 2).sum(1), rtol=1e-6)


def test_a_feature_that_no_cpu_has():
    assert not has_feature("none-such")
