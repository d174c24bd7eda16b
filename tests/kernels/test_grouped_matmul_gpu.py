"""The GPU kernel of the grouped matmul: every form of the weights, groups of all kinds, no races, the bytes moved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from benchmarks.kernel_cost import kernels
from pallas_kernels import all_cases
from pallas_kernels.dequantize import dequantize
from pallas_kernels.grouped_matmul import Tiles, gpu, grouped_matmul, reference
from pallas_kernels.target import CPU, Target

plgpu: Any = mosaic_gpu  # whose interpreter only JAX 0.12 has
H100 = Target("gpu", "sm_90a")
GPU = Target("gpu", "sm_90a", interpret=True)
NEEDS_KERNELS = pytest.mark.skipif(not GPU.has_gpu_kernels, reason="GPU kernels need JAX 0.12")
FORMS = pytest.mark.parametrize("form", ["dense", "fp8", "fp4"])
N = 256  # of one block


def stored(form: str, groups: int, k: int, n: int = N) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights of order 1, and their scale."""
    rng = np.random.default_rng(1)
    if form == "dense":
        return rng.normal(size=(groups, k, n)).astype(np.float32), None
    if form == "fp8":
        scale = rng.uniform(0.1, 1, (groups, -(-k // 128), n // 128)).astype(np.float32)
        return rng.normal(size=(groups, k, n)).astype(ml_dtypes.float8_e4m3fn), scale
    codes = rng.integers(-128, 128, (groups, k // 2, n)).astype(np.int8)
    return codes, rng.integers(120, 127, (groups, k // 32, n)).astype(np.uint8)


def tiles_of(group: list[int], num_tiles: int, rows: int) -> Tiles:
    place = jnp.arange(len(group) * rows)
    return Tiles(place, place, jnp.array(group, jnp.int32), jnp.int32(num_tiles))


def detect_races():
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


def check(form: str, tiles: Tiles, groups: int, k: int, n: int = N) -> None:
    """Equal to the reference, where the rows of unused tiles, and all of a group without a tile, are NaN."""
    rng = np.random.default_rng(0)
    codes, scale = stored(form, groups, k, n)
    used = int(tiles.num_tiles)
    x = rng.normal(size=(tiles.source.shape[0], k)).astype(np.float32)
    x[used * tiles.tile_rows :] = np.nan
    matrices = jnp.asarray(codes) if scale is None else dequantize(jnp.asarray(codes), jnp.asarray(scale), jnp.float32)
    want = reference.grouped_matmul(jnp.nan_to_num(x), matrices, tiles.group, tiles.num_tiles)
    for empty in set(range(groups)) - set(np.asarray(tiles.group[:used]).tolist()):
        poisoned = codes if scale is None or form == "fp8" else scale
        poisoned[empty] = 255 if form == "fp4" else np.nan
    got = grouped_matmul(jnp.asarray(x), jnp.asarray(codes), tiles, None if scale is None else jnp.asarray(scale), GPU)
    np.testing.assert_allclose(got, want, atol=3e-6 * k)  # sums in another order
    assert np.abs(np.asarray(got)[used * tiles.tile_rows :]).max(initial=0) == 0


@NEEDS_KERNELS
@FORMS
def test_groups_of_no_tile_one_and_several_without_races(form):
    """Five chunks along K, one more than there are buffers; the last tile is unused."""
    with detect_races():
        check(form, tiles_of([0, 2, 2, 2], 3, rows=16), groups=3, k=320 if form == "dense" else 640)


@NEEDS_KERNELS
def test_bfloat16_is_rounded_as_on_the_jnp_path():
    codes, scale = (jnp.asarray(a) for a in stored("fp8", 1, 128))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 128)), jnp.bfloat16)
    tiles = tiles_of([0], 1, rows=32)
    got, want = (grouped_matmul(x, codes, tiles, scale, target) for target in (GPU, CPU))
    np.testing.assert_allclose(got, want, atol=1e-4)  # sums in another order, of the same rounded weights


@NEEDS_KERNELS
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_every_code_is_widened_exactly_in_its_place(form):
    """Rows of the identity choose rows of the weights; the columns are those of two blocks."""
    k, n = 128, 2 * N
    if form == "fp8":
        codes = np.arange(k * n).reshape(1, k, n).astype(np.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        codes, scale = codes.view(ml_dtypes.float8_e4m3fn), np.array([[[0.5, 3, 0.125, 1]]], np.float32)
    else:
        codes = np.arange(k // 2 * n).reshape(1, k // 2, n).astype(np.uint8).view(np.int8)
        scale = (np.arange(k // 32 * n).reshape(1, k // 32, n) % 240 + 1).astype(np.uint8)
    rows = np.arange(0, k, 8) + np.arange(16) % 8
    x = np.zeros((16, k), np.float32)
    x[np.arange(16), rows] = 1
    codes, scale = jnp.asarray(codes), jnp.asarray(scale)
    got = grouped_matmul(jnp.asarray(x), codes, tiles_of([0], 1, rows=16), scale, GPU)
    np.testing.assert_array_equal(got, dequantize(codes, scale, jnp.float32)[0, rows])


@NEEDS_KERNELS
@pytest.mark.slow
def test_a_buffer_filled_before_it_is_read_is_found(monkeypatch):
    monkeypatch.setattr(gpu, "_wait_until_read", lambda *_: None)
    try:
        with detect_races(), pytest.raises(Exception, match="race"):
            check("dense", tiles_of([0], 1, rows=16), groups=1, k=384)
    finally:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        gpu_callbacks.reset_gpu_interpret_mode_state()


def test_the_path_is_chosen_from_shapes_and_target():
    def supports(target: Target, k=4096, n=4096, rows=16, dtype: Any = jnp.bfloat16, weights: Any = jnp.int8) -> bool:
        stored_k = k // 2 if weights == jnp.int8 else k
        x, matrices = jax.ShapeDtypeStruct((64, k), dtype), jax.ShapeDtypeStruct((4, stored_k, n), weights)
        return gpu.supports(x, matrices, rows, target)  # type: ignore[arg-type]

    assert supports(H100) is H100.has_gpu_kernels is (jax.__version_info__ >= (0, 12))
    if H100.has_gpu_kernels:
        assert supports(H100, weights=jnp.float8_e4m3fn) and supports(H100, weights=jnp.bfloat16, k=64)
    assert not supports(Target("gpu")) and not supports(CPU) and not supports(Target("tpu", "v6e"))
    assert not supports(H100, k=4096 + 64) and not supports(H100, n=4096 + 128)
    assert not supports(H100, rows=8) and not supports(H100, rows=256)
    assert not supports(H100, dtype=jnp.float32) and not supports(H100, weights=jnp.float32)


@NEEDS_KERNELS
def test_the_bytes_by_hand():
    """Decode: 64 tiles of 16 rows, 16 experts of 4096 x 4096, each read once."""

    def bytes_moved(name: str) -> int:
        case = next(case for case in all_cases.cases() if case.name == name)
        program = jax.make_jaxpr(lambda arrays: case.call(H100, **arrays))(case.inputs(H100))
        return sum(kernel.bytes_moved for kernel in kernels(program))

    x, out, codes = 64 * 16 * 4096 * 2, 64 * 16 * 4096 * 4, 16 * 4096 * 4096
    assert bytes_moved("grouped_matmul flash w13 decode bf16") == x + out + 2 * codes
    assert bytes_moved("grouped_matmul flash w13 decode fp8") == x + out + codes + codes // 128**2 * 4
    assert bytes_moved("grouped_matmul flash w13 decode fp4") == x + out + codes // 2 + codes // 32
