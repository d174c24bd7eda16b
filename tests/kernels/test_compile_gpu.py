"""Every GPU kernel is accepted by the compilers of H100 and B200 at the shapes of Flash and Pro, without spills.

Nothing runs. Needs JAX 0.12 and its CUDA packages; without those these are left out, and fail where CI=true.
"""

from __future__ import annotations

import math
import os

import pytest

from benchmarks.kernel_compile import Compiled, compile_apart
from dsjax import aot
from pallas_kernels import all_cases
from pallas_kernels.entry_format import PLAIN
from pallas_kernels.target import Target
from tests.kernels import gpu_cases

GPUS = [("h100", "sm_90a"), ("b200", "sm_100a")]
pytestmark = pytest.mark.skipif(not Target("gpu", "sm_90a").has_gpu_kernels, reason="GPU kernels need JAX 0.12")


def _compile(gpu: str, cases: str = "") -> dict[str, Compiled]:
    missing = aot.missing_packages(aot.CHIPS[gpu])
    if missing and os.environ.get("CI") != "true":
        pytest.skip(f"needs the packages {', '.join(missing)}")
    return {case.name: case for case in compile_apart(gpu, cases=cases)}


def _check(cases: list[Compiled], architecture: str) -> None:
    assert {case.error for case in cases} == {""}
    for case in cases:
        assert case.architectures == [architecture] and 0 < case.registers <= 255, case
        assert case.spill_bytes == 0 and case.temp_bytes <= _kept_bytes(case.name), case


def _kept_bytes(name: str) -> int:
    """What a program may keep beside its inputs and results; pools, weights and streams are larger."""
    arrays = {case.name: case for case in all_cases.cases()}[name].arrays
    if name.startswith("grouped_matmul"):  # the result with even and odd columns apart, and FP4's rows so
        (rows, k), n = arrays["x"].shape, arrays["weights"].shape[2]
        return rows * (2 * k + 4 * n)
    kept = 2 * 20 * 1000 * 16 * 512 // 50  # of the smallest pool: queries padded to 16 rows, masks packed to bits
    if name.startswith("indexer_topk"):  # scores; queries in the order, for fp4 first in the basis, of quantised keys
        turned = {"bfloat16": 0, "fp4": 2}.get(arrays["pool"].format.name, 1)
        kept += (32 << 20) + 2 * turned * math.prod(arrays["q"].shape)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "architecture"), GPUS)
def test_compiles_without_spills(gpu, architecture):
    compiled = _compile(gpu, "tests.kernels.gpu_cases")
    wgmma = compiled.pop(gpu_cases.WGMMA)
    assert set(compiled) == set(gpu_cases.REPRESENTATIVE)
    _check(list(compiled.values()), architecture)
    # Blackwell has no wgmma: what accepts it for a B200 compiled for something else, or not at all.
    if architecture == "sm_90a":
        assert wgmma.error == "" and wgmma.architectures == [architecture]
    else:
        assert "wgmma" in wgmma.error and "sm_100a" in wgmma.error


@pytest.mark.matrix
@pytest.mark.parametrize(("gpu", "architecture"), GPUS)
def test_every_case_compiles_without_spills(gpu, architecture):
    compiled = _compile(gpu)
    assert not [case for case in compiled.values() if case.error]
    with_kernels = [case for case in compiled.values() if case.kernels]
    operations = {case.name.split()[0] for case in with_kernels}
    assert operations >= {name.split()[0] for name in gpu_cases.REPRESENTATIVE}
    floats = [name for name in compiled if name.startswith("cache_write") and name.endswith(PLAIN)]  # XLA's scatter
    assert all(case.kernels for name, case in compiled.items() if name.split()[0] in operations and name not in floats)
    _check(with_kernels, architecture)
