"""How TPU kernels read a paged pool: in steps of entries, by DMA into two buffers in turn, decoded when they are used.

`Layout` is what a kernel is given of a pool; inside it, `Streamed` (pages of a row) and `Gathered` (chosen entries of a
row) are where keys come from. Page ids come from the row's part of the page table, which is read eight rows at a time
into scalar memory: nothing is computed outside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Pages
from pallas_kernels.entry_format import LANES, EntryFormat
from pallas_kernels.tpu_entries import decode, shift_to_front
from pallas_kernels.tpu_softmax import to_column

STEP = 128  # entries that are attended to at a time: as many as a matmul has columns
TILE_ROWS = 8  # of 32-bit words: a block of an array in scalar memory has as many rows, or all
_UNROLL = 8  # DMAs started in one turn of a loop
Dma = Any


@dataclass(frozen=True)
class Layout:
    """What of a pool is known when the kernel is compiled."""

    epp: int
    places: int  # of a row's table
    table_rows: int  # of a block in scalar memory
    num_pages: int  # of a layer
    count: int  # devices that share the pages
    step: int  # entries
    form: EntryFormat

    @classmethod
    def of(cls, pages: Pages, gathered: int = 0) -> Layout:
        """`gathered` entries are chosen of each row; 0: its pages are streamed."""
        epp = pages.entries_per_page
        step = min(STEP, gathered) if gathered else epp * max(1, STEP // epp)
        rows = min(TILE_ROWS, pages.table.shape[0])
        return cls(epp, pages.table.shape[1], rows, pages.num_pages, pages.count, step, pages.pool.format)

    @property
    def side_rows(self) -> int:
        return self.form.side_rows(self.epp)

    def num_here(self, num_entries: jax.Array, index: jax.Array) -> jax.Array:
        """As Pages.num_here."""
        return num_entries if self.count == 1 else (num_entries + (self.count - 1 - index)) // self.count

    def inputs(self, pages: Pages) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
        """Table and pool. The kernel's first scalar argument is the row of each grid step."""
        table = pl.BlockSpec(
            (self.table_rows, self.places), lambda i, row, *_: (row[i] // self.table_rows, 0), memory_space=pltpu.SMEM
        )
        pools = [x for x in (pages.pool.values, pages.pool.side) if x is not None]
        return [pages.table, *pools], [table, *(pl.BlockSpec(memory_space=pl.ANY) for _ in pools)]

    def scratch(self, pages: Pages, gathered: bool = False) -> list[Any]:
        """Buffers of values and side words, the side words as they are used; semaphores."""
        values = pages.pool.values
        shapes: list[Any] = [pltpu.VMEM((2, self.step, *values.shape[2:]), values.dtype)]
        if pages.pool.side is not None:
            # DMAs write whole tiles of 8 rows; each entry's words are then shifted to a row of their own.
            rows = -(-self.side_rows // TILE_ROWS) * TILE_ROWS
            buffer = (self.step,) if gathered else (self.step // self.epp, rows)
            shapes += [pltpu.VMEM((2, *buffer, LANES), jnp.uint32)]
            shapes += [] if gathered else [pltpu.VMEM((self.step + 2 * TILE_ROWS, LANES), jnp.uint32)]
        return [*shapes, pltpu.SemaphoreType.DMA((2,))]


@dataclass
class Streamed:
    """Places lo <= place < hi of a row's sequence of entries here, page by page."""

    layout: Layout
    layer: jax.Array
    row: jax.Array
    lo: jax.Array
    hi: jax.Array
    unit: int  # entries of a DMA
    refs: Any  # table, values(, side)
    buffers: Any  # as Layout.scratch
    also: Callable[[jax.Array, jax.Array], list[Dma]] | None = None  # DMAs of a step besides

    @property
    def steps(self) -> tuple[jax.Array, jax.Array]:
        first = self.lo // self.layout.step
        return first, jnp.where(self.lo < self.hi, (self.hi + self.layout.step - 1) // self.layout.step, first)

    def each(self, number: jax.Array, slot: jax.Array, do: Callable[[Dma], None]) -> None:
        """Of the DMAs that fill buffer `slot` with step `number`: what is not among the places is left out."""
        table, *pools = self.refs
        *buffers, semaphores = self.buffers
        epp, step = self.layout.epp, self.layout.step

        def part(n: Any, size: int, copy: Callable[[jax.Array, jax.Array], Dma]) -> None:
            place = number * step + n * size

            @pl.when((place + size > self.lo) & (place < self.hi))
            def _() -> None:
                page = table[lax.rem(self.row, self.layout.table_rows), lax.rem(place // epp, self.layout.places)]
                do(copy(page + self.layer * self.layout.num_pages, lax.rem(place, epp)))

        def values(n: Any) -> None:
            def copy(page: jax.Array, entry: jax.Array) -> Dma:
                source = pools[0].at[page, pl.ds(pl.multiple_of(entry, self.unit), self.unit)]
                return pltpu.make_async_copy(
                    source, buffers[0].at[slot, pl.ds(n * self.unit, self.unit)], semaphores.at[slot]
                )

            part(n, self.unit, copy)

        def side(n: Any) -> None:
            def copy(page: jax.Array, entry: jax.Array) -> Dma:
                target = buffers[1].at[slot, n, pl.ds(0, self.layout.side_rows)]
                return pltpu.make_async_copy(pools[1].at[page, :, 0], target, semaphores.at[slot])

            part(n, epp, copy)

        _times(step // self.unit, values)
        if len(pools) > 1:
            _times(step // epp, side)
        for dma in self.also(number, slot) if self.also else ():
            do(dma)

    def places(self, number: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
        return number * self.layout.step + lax.broadcasted_iota(jnp.int32, shape, axis)

    def keys(self, number: jax.Array, slot: jax.Array, dtype: Any) -> jax.Array:
        """[step, width], zeros where nothing was read."""
        values = self.buffers[0][slot]
        if len(self.refs) == 2:
            keys = values.reshape(self.layout.step, -1).astype(dtype)
        else:
            keys = decode(values, self._side(slot), self.layout.form, dtype)
        place = self.places(number, (self.layout.step, 1), 0)
        return jnp.where((place >= self.lo) & (place < self.hi), keys, jnp.zeros_like(keys))  # 0 x NaN is NaN

    def _side(self, slot: jax.Array) -> jax.Array:
        """[step, 128]: a page's entries lie in runs of `side_rows`, each from another lane on."""
        buffer, entries = self.buffers[1], self.buffers[2]
        words, rows = self.layout.form.side_words, self.layout.side_rows
        for page in range(buffer.shape[1]):
            whole = buffer[slot, page]
            for i in range(-(-self.layout.epp // rows)):
                # Rows past `rows` are overwritten by the next run.
                first = page * self.layout.epp + i * rows
                entries[pl.ds(first, len(whole)), :] = shift_to_front(whole, i * words)
        return entries[: self.layout.step, :]


@dataclass
class Gathered:
    """The entries of a row that were chosen, `num` of them, each by DMAs of its own."""

    layout: Layout
    layer: jax.Array
    row: jax.Array
    block: jax.Array  # of queries
    num: jax.Array
    refs: Any  # table, values(, side), chosen [8, k] as scalars (, and as a vector)
    buffers: Any

    @property
    def steps(self) -> tuple[jax.Array, jax.Array]:
        return jnp.int32(0), (self.num + self.layout.step - 1) // self.layout.step

    @staticmethod
    def count(chosen: Any, row: jax.Array, limit: int) -> jax.Array:
        """How many of a row of chosen [8, k], those in use first, are below the limit: found by halving."""
        k = chosen.shape[1]

        def halve(i: jax.Array, found: jax.Array) -> jax.Array:
            more = found + lax.shift_left(jnp.int32(1), k.bit_length() - 1 - i)
            used = (more <= k) & (chosen[row, jnp.minimum(more, k) - 1] < limit)
            return jnp.where(used, more, found)

        return lax.fori_loop(0, k.bit_length(), halve, jnp.int32(0))

    def each(self, number: jax.Array, slot: jax.Array, do: Callable[[Dma], None]) -> None:
        table, *pools, chosen = self.refs[: 3 + self._quantised]
        *buffers, semaphores = self.buffers
        layout, first = self.layout, number * self.layout.step
        table_row = lax.rem(self.row, layout.table_rows)

        def entry(n: Any) -> None:
            @pl.when(first + n < self.num)
            def _() -> None:
                place = chosen[self.block, first + n]
                page = table[table_row, place // layout.epp] + self.layer * layout.num_pages
                e = lax.rem(place, layout.epp)
                do(pltpu.make_async_copy(pools[0].at[page, e], buffers[0].at[slot, n], semaphores.at[slot]))
                if self._quantised:
                    source = pools[1].at[page, lax.rem(e, layout.side_rows), 0]
                    do(pltpu.make_async_copy(source, buffers[1].at[slot, n], semaphores.at[slot]))

        _times(layout.step, entry)

    def places(self, number: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
        """In the order of choice."""
        return number * self.layout.step + lax.broadcasted_iota(jnp.int32, shape, axis)

    def keys(self, number: jax.Array, slot: jax.Array, dtype: Any) -> jax.Array:
        step = self.layout.step
        values = self.buffers[0][slot]
        if self._quantised:
            chosen = self.refs[-1][:, pl.ds(pl.multiple_of(number * step, step), step)]
            of_block = lax.broadcasted_iota(jnp.int32, chosen.shape, 0) == self.block
            chosen = jnp.sum(jnp.where(of_block, chosen, 0), axis=0, keepdims=True)
            run = lax.rem(chosen, self.layout.epp) // self.layout.side_rows
            run = to_column(run.astype(jnp.float32)).astype(jnp.int32)
            whole = self.buffers[1][slot]
            side = whole
            for i in range(1, -(-self.layout.epp // self.layout.side_rows)):
                side = jnp.where(run == i, shift_to_front(whole, i * self.layout.form.side_words), side)
            keys = decode(values, side, self.layout.form, dtype)
        else:
            keys = values.reshape(step, -1).astype(dtype)
        return jnp.where(self.places(number, (step, 1), 0) < self.num, keys, jnp.zeros_like(keys))

    @property
    def _quantised(self) -> int:
        return int(self.layout.form.quantised)


def _times(n: int, body: Callable[[Any], None]) -> None:
    """body(0) .. body(n - 1)."""
    lax.fori_loop(0, n, lambda i, carry: (body(i), carry)[1], 0, unroll=min(n, _UNROLL))


def _start(dma: Dma) -> None:
    dma.start()


def _wait(dma: Dma) -> None:
    dma.wait()


def start(source: Streamed | Gathered) -> None:
    """The first step's DMAs."""
    first, last = source.steps

    @pl.when(first < last)
    def _() -> None:
        source.each(first, lax.rem(first, 2), _start)


def run(source: Streamed | Gathered, use: Callable[[jax.Array, jax.Array], None]) -> None:
    """Calls use(step, buffer) for each step, while the next one's DMAs are on their way. After `start`."""
    first, last = source.steps

    def body(i: jax.Array, carry: int) -> int:
        @pl.when(i + 1 < last)
        def _() -> None:
            source.each(i + 1, lax.rem(i + 1, 2), _start)

        source.each(i, lax.rem(i, 2), _wait)
        use(i, lax.rem(i, 2))
        return carry

    lax.fori_loop(first, last, body, 0)
