"""The scores of a chunk of index keys in a TPU's fast memory, whatever the keys' format (see entry_format).

Codes are turned into the queries' type where they are, exactly; int8's and fp8's scales, a number an entry, multiply
the scores, and fp4's, which differ within an entry, the numbers: their words lie along the lanes, and are turned into
columns by transposing them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.entry_format import FP4_GROUP, LANES, EntryFormat
from pallas_kernels.target import dot_precision

LOWEST = -(1 << 31)  # of a score that counts for nothing: below every float's


class Sizes(NamedTuple):
    """What is known when the kernel is compiled."""

    block: int  # queries
    heads: int
    epp: int  # entries of a page
    chunk: int  # entries that arrive together
    ratio: int
    k: int
    digit: int  # bits that a pass over the scores settles
    max_entries: int
    form: EntryFormat
    count: int  # devices that share the pages

    @property
    def pages(self) -> int:
        """Of a chunk."""
        return self.chunk // self.epp

    @property
    def piece(self) -> int:
        """Entries scored by one matmul: for one query a whole chunk, or the matrix unit would wait for each result."""
        return self.chunk if self.block == 1 else math.lcm(self.epp, LANES)

    @property
    def rows(self) -> int:
        """Of a tile of scores: the queries; for one query, eight runs of 128 entries."""
        return 8 if self.block == 1 else self.block

    @property
    def tile(self) -> int:
        """Entries of a tile of scores."""
        return LANES * 8 if self.block == 1 else LANES


def _flip(bits: jax.Array) -> jax.Array:
    """A float's bits as int32 of the floats' order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def floats_of(scores: jax.Array) -> jax.Array:
    """Scores as float32, -inf for what counts for nothing."""
    return jnp.where(scores == LOWEST, -jnp.inf, lax.bitcast_convert_type(_flip(scores), jnp.float32))


def entries_of(tile, sizes: Sizes) -> jax.Array:
    """[rows, 128] the entries that a tile's scores are of."""
    lane = lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 1)
    if sizes.block == 1:
        lane += LANES * lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 0)
    return tile * sizes.tile + lane


class Scores:
    """Scores of one block's queries, int32 of the floats' order, [tiles, rows, 128]."""

    def __init__(self, q, wide, scores, visible: jax.Array, sizes: Sizes):
        self.q, self.wide, self.scores, self.visible, self.sizes = q, wide, scores, visible, sizes

    def start(self, weights) -> None:
        """weights [1, B, H] -> wide [B * H, 128], each along the lanes."""
        heads = self.sizes.heads
        for b in range(self.sizes.block):
            row = jnp.broadcast_to(weights[0, b : b + 1], (LANES, heads))
            self.wide[b * heads : (b + 1) * heads] = row.T

    def add(self, chunk: jax.Array, buffers: list[Any]) -> None:
        """Those of a chunk's pages: values [pages, ...] and, of a quantised format, side words [pages, 1, lanes]."""
        block, heads, piece = self.sizes.block, self.sizes.heads, self.sizes.piece
        lane = lax.broadcasted_iota(jnp.int32, (block, LANES), 1)
        q = self.q[0]

        def score(n, carry):
            keys, scale = self._keys(buffers, n * (piece // self.sizes.epp), q.dtype)
            products = lax.dot_general(
                q,
                keys,
                (((1,), (1,)), ((), ())),
                precision=dot_precision(q.dtype),
                preferred_element_type=jnp.float32,
            )
            for m in range(piece // LANES):
                run = chunk * (self.sizes.chunk // LANES) + n * (piece // LANES) + m  # of 128 entries, among all
                own = slice(m * LANES, (m + 1) * LANES)
                part = jnp.maximum(products[:, own], 0.0) * self.wide[...]
                part = jnp.sum(part.reshape(block, heads, LANES), axis=1)
                if scale is not None:
                    part *= scale[:, own]
                part = jnp.where(part == 0, 0.0, part)  # -0 and 0 are a tie
                bits = _flip(lax.bitcast_convert_type(part, jnp.int32))
                bits = jnp.where(run * LANES + lane < self.visible, bits, LOWEST)
                if block == 1:
                    self.scores[lax.div(run, 8), m % 8 : m % 8 + 1] = bits
                else:
                    self.scores[run] = bits
            return carry

        lax.fori_loop(0, self.sizes.chunk // piece, score, 0)

    def fill(self, num_chunks: jax.Array, tiles: int) -> None:
        """The tiles of what was not scored: where nothing was, all that is visible is chosen, with the same score."""
        same = jnp.where(num_chunks == 0, 0, LOWEST)

        def body(tile, carry):
            self.scores[tile] = jnp.where(entries_of(tile, self.sizes) < self.visible, same, LOWEST)
            return carry

        lax.fori_loop(num_chunks * (self.sizes.chunk // self.sizes.tile), tiles, body, 0)

    def _keys(self, buffers: list[Any], first: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
        """Of a piece, whose first page in the chunk is `first`: keys [piece, d], and what the scores are multiplied by,
        [1, piece]."""
        sizes, name = self.sizes, self.sizes.form.name
        num = sizes.piece // sizes.epp
        values = buffers[0][pl.ds(first, num)]
        if not sizes.form.quantised:
            return values.reshape(sizes.piece, -1).astype(dtype), None
        words = jnp.concatenate([buffers[1][first + i][:, : sizes.epp] for i in range(num)], axis=1)  # [1, piece]
        if name == "fp4":
            return decode_fp4(values, words, dtype), None
        codes = pltpu.bitcast(values.reshape(sizes.piece, -1), jnp.int8 if name == "int8" else jnp.float8_e4m3fn)
        return codes.astype(dtype), lax.bitcast_convert_type(words, jnp.float32)


def decode_fp4(values: jax.Array, words: jax.Array, dtype: Any) -> jax.Array:
    """values [pages, ...] uint8, words [1, entries] -> [entries, width]."""
    entries = words.shape[1]
    bytes_ = values.astype(jnp.int32)
    low, high = bytes_ & 15, bytes_ >> 4
    if values.shape[1] * values.shape[0] * 2 == entries:  # tiled: two entries a row, of a page's halves
        lane = lax.broadcasted_iota(jnp.int32, low.shape, 2)
        half = low.shape[2] // 2
        turned = [pltpu.roll(x, half, 2) for x in (low, high)]
        first = jnp.where(lane < half, low, turned[1])
        second = jnp.where(lane < half, turned[0], high)
        codes = jnp.concatenate([first, second], axis=1)
    else:
        codes = jnp.concatenate([low, high], axis=2)
    codes = codes.reshape(entries, -1)
    width = codes.shape[1]
    scales = jnp.broadcast_to(lax.bitcast_convert_type(words, jnp.int32), (width, entries)).T
    group = lax.broadcasted_iota(jnp.int32, codes.shape, 1) // FP4_GROUP
    exponent = (scales >> (8 * group)) & 255
    return (_e2m1(codes) * lax.bitcast_convert_type(exponent << 23, jnp.float32)).astype(dtype)


def _e2m1(codes: jax.Array) -> jax.Array:
    """The numbers of E2M1 codes 0..15: sign, two bits of exponent, one of mantissa; 1 is the subnormal 0.5."""
    size = codes & 7
    normal = ((size >> 1) + 126) << 23 | (size & 1) << 22
    bits = jnp.where(size >= 2, normal, jnp.where(size == 1, 126 << 23, 0))
    return lax.bitcast_convert_type(bits | (codes & 8) << 28, jnp.float32)
