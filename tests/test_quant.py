"""The FP8 and FP4 formats: decoding against golden tensors and by hand, and encoding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dsjax import quant
from dsjax.checkpoint_files import open_shards
from tests.golden_sets import golden

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "name", ["layers.1.ffn.experts.2.w1.weight", "layers.1.attn.wq_b.weight", "layers.0.attn.wo_a.weight"]
)
def test_golden_tensors_bit_exactly(name: str):
    folder = golden("q1_fp8fp4")
    tensors, problems = open_shards(folder)
    assert problems == []
    weight, scale = tensors[name].read(), tensors[name.replace(".weight", ".scale")].read()
    decode = quant.dequantize_fp4 if weight.dtype == np.int8 else quant.dequantize_fp8
    with np.load(folder / "dequant.npz") as expected:
        assert same_bits(decode(weight, scale), expected[name])


def test_fp8_scale_of_each_tile_with_ragged_edges():
    weight = np.full((130, 257), 1.5, E4M3)
    scale = np.array([[1, 2, 4], [0.5, 0.25, 0.125]], np.float32)
    out = quant.dequantize_fp8(weight, scale)
    assert out.shape == (130, 257) and out.dtype == np.float32
    assert [out[0, 0], out[127, 127], out[127, 128], out[0, 256]] == [1.5, 1.5, 3.0, 6.0]
    assert [out[128, 0], out[129, 255], out[128, 256]] == [0.75, 0.375, 0.1875]
    assert same_bits(quant.dequantize_fp8(weight, scale.astype(E8M0)), out)


def test_fp8_float32_scale_need_not_be_a_power_of_two():
    out = quant.dequantize_fp8(np.array([[448, -(2**-9)]], E4M3), np.array([[0.3]], np.float32))
    assert out.tolist() == [[float(np.float32(448) * np.float32(0.3)), float(np.float32(-(2**-9)) * np.float32(0.3))]]


def test_e8m0_byte_b_is_two_to_the_b_minus_127():
    bytes_ = np.array([0, 1, 127, 130, 254], np.uint8).reshape(5, 1)
    # one row of 32 FP4 ones per scale
    out = quant.dequantize_fp4(np.full((5, 16), 0x22, np.int8), bytes_.view(E8M0))
    assert out[:, 0].tolist() == [2.0**-127, 2.0**-126, 1.0, 8.0, 2.0**127]


def test_fp4_low_nibble_is_the_even_column():
    codes = np.arange(16, dtype=np.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).reshape(1, 8).view(np.int8)
    out = quant.dequantize_fp4(packed, np.array([[2]], np.float32).astype(E8M0))
    assert out[0].tolist() == [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    assert np.signbit(out[0, 8])


def test_fp4_scale_of_each_32_columns_with_a_ragged_edge():
    out = quant.dequantize_fp4(np.full((2, 24), 0x22, np.int8), np.array([[1, 2], [4, 8]], np.float32).astype(E8M0))
    assert out.shape == (2, 48)
    assert [out[0, 31], out[0, 32], out[0, 47], out[1, 31], out[1, 47]] == [1, 2, 2, 4, 8]


def test_scales_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"scale \(1, 1\) does not fit an FP8 weight \(129, 4\)"):
        quant.dequantize_fp8(np.zeros((129, 4), E4M3), np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match=r"scale \(2, 1\) does not fit a packed FP4 weight \(2, 17\)"):
        quant.dequantize_fp4(np.zeros((2, 17), np.int8), np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match="even number of columns"):
        quant.quantize_fp4(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("shape", [(128, 128), (48, 32), (130, 258)])
def test_quantising_decoded_values_is_exact(shape: tuple[int, int]):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    scale = rng.integers(100, 140, quant.fp8_scale_shape(shape)).astype(np.uint8).view(E8M0)
    values = quant.dequantize_fp8(codes.view(E4M3), scale)
    assert same_bits(quant.dequantize_fp8(*quant.quantize_fp8(values)), values)

    packed = rng.integers(-128, 128, (shape[0], shape[1] // 2)).astype(np.int8)
    packed[0] = 0x11  # a row whose largest code is small: the scale shrinks
    scale = rng.integers(100, 140, quant.fp4_scale_shape(shape)).astype(np.uint8).view(E8M0)
    values = quant.dequantize_fp4(packed, scale)
    assert same_bits(quant.dequantize_fp4(*quant.quantize_fp4(values)), values)


def test_quantising_picks_the_least_scale_that_fits():
    weight, scale = quant.quantize_fp8(np.array([[448.0, 1.0]], np.float32))
    assert (weight.astype(np.float32).tolist(), scale.astype(np.float32).tolist()) == ([[448, 1]], [[1]])
    weight, scale = quant.quantize_fp8(np.array([[449.0, 1.0]], np.float32))
    assert (weight.astype(np.float32).tolist(), scale.astype(np.float32).tolist()) == ([[224, 0.5]], [[2]])
    packed, scale = quant.quantize_fp4(np.array([[6.0, -1.2]], np.float32))
    assert (packed.view(np.uint8).tolist(), scale.astype(np.float32).tolist()) == ([[0xA7]], [[1]])
    packed, scale = quant.quantize_fp4(np.zeros((1, 2), np.float32))
    assert (packed.tolist(), scale.astype(np.float32).tolist()) == ([[0]], [[1]])
