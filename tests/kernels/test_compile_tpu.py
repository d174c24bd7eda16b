"""Every TPU kernel is accepted by the compiler of every generation, at the shapes of Flash and Pro.

Nothing runs. Needs libtpu (the extra `tpu`); without it these are left out, and fail where CI=true.
"""

from __future__ import annotations

import dataclasses
import math
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from dsjax import aot
from pallas_kernels import all_cases
from pallas_kernels.case import Case, array
from pallas_kernels.indexer_topk import cases as indexer_cases
from pallas_kernels.target import Target

GENERATIONS = [name for name, target in aot.CHIPS.items() if target.platform == "tpu"]
V6E = Target("tpu", "v6e")  # tiled as any
pytestmark = pytest.mark.usefixtures("compiled_anew")
CASES = all_cases.cases()
ATTENTION = [case for case in CASES if "window_pool" in case.arrays]
INDEXER = [*indexer_cases.cases(), *indexer_cases.cases(formats=("float32",))]
WRITERS = [case for case in CASES if case.updated]
OTHERS = [case for case in CASES if not case.updated and not any("pool" in name for name in case.arrays)]


def samples(cases: list[Case], in_ci: str = ""):
    """Every case with every generation; CI, whose time is short, takes each case with `in_ci` in its name with one
    generation in turn, the rest are `-m matrix`."""
    return [
        pytest.param(
            case,
            name,
            id=f"{name}-{case.name}",
            marks=pytest.mark.slow if in_ci in case.name and i % len(GENERATIONS) == j else pytest.mark.matrix,
        )
        for i, case in enumerate(cases)
        for j, name in enumerate(GENERATIONS)
    ]


def device_of(generation: str):
    if aot.missing_packages(aot.CHIPS[generation]):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("libtpu is not installed")
    return aot.devices(aot.CHIPS[generation])[0]


def compile_case(case: Case, generation: str):
    device = device_of(generation)
    assert Target.of(device).has_tpu_kernels
    lowered = case.lower(device)
    assert "tpu_custom_call" in (lowered.as_text() or "")  # a kernel, not its jnp form
    return lowered.compile()


@pytest.mark.parametrize(("case", "generation"), samples(ATTENTION))
def test_attention_compiles_without_temporary_arrays(case, generation):
    compiled = compile_case(case, generation)
    check_is_not_copied(pools(case), compiled)
    assert compiled.memory_analysis().temp_size_in_bytes == 0


def pools(case: Case) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves([x for name, x in case.inputs(V6E).items() if name.endswith("pool")])


def check_is_not_copied(arrays: list[jax.ShapeDtypeStruct], compiled) -> None:
    text = compiled.as_text() or ""
    copies = [line for line in text.splitlines() if " copy(" in line or " copy-start(" in line]
    for held in arrays:
        dims = ",".join(map(str, held.shape))
        # The compiler does not count as temporary what it copies to fast memory.
        assert f"[{dims}]" in text and not any(f"[{dims}]" in line for line in copies)


def num_bytes(arrays: list[jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


@pytest.mark.parametrize(("case", "generation"), samples(INDEXER))
def test_scores_of_the_indexer_are_not_in_memory(case, generation):
    compiled = compile_case(case, generation)
    check_is_not_copied(pools(case), compiled)
    num_blocks, block = case.arrays["q"].shape[:2]
    scores = num_blocks * block * case.arrays["table"].shape[1] * case.arrays["pool"].entries_per_page * 4
    # What there is: the weights in another layout, six numbers a block, and queries turned into the basis of fp4 keys.
    turned = 2 * math.prod(case.arrays["q"].shape) * 2 if case.arrays["pool"].format.name == "fp4" else 0
    assert compiled.memory_analysis().temp_size_in_bytes < scores // 10 + turned


def in_a_loop_over_layers(case: Case) -> Case:
    """As the engine's step has it: what is updated is carried from layer to layer."""

    def call(target, **arrays):
        arrays.pop("layer", None)

        def layer(held, i):
            which = {"layer": i} if "layer" in case.arrays else {}
            out = case.call(target, **{case.updated: held}, **arrays, **which)
            return (out[1], out[0]) if isinstance(out, tuple) else (out, None)

        return jax.lax.scan(layer, arrays.pop(case.updated), jnp.arange(20))

    return dataclasses.replace(case, call=call)


@pytest.mark.parametrize(("case", "generation"), samples(WRITERS, in_ci=" flash "))
def test_what_is_written_is_not_copied(case, generation):
    compiled = compile_case(in_a_loop_over_layers(case), generation)
    given = jax.tree.leaves(case.inputs(V6E)[case.updated])
    check_is_not_copied(given, compiled)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(given)
    assert memory.temp_size_in_bytes < 3 << 20  # what is known of a prompt's tokens and angles of its windows


@pytest.mark.parametrize(("case", "generation"), samples(OTHERS))
def test_the_other_kernels_compile(case, generation):
    compile_case(case, generation)


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_compiler_is_really_asked(generation):
    """What it must refuse: a copy of one row out of an array whose rows share tiles, and more than its fast memory."""
    from jax.experimental.pallas import tpu as pltpu

    def one_row(pool, row, out, buffer, semaphore):
        dma = pltpu.make_async_copy(pool.at[pl.ds(row[0], 1)], buffer, semaphore)
        dma.start()
        dma.wait()
        out[...] = buffer[...]

    def call(target, pool, row):
        return pl.pallas_call(
            one_row,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)],
            scratch_shapes=[pltpu.VMEM((1, 512), jnp.bfloat16), pltpu.SemaphoreType.DMA],
            out_shape=jax.ShapeDtypeStruct((1, 512), jnp.bfloat16),
        )(pool, row)

    case = Case(name="row", call=call, arrays={"pool": array(jnp.bfloat16, 4096, 512), "row": array(jnp.int32, 1)})
    with pytest.raises(Exception, match="aligned"):
        compile_case(case, generation)

    def double(x, out):
        out[...] = x[...] * 2

    def whole(target, x):
        return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(Exception, match=r"(?i)vmem|memory"):
        compile_case(Case(name="big", call=whole, arrays={"x": array(jnp.float32, 1 << 14, 1 << 12)}), generation)
