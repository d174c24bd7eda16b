"""Entries' bytes and back: exact codes, rounding errors, extreme rows, pages of every format, tiled or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsjax import quant
from pallas_kernels.cache_write import NOWHERE, cache_write
from pallas_kernels.entry_format import KEY_FORMATS, LATENT_FORMATS, EntryFormat
from pallas_kernels.pool import PoolShape, decode, encode, floats, hadamard, in_key_basis

LATENTS = [EntryFormat(name, 512, 64) for name in LATENT_FORMATS]
KEYS = [EntryFormat(name, 128) for name in KEY_FORMATS]
AS_BITS = EntryFormat("bfloat16", 512, 64, as_bits=True)
BOTH = pytest.mark.parametrize(
    "form", [*LATENTS, *KEYS, AS_BITS], ids=lambda f: f"{f.name}-{f.width}" + "-bits" * f.as_bits
)
# Of the largest magnitude: half a step of a float's mantissa, of 127 steps, of E2M1's widest one (4 to 6, or 2 to 3).
LIMIT = {"float32": 0, "bfloat16": 2**-8, "int8": 0.501 / 127, "fp8": 2**-4, "fp4": 1 / 4}
ENTRIES = np.random.default_rng(0).normal(size=(70, 512)).astype(np.float32)


def _round_trip(entries: np.ndarray, form: EntryFormat) -> np.ndarray:
    values, side = encode(jnp.asarray(entries), form)
    out = floats(values, form) if side is None else decode(values, side, form, jnp.float32)
    return np.asarray(out, np.float32)


def _in_basis(entries: np.ndarray, form: EntryFormat) -> np.ndarray:
    return entries @ hadamard(form.width) if form.name == "fp4" else entries


def test_bytes_of_an_entry():
    def size(form: EntryFormat, **layout) -> float:
        shapes = form.page_shapes(64, **layout)
        return sum(np.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes) / 64

    assert [size(form) for form in LATENTS] == [2048, 1024, 592, 592]
    assert [size(form) for form in KEYS] == [512, 256, 132, 132, 68]
    assert [size(form, tiled=True, gathered=True) for form in LATENTS] == [2048, 1024, 600, 600]
    assert [size(form, tiled=True) for form in KEYS] == [512, 256, 136, 136, 72]
    assert EntryFormat("fp8", 512, 64).page_shapes(64, tiled=True, gathered=True) == (
        ((64, 128), "uint32"),
        ((11, 1, 128), "uint32"),
    )


def test_bits_of_bfloat16_are_its_own():
    assert AS_BITS.page_shapes(64) == (((64, 512), "uint16"),)
    plain, _ = encode(jnp.asarray(ENTRIES), EntryFormat("bfloat16", 512, 64))
    bits, _ = encode(jnp.asarray(ENTRIES), AS_BITS)
    assert (np.asarray(bits) == np.asarray(plain).view(np.uint16)).all()
    assert floats(plain, EntryFormat("bfloat16", 512, 64)) is plain
    with pytest.raises(ValueError, match="not for format float32"):
        EntryFormat("float32", 512, 64, as_bits=True)


def test_fp8_is_the_release_s_rounding():
    """Non-rotary channels in groups of 64 with the least power of two that keeps them at 448 or less (spec 3.1)."""
    form = EntryFormat("fp8", 512, 64)
    want = ENTRIES.copy()
    for start in range(0, 448, 64):
        group = ENTRIES[:, start : start + 64]
        scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(group).max(axis=1, keepdims=True), 1e-4) / 448))
        want[:, start : start + 64] = (group / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    want[:, 448:] = ENTRIES[:, 448:].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (_round_trip(ENTRIES, form) == want).all()
    values, side = encode(jnp.asarray(ENTRIES), form)
    group = np.abs(ENTRIES[0, :64]).max()
    assert int(side[0, 16]) & 255 == 127 + int(np.ceil(np.log2(group / 448)))
    assert side.shape == (70, 20) and values.shape == (70, 512)


def test_fp4_is_the_release_s_rounding_in_the_hadamard_basis():
    form, keys = EntryFormat("fp4", 128), ENTRIES[:, :128]
    matrix = hadamard(128)
    np.testing.assert_allclose(matrix @ matrix, np.eye(128), atol=1e-6)
    assert (matrix[1, :4] > 0).tolist() == [True, False, True, False]
    codes, scale = quant.quantize_fp4(np.asarray(jnp.matmul(keys, matrix, precision="highest")))
    want = quant.dequantize_fp4(codes, scale)
    assert (_round_trip(keys, form) == want).all()


def test_products_with_rotated_queries_are_those_of_the_keys():
    form, queries = EntryFormat("fp4", 128), jnp.asarray(ENTRIES[:5, 128:256])
    got = in_key_basis(queries, form) @ (ENTRIES[:, :128] @ hadamard(128)).T
    np.testing.assert_allclose(got, ENTRIES[:5, 128:256] @ ENTRIES[:, :128].T, atol=1e-4)
    assert in_key_basis(queries, EntryFormat("fp8", 128)) is queries


@BOTH
def test_error_of_a_round_trip(form):
    entries = ENTRIES[:, : form.width]
    error = np.abs(_round_trip(entries, form) - _in_basis(entries, form)) / np.abs(entries).max()
    assert error.max() <= LIMIT[form.name]


@BOTH
@pytest.mark.parametrize("size", [1e4, 1e-4, 0.0])
def test_extreme_rows_neither_overflow_nor_vanish_nor_make_nan(form, size):
    """Also where one channel is far larger than the others."""
    entries = np.full((3, form.width), size, np.float32)
    entries[1, 5] *= 1000
    entries[2] = ENTRIES[0, : form.width] * size
    got = _round_trip(entries, form)
    want = _in_basis(entries, form)
    assert np.isfinite(got).all()
    assert (np.abs(got - want).max(axis=1) <= np.abs(want).max(axis=1) * LIMIT[form.name]).all()
    assert (size == 0) == (np.abs(got[0]).max() == 0)


@BOTH
@pytest.mark.parametrize("tiled", [False, True])
def test_pages_give_back_what_was_written_and_nothing_else_changes(form, tiled):
    """Slots in any order, in layer 1 of 2; one of them is NOWHERE; the rest of the pool stays as it was."""
    num_pages, entries = 3, 16
    pool = PoolShape(form, 2 * num_pages, entries, gathered=form.rope > 0).abstract(tiled)
    pool = jax.tree.map(lambda x: jnp.full(x.shape, _poison(x.dtype), x.dtype), pool)
    assert (pool.num_pages, pool.entries_per_page) == (6, 16)
    slots = np.random.default_rng(1).permutation(num_pages * entries)[:20]
    new = jnp.asarray(ENTRIES[:21, : form.width])
    index = jnp.asarray([*slots, NOWHERE], jnp.int32)
    written = jax.jit(cache_write, static_argnames=("layer", "num_pages"))(
        pool, index, new, layer=1, num_pages=num_pages
    )
    pages = np.asarray(written.take_pages(jnp.arange(6), jnp.float32), np.float32).reshape(-1, form.width)
    want = _round_trip(ENTRIES[:20, : form.width], form)
    assert (pages[num_pages * entries + slots] == want).all()
    others = np.delete(np.arange(6 * entries), num_pages * entries + slots)
    assert not np.isfinite(pages[others]).any()
    if not tiled:
        got = written.take_entries(jnp.asarray(num_pages * entries + slots), jnp.float32)
        assert (np.asarray(got, np.float32) == want).all()


def _poison(dtype) -> float:
    return np.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


@pytest.mark.parametrize(
    ("name", "width", "rope", "message"),
    [
        ("fp4", 512, 64, "'fp4' must be one of"),
        ("fp9", 128, 0, "'fp9' must be one of"),
        ("fp4", 48, 0, "32, 64 or 128 channels, not 48"),
        ("int8", 16, 6, "rope=6"),
    ],
)
def test_a_format_that_cannot_hold_the_entries_is_refused(name, width, rope, message):
    with pytest.raises(ValueError, match=message):
        EntryFormat(name, width, rope)


@pytest.mark.parametrize("form", [EntryFormat(name, 64, 16) for name in ("int8", "fp8")], ids=lambda f: f.name)
def test_narrow_entries(form):
    """48 channels of one group, 16 rotary ones: 4 words of low bytes, one of scales, padded to 8."""
    assert (form.num_groups, form.side_words) == (1, 8)
    entries = ENTRIES[:, :64]
    got = _round_trip(entries, form)
    assert np.abs(got[:, :48] - entries[:, :48]).max() < np.abs(entries).max() * 2**-4
    assert (got[:, 48:] == entries[:, 48:].astype(ml_dtypes.bfloat16).astype(np.float32)).all()
