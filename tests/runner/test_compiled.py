"""What the compiled steps look like: the cache is updated in place, never copied nor widened."""

from __future__ import annotations

import math
import re

import jax
import pytest

from tests.tiny_model import DECODE, MIXED, new_runner, tiny_runner


@pytest.mark.parametrize("bucket", [*DECODE, *MIXED], ids=str)
def test_no_step_copies_a_pool(bucket):
    """XLA copies a whole pool at every layer if a slice of it is read before it is written, or one row is scattered."""
    runner = tiny_runner()
    compiled = runner._program(bucket)
    text = compiled.as_text()
    arrays = jax.tree.leaves(runner.cache)
    for dims in _dims(arrays):
        assert not re.findall(rf"f32\[{dims}\]\S* copy\(", text), f"{bucket} copies f32[{dims}]"
    # every cache array and sampling table is an input that becomes an output
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
    assert aliases is not None
    assert aliases[1].count("may-alias") + aliases[1].count("must-alias") == len(arrays) + 3


@pytest.mark.parametrize("bucket", [DECODE[1], *MIXED], ids=str)
def test_no_step_widens_a_pool_of_bfloat16(bucket):
    """XLA's CPU scatters into bfloat16 by converting all of it to float32 and back."""
    runner = new_runner(dtype="bfloat16")
    pools = jax.tree.leaves(runner.cache.pools)
    assert {pool.dtype.name for pool in pools} == {"uint16"}
    text = runner.lower(bucket).compile().as_text()
    for dims in _dims(pools):
        assert re.findall(rf"u16\[{dims}\]", text) and not re.findall(rf"b?f\d+\[{dims}\]", text)
        assert not re.findall(rf"u16\[{dims}\]\S* copy\(", text), f"{bucket} copies u16[{dims}]"


def _dims(arrays: list[jax.Array]) -> list[str]:
    """Of the arrays themselves, and of their flat views [rows, width]."""
    shapes = [shape for x in arrays for shape in (x.shape, (math.prod(x.shape[:-1]), x.shape[-1]))]
    return [",".join(map(str, shape)) for shape in shapes]


def test_a_program_that_does_copy_is_noticed():
    """The pattern above finds a copy where there is one."""
    import jax.numpy as jnp

    def slice_then_update(pool):
        old = jax.lax.dynamic_slice_in_dim(pool, 0, 1)
        pool = jax.lax.dynamic_update_slice_in_dim(pool, old * 2, 5, axis=0)
        return pool, old, pool.sum()

    pool = jnp.zeros((4096, 64))
    text = jax.jit(lambda x: (slice_then_update(x), x)).lower(pool).compile().as_text()
    assert re.findall(r"f32\[4096,64\]\S* copy\(", text)
