"""The estimated bytes of each cache reader are at most 1.1 times those it must touch, counted here from the shapes."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from benchmarks.kernel_cost import kernels
from pallas_kernels import all_cases, attention_cases
from pallas_kernels.case import Case
from pallas_kernels.target import Target

QUICK = "flash decode"  # everyday; the others are slow
TARGETS = [t for t in (Target("tpu", "v6e"), Target("gpu", "sm_90a")) if t.has_tpu_kernels or t.has_gpu_kernels]
PAIRS = [
    pytest.param(
        case, target, id=f"{target.generation}-{case.name}", marks=() if QUICK in case.name else pytest.mark.slow
    )
    for case in all_cases.cases()
    if case.name.startswith(("swa", "hca", "csa", "indexer"))
    for target in TARGETS
    if target.platform == "tpu" or "float32" not in case.name  # which a GPU's kernels do not take
]

# Bytes of an entry in each format: a latent of 448 channels and 64 rotary ones, an index key of 128.
LATENT = {"float32": 2048, "bfloat16": 1024, "int8": 448 + 4 + 128, "fp8": 448 + 8 + 128}
KEY = {"float32": 512, "bfloat16": 256, "int8": 128 + 4, "fp8": 128 + 4, "fp4": 64 + 4}
WINDOW, CONTEXT = 128, 32768


def must_touch(case: Case, target: Target) -> int:
    """Queries, entries and results, each once for a block of queries, all of whose entries are visible."""
    arrays = case.arrays
    blocks, block, heads, width = arrays["q"].shape
    total = arrays["q"].size * arrays["q"].dtype.itemsize
    if case.name.startswith("indexer"):
        pool = arrays["pool"]
        entries = arrays["table"].shape[1] * pool.entries_per_page
        chosen = {8192: 512, 32768: 1024}[entries]
        results = chosen * 4 if block == 1 else block * entries // 8  # indices, or a bit a query
        if target.platform == "gpu":
            results += 2 * block * entries * 4  # scores, from the kernel that reads keys to the one that selects
        return total + arrays["weights"].size * 4 + blocks * (entries * KEY[pool.format.name] + results)
    form = arrays["window_pool"].format.name
    entries = WINDOW - 1 + block
    if case.name.startswith("hca"):
        entries += CONTEXT // 128
    total += blocks * entries * LATENT[form] + blocks * block * heads * width * 4
    if case.name.startswith("csa") and block == 1:
        chosen, size = arrays["chosen"].shape[1], LATENT[form]
        if target.platform == "tpu" and form in ("int8", "fp8"):
            size = 512 + 512  # it copies rows of 128 words alone: one of values, one that has the side words
        total += blocks * chosen * (size + 4)
    elif case.name.startswith("csa"):
        total += blocks * (CONTEXT // 4 * LATENT[form] + block * CONTEXT // 4 // 8)
    return total


@pytest.mark.parametrize(("case", "target"), PAIRS)
def test_estimated_bytes_are_near_those_it_must_touch(case, target):
    found: list[Any] = kernels(jax.make_jaxpr(lambda arrays: case.call(target, **arrays))(case.inputs(target)))
    assert found, "no kernel"
    assert 0.99 <= sum(kernel.bytes_moved for kernel in found) / must_touch(case, target) <= 1.1


def test_the_shapes_are_those_counted_above():
    assert (attention_cases.WINDOW, attention_cases.WIDTH, attention_cases.ROPE) == (WINDOW, 512, 64)
    assert {shape.context for shape in attention_cases.SHAPES.values()} == {CONTEXT}
