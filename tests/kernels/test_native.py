"""What native operations are made of: vectors' functions, and their compilation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir

from pallas_kernels.native import numbers
from pallas_kernels.native.emit import LANES, LONG, long
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native.operands import data, dim, items, result


def _exp(module: ir.Module, name: str, kind: ir.Type) -> None:
    """x [16 * n] -> exp(x), rounded to `kind`. A unit is a vector."""
    b, frame, first, stop = items(
        module, name, lambda b, frame: b.udiv(dim(b, frame, 0, 0), long(LANES)), size=3, most=4
    )

    def unit(i) -> None:
        at = b.mul(i, ir.Constant(LONG, LANES))
        x = b.vector(b.element(data(b, frame, 0), at, kind), kind)
        numbers.store(b, numbers.exp(b, x), b.element(result(b, frame, 0), at, kind), kind)

    b.loop(first, lambda i: b.icmp_signed("<", i, stop), 1, unit)
    b.ret_void()


EXP = Operation("test.exp", _exp)


def test_exp_in_items_of_several_threads():
    x = jnp.linspace(-86, 87, 16 * 1001)
    got = np.asarray(EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    np.testing.assert_allclose(got, np.exp(np.asarray(x, np.float64)), rtol=3e-7)


def test_exp_at_its_ends():
    x = jnp.asarray([-jnp.inf, -1e30, -100, 0, 100, jnp.inf, jnp.nan, 1.0] * 2, jnp.float32)
    got = np.asarray(EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x))[:8]
    assert (got[:3] < 2e-38).all() and got[3] == 1 and (got[4:6] > 1e38).all() and np.isfinite(got[4:6]).all()
    assert np.isnan(got[6]) and got[7] == np.float32(np.e)


def test_bfloat16_is_rounded_to_the_nearest_even():
    x = jnp.linspace(-5, 5, 64).astype(jnp.bfloat16)
    got = EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    np.testing.assert_array_equal(got, jnp.exp(x.astype(jnp.float32)).astype(jnp.bfloat16))


def test_a_small_call_is_one_item_and_others_are_cut():
    for num in (1, 4, 5, 7):
        x = jnp.linspace(-1, 1, 16 * num)
        got = EXP(x.dtype, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        np.testing.assert_allclose(got, jnp.exp(x), rtol=3e-7)
