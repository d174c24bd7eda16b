"""What benchmarks.kernels counts, prints and refuses; that every case compiles is tested in tests/kernels."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from benchmarks import kernel_compile, kernels
from benchmarks.kernel_compile import Compiled, compile_apart
from benchmarks.kernel_cost import kernels as kernels_of
from benchmarks.kernel_timing import time_case
from benchmarks.roofline import ROOFS, Roof
from dsjax import aot
from pallas_kernels import all_cases
from pallas_kernels.case import Case, array
from pallas_kernels.target import Target
from tests.benchmarks import kernel_sets

SETS = "tests.benchmarks.kernel_sets"
V6E = Target("tpu", "v6e")
MIB = 1 << 20
CASES = {case.name: case for case in all_cases.cases()}


def bytes_moved(name: str) -> int:
    case = CASES[name]
    found = kernels_of(jax.make_jaxpr(lambda arrays: case.call(V6E, **arrays))(case.inputs(V6E)))
    return sum(kernel.bytes_moved for kernel in found)


def test_the_bytes_of_each_kernel_by_hand():
    # 64 rows, 64 heads of 512: queries in bfloat16, results in float32, sinks; a row's three scalars and the ids of the
    # three pages that 128 keys can be in
    q, out, key = 64 * 64 * 512 * 2, 64 * 64 * 512 * 4, 512 * 2
    swa = q + out + 64 * 4 + 64 * (3 * 4 + 3 * 4)
    assert bytes_moved("swa_attention flash decode bfloat16") == swa + 64 * 128 * key == 20973312
    # 512 bytes of codes, and the side words of a page of 64 entries in 11 rows of 128 words
    assert bytes_moved("swa_attention flash decode fp8") == swa + 64 * 128 * (512 + 11 * 512 // 64)
    # and 32,768 / 128 entries in pages of 16
    assert bytes_moved("hca_attention flash decode bfloat16") == swa + 64 * ((128 + 256) * key + 16 * 4)
    # or 512 chosen ones, somewhere in 128 pages
    assert bytes_moved("csa_attention flash decode bfloat16") == swa + 64 * ((128 + 512) * key + 512 * 4 + 128 * 4)
    # 64 queries of 64 heads of 128, their weights, 8,192 keys in 128 pages, 512 indices
    indexer = 64 * (64 * 128 * 2 + 64 * 4 + 8192 * 128 * 2 + 128 * 4 + 512 * 4)
    assert bytes_moved("indexer_topk flash decode bfloat16") == indexer
    # 64 tokens of 4 streams of 4096 read twice and written once, the block's input and its result, 24 weights
    token, fn = 4096 * 2, 24 * 4 * 4096 * 4
    assert bytes_moved("mhc_mix flash decode") == 64 * token * (3 * 4 + 2) + fn == 8912896
    # 64 tiles of 16 rows, each of 16 experts' weights once, results in float32
    x, out = 1024 * 4096 * 2, 1024 * 4096 * 4
    assert bytes_moved("grouped_matmul flash w13 decode bf16") == x + out + 16 * 4096 * 4096 * 2
    # two codes a byte and a scale for 32 of them
    assert bytes_moved("grouped_matmul flash w13 decode fp4") == x + out + 16 * 4096 * 4096 * 17 // 32


def test_a_kernel_in_a_function_and_a_loop_is_found_and_one_without_an_estimate_refused():
    def calls(x: jax.Array) -> jax.Array:
        def body(carry, _):
            return jax.jit(lambda x: kernel_sets.double(V6E, x))(carry), None

        return jax.lax.scan(body, x, length=3)[0]

    x = jnp.zeros((8, 128), jnp.float32)
    found = kernels_of(jax.make_jaxpr(calls)(x))
    assert [(k.name, k.bytes_moved, k.flops, k.shared_bytes) for k in found] == [("double", 8192, 1024, 0)] * 3

    def silent(x: jax.Array) -> jax.Array:
        return pl.pallas_call(lambda x, out: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="silent")(x)

    with pytest.raises(ValueError, match="kernel silent has no cost estimate"):
        kernels_of(jax.make_jaxpr(silent)(x))


def test_the_roofline_is_the_longer_of_bytes_and_flops():
    roof = Roof(bytes_per_s=1e9, flops_per_s=1e12)
    assert roof.seconds(2_000_000, 1_000_000_000) == 0.002 and roof.bound(2_000_000, 1_000_000_000) == "bytes"
    assert roof.seconds(1_000_000, 3_000_000_000) == 0.003 and roof.bound(1_000_000, 3_000_000_000) == "flops"
    assert set(ROOFS) == set(aot.CHIPS)
    row = dataclasses.asdict(Compiled(target="v6e", name="x", kernels=["x"], bytes_moved=1_638_000_000, flops=0))
    assert kernels.with_roof(row)["roofline_us"] == 1000.0
    assert kernels.with_roof(row | {"kernels": []})["roofline_us"] is None


def test_a_line_a_case_and_target():
    tpu = Compiled(
        target="v6e",
        name="a",
        kernels=["k"],
        bytes_moved=3 * MIB,
        flops=2_000_000_000,
        fast_bytes=1024,
        temp_bytes=2048,
        compile_s=0.51,
    )
    gpu = dataclasses.replace(tpu, target="h100", architectures=["sm_90a"], registers=168, spill_bytes=4)
    refused = dataclasses.replace(tpu, error="no")
    path = Compiled(target="b200", name="a", kernels=[])
    lines = kernels.compiled_table(
        [kernels.with_roof(dataclasses.asdict(row)) for row in (tpu, gpu, refused, path)]
    ).splitlines()
    assert lines[2] == "| a | v6e | compiles | 3.0 | 2.00 | 2.2 | flops | 1 |  |  | 2 | 0.5 |"
    assert lines[3] == "| a | h100 | compiles | 3.0 | 2.00 | 2.0 | flops | 1 | 168 | 4 | 2 | 0.5 |"
    assert lines[4] == "| a | v6e | REFUSED | | | | | | | | | |"
    assert lines[5] == "| a | b200 | jnp path | | | | | | | | | |"
    assert {line.count("|") for line in lines} == {13}


def test_a_refused_case_is_exit_1(monkeypatch, capsys):
    def compiled(target: str, only: str) -> list[Compiled]:
        return [Compiled(target=target, name="a", kernels=["k"], error="too large" if target == "v5e" else "")]

    monkeypatch.setattr(aot, "missing_packages", lambda target: [])
    monkeypatch.setattr(kernel_compile, "compile_apart", compiled)
    assert kernels.main(["x", "--compile", "--target=v5p,v6e"]) == 0
    assert kernels.main(["x", "--compile", "--target=v5e,v6e"]) == 1
    assert "benchmarks.kernels: a on v5e failed: too large" in capsys.readouterr().err


@pytest.mark.slow
def test_the_compiler_refuses_one_case_and_accepts_the_other(monkeypatch, tmp_path, capsys):
    if aot.missing_packages(aot.CHIPS["v6e"]):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("libtpu is not installed")
    monkeypatch.setattr(all_cases, "cases", kernel_sets.cases)
    monkeypatch.setattr(kernel_compile, "CASES", SETS)
    file = tmp_path / "results.jsonl"
    assert kernels.main(["x", "--compile", "--target=v6e", f"--output={file}"]) == 1
    written = capsys.readouterr()
    assert "benchmarks.kernels: double big on v6e failed: " in written.err
    assert "| double small | v6e | compiles | 0.2 | 0.00 |" in written.out
    assert "| double big | v6e | REFUSED |" in written.out
    machine, small, big = map(json.loads, file.read_text().splitlines())
    assert machine["versions"]["jax"] == jax.__version__
    assert (small["bytes_moved"], small["kernels"], small["error"]) == (262144, ["double"], "")
    assert "vmem" in big["error"].lower() and big["roofline_us"] is None


def test_what_runs_here_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(all_cases, "small_cases", lambda: kernel_sets.cases()[:1])
    assert kernels.main(["x", "--repeat=2"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| double small | cpu | jnp | 0.2 | 0.00 | ")
    timed = time_case(kernel_sets.cases()[0], jax.devices()[0], 3)
    assert timed.bytes_moved == 262144 and timed.flops == 32768 and not timed.kernels  # as on a TPU
    assert 0 < timed.range_ms[0] <= timed.median_ms <= timed.range_ms[1]


def test_a_case_that_fails_is_exit_1_when_timed(monkeypatch, capsys):
    def broken(target: Target, x: jax.Array) -> jax.Array:
        raise ValueError("not today")

    case = Case(name="broken", call=broken, arrays={"x": array(jnp.float32, 8)})
    monkeypatch.setattr(all_cases, "small_cases", lambda: [case])
    assert kernels.main(["x"]) == 1
    assert "broken on cpu failed: ValueError: not today" in capsys.readouterr().err


def test_random_inputs_keep_the_values_that_are_given():
    arrays = {
        "floats": array(jnp.bfloat16, 4, 3),
        "codes": array(jnp.uint8, 64),
        "mask": array(bool, 64),
        "table": np.array([[5, 3]], np.int32),
    }
    made = Case(name="x", call=lambda target: None, arrays=arrays).random()
    assert made["floats"].dtype == jnp.bfloat16 and np.unique(made["floats"].astype(np.float32)).size > 6
    assert made["codes"].dtype == np.uint8 and made["codes"].max() < 100 and made["mask"].mean() < 1
    assert made["table"] is arrays["table"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--compile", "--target=v4"], "target='v4' must be one of v5e, v5p, v6e, tpu7x, h100, b200"),
        (["--target=v6e"], "target is for --compile"),
        (["--only=nothing"], "only='nothing' is in no case's name"),
    ],
)
def test_wrong_flags_are_one_sentence(argv, message, capsys):
    assert kernels.main(["x", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_compiler_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(aot, "_installed", lambda package: package != "libtpu")
    assert kernels.main(["x", "--compile", "--target=v6e"]) == 2
    assert "target=v6e needs the packages libtpu: pip install libtpu" in capsys.readouterr().err


@pytest.mark.slow
def test_a_child_that_dies_is_an_error_with_what_it_said():
    with pytest.raises(RuntimeError, match="No module named"):
        list(compile_apart("v6e", cases="tests.nowhere"))
