"""A pool of pages on the device, and entries' way into their bytes and back, in jnp.

This is what formats mean (`entry_format`); kernels do the same in fast memory. Quantising never makes a NaN of finite
numbers: an entry of zeros has a scale of its own, and scales are powers of two or far from the ends of float32.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import scales
from pallas_kernels.dequantize import e2m1_sixty_fourth
from pallas_kernels.entry_format import FP4_GROUP, FP8_GROUP, LANES, PLAIN, EntryFormat


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """The pages of all layers of a kind."""

    values: jax.Array  # [layers * num_pages, *page], see entry_format
    side: jax.Array | None  # the same, or None where values are floats
    format: EntryFormat = dataclasses.field(metadata={"static": True})
    tiled: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def plain(cls, values: jax.Array) -> Pool:
        """Of float entries [pages, entries, width]."""
        return cls(values, None, EntryFormat(values.dtype.name, values.shape[2]))

    @property
    def num_pages(self) -> int:
        """Of all layers."""
        return self.values.shape[0]

    @property
    def entries_per_page(self) -> int:
        return self.values.shape[1] * (2 if self.format.name == "fp4" and self.tiled else 1)

    def take_pages(self, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Pages index [...] -> their entries [..., entries, width]: quantised ones in `dtype`, floats as they are."""
        pages = jax.tree.map(lambda x: x.at[index].get(mode="clip"), self)
        count, lead = self.entries_per_page, index.shape
        values = pages.values.reshape(*lead, count, -1) if self.format.name != "fp4" else pages.values
        if pages.side is None:
            return floats(values, self.format)
        side = pages.side
        if not self.format.rope:
            side = side.reshape(*lead, -1, 1)[..., :count, :]
        if self.tiled:
            values, side = _untile(values, side, self.format, count)
        return decode(values, side, self.format, dtype)

    def take_entries(self, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Entries index [...] of all pages in a row -> [..., width], as `take_pages`. Of pools that are not tiled."""
        assert not self.tiled or not self.format.quantised
        flat = self.values.reshape(self._num_entries, -1).at[index].get(mode="clip")
        if self.side is None:
            return floats(flat, self.format)
        words = self.side.reshape(self._num_entries, -1)
        return decode(flat, words.at[index].get(mode="clip"), self.format, dtype)

    def write(self, index: jax.Array, entries: jax.Array) -> Pool:
        """With entries [T, width] stored at index [T] of all pages in a row; an index past the end is dropped."""
        values, side = encode(entries, self.format)
        if side is None or not self.tiled:
            # Side words of index keys are [1, entries] a page: in a row, too, they follow each other.
            return dataclasses.replace(
                self,
                values=_scatter(self.values, self._num_entries, index, values),
                side=side if side is None else _scatter(_present(self), self._num_entries, index, side),
            )
        page, entry = index // self.entries_per_page, index % self.entries_per_page
        if self.format.name == "fp4":
            rows = self.entries_per_page // 2
            values = _scatter_lanes(self.values, page * rows + entry % rows, 64 * (entry // rows), values)
        else:
            values = _scatter(self.values, self._num_entries, index, _to_words(values) if self.format.rope else values)
        if not self.format.rope:
            rows = _present(self).shape[2] // LANES
            side = _scatter_lanes(_present(self), page * rows + entry // LANES, entry % LANES, side)
        else:
            rows, words = self.format.side_rows(self.entries_per_page), self.format.side_words
            side = _scatter_lanes(_present(self), page * rows + entry % rows, words * (entry // rows), side)
        return dataclasses.replace(self, values=values, side=side)

    @property
    def _num_entries(self) -> int:
        return self.num_pages * self.entries_per_page


@dataclass(frozen=True)
class PoolShape:
    """What a pool is made of."""

    format: EntryFormat
    num_pages: int  # of all layers
    entries_per_page: int
    gathered: bool = False  # read entry by entry

    def abstract(self, tiled: bool) -> Pool:
        """With shapes in place of arrays."""
        shapes = self.format.page_shapes(self.entries_per_page, tiled, self.gathered)
        arrays: list[Any] = [jax.ShapeDtypeStruct((self.num_pages, *page), jnp.dtype(dtype)) for page, dtype in shapes]
        return Pool(arrays[0], arrays[1] if len(arrays) > 1 else None, self.format, tiled)


def _present(pool: Pool) -> jax.Array:
    assert pool.side is not None
    return pool.side


def _scatter(array: jax.Array, rows: int, index: jax.Array, new: jax.Array) -> jax.Array:
    """`array`, seen as `rows` rows, with rows `index` set."""
    width = array.size // rows
    # Rows of whole tiles keep their two axes.
    tail = array.shape[2:] if array.ndim == 4 else (width,)
    flat = array.reshape(rows, *tail)
    return flat.at[index].set(new.reshape(-1, *tail).astype(array.dtype), mode="drop").reshape(array.shape)


def _scatter_lanes(array: jax.Array, row: jax.Array, lane: jax.Array, new: jax.Array) -> jax.Array:
    """array [pages, rows, 128] or [pages, rows, 1, 128] with new [T, n] in row [T] of all rows from lane [T] on."""
    lanes = lane[:, None] + jnp.arange(new.shape[1])
    return array.reshape(-1, LANES).at[row[:, None], lanes].set(new, mode="drop").reshape(array.shape)


def _untile(values: jax.Array, side: jax.Array, form: EntryFormat, entries: int) -> tuple[jax.Array, jax.Array]:
    """Values and side words of tiled pages [..., entries, n]."""
    if form.name == "fp4":
        halves = values.reshape(*values.shape[:-1], 2, LANES // 2)
        values = jnp.concatenate([halves[..., 0, :], halves[..., 1, :]], axis=-2)
    if form.rope:
        values, side, words = _from_words(values), side[..., 0, :], form.side_words
        parts = [side[..., i * words : (i + 1) * words] for i in range(LANES // words)]
        side = jnp.concatenate(parts, axis=-2)[..., :entries, :]
    return values, side


def encode(entries: jax.Array, form: EntryFormat) -> tuple[jax.Array, jax.Array | None]:
    """entries [T, width], finite -> values [T, n] and side words [T, words] (None where values are floats)."""
    if form.name in PLAIN:
        values = entries.astype(form.name)
        return jax.lax.bitcast_convert_type(values, jnp.uint16) if form.as_bits else values, None
    x = entries.astype(jnp.float32)
    if form.name == "fp4":
        return _encode_fp4(_rotate(x), form)
    numbers, groups = x[:, : form.num_codes], form.num_groups
    if form.name == "int8":
        most = jnp.max(jnp.abs(numbers), axis=1, keepdims=True)
        scale = scales.int8_scale(most)
        codes = jnp.clip(jnp.round(numbers / scale), -127, 127).astype(jnp.int8)
    else:
        size = FP8_GROUP if form.rope else form.width
        byte = scales.scale_byte(_group_max(numbers, groups, size), scales.FP8)
        per_code = jnp.repeat(scales.inverse(byte), size, axis=1)[:, : form.num_codes]
        codes = (numbers * per_code).astype(jnp.float8_e4m3fn)
        scale = scales.value(byte)
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    if not form.rope:
        return codes, jax.lax.bitcast_convert_type(scale, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(entries[:, form.num_codes :].astype(jnp.bfloat16), jnp.uint16)
    values = jnp.concatenate([codes, (bits >> 8).astype(jnp.uint8)], axis=1)
    low = _to_words(bits & 255)
    words = jax.lax.bitcast_convert_type(scale, jnp.uint32) if form.name == "int8" else _join_bytes(_in_fours(byte))
    side = jnp.concatenate([low, words], axis=1)
    return values, jnp.pad(side, ((0, 0), (0, form.side_words - side.shape[1])))


def floats(values: jax.Array, form: EntryFormat) -> jax.Array:
    """Values of a format that is not quantised, as numbers."""
    return jax.lax.bitcast_convert_type(values, jnp.bfloat16) if form.as_bits else values


def decode(values: jax.Array, side: jax.Array, form: EntryFormat, dtype: jnp.dtype) -> jax.Array:
    """values [..., n] and side words [..., words] of a quantised format -> entries [..., width]."""
    if form.name == "fp4":
        codes = jnp.concatenate([values & 15, values >> 4], axis=-1)
        groups = _split_bytes(side)[..., : form.num_groups]
        numbers = e2m1_sixty_fourth(codes).astype(jnp.float32)
        return (numbers * 64 * jnp.repeat(scales.value(groups), FP4_GROUP, axis=-1)).astype(dtype)
    codes, n = values[..., : form.num_codes], form.rope // 4
    if form.name == "int8":
        numbers = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    else:
        numbers = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    if form.name == "fp8" and form.rope:
        groups = _split_bytes(side[..., n:])[..., : form.num_groups]
        scale = jnp.repeat(scales.value(groups), FP8_GROUP, axis=-1)[..., : form.num_codes]
    else:
        scale = jax.lax.bitcast_convert_type(side[..., n : n + 1], jnp.float32)
    numbers = (numbers * scale).astype(dtype)
    if not form.rope:
        return numbers
    low = _from_words(side[..., :n]).astype(jnp.uint32)
    bits = (values[..., form.num_codes :].astype(jnp.uint32) << 24) | (low << 16)
    rotary = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.concatenate([numbers, rotary.astype(dtype)], axis=-1)


def in_key_basis(queries: jax.Array, form: EntryFormat) -> jax.Array:
    """Queries [..., width] as keys of a format are kept: their products are those of the plain ones."""
    if form.name != "fp4":
        return queries
    return _rotate(queries.astype(jnp.float32)).astype(queries.dtype)


def _rotate(x: jax.Array) -> jax.Array:
    return jnp.matmul(x, jnp.asarray(hadamard(x.shape[-1])), precision=jax.lax.Precision.HIGHEST)


def hadamard(width: int) -> np.ndarray:
    """The normalised Hadamard matrix of Sylvester's order, [width, width] float32; it is its own inverse."""
    index = np.arange(width)
    bits = np.bitwise_count(index[:, None] & index) & 1
    return ((1 - 2 * bits.astype(np.int32)) / math.sqrt(width)).astype(np.float32)


def _encode_fp4(x: jax.Array, form: EntryFormat) -> tuple[jax.Array, jax.Array]:
    groups, half = form.num_groups, form.width // 2
    byte = scales.scale_byte(_group_max(x, groups, FP4_GROUP), scales.FP4)
    x = x * jnp.repeat(scales.inverse(byte), FP4_GROUP, axis=1)
    size = jnp.abs(x)
    # To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; half way to the even code.
    above = [size > t for t in (0.25, 1.25, 2.5, 5.0)] + [size >= t for t in (0.75, 1.75, 3.5)]
    code = jnp.sum(jnp.stack(above), axis=0, dtype=jnp.uint8)
    code = code | (jnp.signbit(x).astype(jnp.uint8) << 3)
    return code[:, :half] | (code[:, half:] << 4), _join_bytes(_in_fours(byte))


def _group_max(x: jax.Array, groups: int, size: int) -> jax.Array:
    """[T, n] -> [T, groups] the largest magnitudes of `size` channels each."""
    x = jnp.pad(jnp.abs(x), ((0, 0), (0, groups * size - x.shape[1])))
    return jnp.max(x.reshape(-1, groups, size), axis=2)


def _in_fours(x: jax.Array) -> jax.Array:
    """[T, n] -> [T, ceil(n / 4), 4], zeros at the end."""
    words = -(-x.shape[1] // 4)
    return jnp.pad(x, ((0, 0), (0, 4 * words - x.shape[1]))).reshape(len(x), words, 4)


def _to_words(x: jax.Array) -> jax.Array:
    """Bytes [..., 4 n] -> words [..., n], whose bytes are n apart, the first one low."""
    return _join_bytes(x.astype(jnp.uint32).reshape(*x.shape[:-1], 4, -1).swapaxes(-1, -2))


def _from_words(words: jax.Array) -> jax.Array:
    """[..., n] uint32 -> [..., 4 n] uint8."""
    planes = [words >> shift for shift in (0, 8, 16, 24)]
    return jnp.concatenate(planes, axis=-1).astype(jnp.uint8)


def _join_bytes(x: jax.Array) -> jax.Array:
    """Bytes [..., 4] uint32, the low one first -> words [...]."""
    return x[..., 0] | (x[..., 1] << 8) | (x[..., 2] << 16) | (x[..., 3] << 24)


def _split_bytes(words: jax.Array) -> jax.Array:
    """[..., n] uint32 -> [..., 4 n] uint32, the low byte first."""
    shifted = words[..., None] >> jnp.arange(0, 32, 8, dtype=jnp.uint32)
    return (shifted & 255).reshape(*words.shape[:-1], -1)
