"""Storing entries on a TPU: entries become words in registers, and words go to their pages by DMA, in place.

The core computes and copies 32-bit words, so that is how it sees a pool: `pack` consecutive rows of a page are one row
of words (`bitcast` of a reference, rows from the low bits up). An entry of one word row or more is copied as it is.
Where several entries share a word row, that line is read, changed and written. A grid step takes up to 128 entries: it
starts the reads of all their lines, quantises meanwhile, merges, and starts all writes; each is a few hundred bytes, so
what bounds the speed is how many copies the chip keeps in flight. Entries of one line are merged in the first one's
copy of it, in whatever order they come; steps follow each other, so a line may return in a later one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cache_write import words
from pallas_kernels.entry_format import LANES
from pallas_kernels.pool import Pool, in_key_basis
from pallas_kernels.target import Target

_STEP = 128  # entries of a grid step
_FIELDS = 4  # integers an entry has for each array: see `_places`


class Lines(NamedTuple):
    """How entries lie in one of a pool's arrays: entry e in row e % rows of a page, from lane lanes * (e // rows) on.

    `pack` rows are a row of words. Where entries share no words, `own` is the shape of an entry's.
    """

    rows: int
    width: int  # lanes of a row
    lanes: int  # of them an entry's
    pack: int
    own: tuple[int, ...] = ()


def lines_of(pool: Pool) -> list[Lines]:
    """Of its values and side words."""
    form, entries, values = pool.format, pool.entries_per_page, pool.values
    pack = 4 // values.dtype.itemsize
    rows, width = values.shape[1], values.shape[-1]
    if values.ndim == 4:  # gathered floats
        found = [Lines(rows, width, width, 1, (values.shape[2] // pack, width))]
    else:
        found = [Lines(rows, width, width * rows // entries, pack, (1, width) if pack == 1 else ())]
    if pool.side is not None:
        rows, width = (form.side_rows(entries), LANES) if form.rope else (1, pool.side.shape[2])
        found.append(Lines(rows, width, form.side_words, 1))
    return found


def supports(pool: Pool, target: Target) -> bool:
    """Whether the kernel stores in it: tiled pages of whole rows of words, rotary channels in an entry's last 128."""
    return (
        target.has_tpu_kernels
        and pool.tiled
        and pool.format.can_tile()
        and pool.format.rope <= LANES
        and pool.values.shape[-2] % (4 // pool.values.dtype.itemsize) == 0
    )


def cache_write(
    pool: Pool, slots: jax.Array, entries: jax.Array, *, layer: int | jax.Array, num_pages: int, target: Target
) -> Pool:
    """As `api.cache_write`."""
    form, lines = pool.format, lines_of(pool)
    if form.name == "fp4":
        entries = in_key_basis(entries.astype(jnp.float32), form)
    num, width = entries.shape
    step = min(_STEP, -(-num // 16) * 16)
    pad = -num % step
    entries = jnp.pad(entries, ((0, pad), (0, 0)))
    steps = (num + pad) // step
    slots = jnp.pad(slots, (0, pad), constant_values=num_pages * pool.entries_per_page).reshape(steps, step)
    page, places = _places(slots, lines, pool.entries_per_page, num_pages)
    numbers = jnp.stack([page + layer * num_pages, *places], axis=1)  # [steps, 1 + 4 a line, step]

    arrays = [pool.values] if pool.side is None else [pool.values, pool.side]
    seen = arrays
    if target.interpret:  # which cannot store through a bitcast reference
        seen = [_as_words(x) for x in arrays]
    scratch = [pltpu.VMEM((step, *(line.own or (line.width,))), jnp.uint32) for line in lines]
    scratch += [pltpu.VMEM((step, line.width), jnp.uint32) for line in lines if not line.own]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_kernel, form=form, lines=tuple(lines)),
        grid=(steps,),
        in_specs=[
            pl.BlockSpec((1, *numbers.shape[1:]), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((step, width), lambda i: (i, 0)),
            *[hbm] * len(seen),
        ],
        out_specs=[hbm] * len(seen),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in seen],
        scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA((2,))],
        input_output_aliases={2 + i: i for i in range(len(seen))},
        cost_estimate=_cost(entries, lines),
        interpret=target.interpret,
        name="cache_write",
    )(numbers, entries, *seen)
    if target.interpret:
        out = [_as_elements(x, old) for x, old in zip(out, arrays, strict=True)]
    return dataclasses.replace(pool, values=out[0], side=out[1] if len(out) > 1 else None)


def _places(slots: jax.Array, lines: list[Lines], entries: int, num_pages: int) -> tuple[jax.Array, list[jax.Array]]:
    """The page of each slot [steps, step], and for each array: its row of words, the first lane, how far up in a word,
    and the leader, the first of the step's slots in that line (-1: the slot is nowhere)."""
    page, entry = slots // entries, slots % entries
    valid = page < num_pages
    number = jnp.arange(slots.shape[1], dtype=jnp.int32)
    places = []
    for line in lines:
        row = entry % line.rows
        word_row, leader = row, number
        shift = jnp.zeros_like(row)
        if not line.own:
            word_row, shift = row // line.pack, row % line.pack * (32 // line.pack)
            name = jnp.where(valid, page * line.rows + word_row, -1)
            leader = jnp.argmax(name[:, :, None] == name[:, None, :], axis=2).astype(jnp.int32)
        places += [word_row, line.lanes * (entry // line.rows), shift, jnp.where(valid, leader, -1)]
    return page, places


def _kernel(numbers, entries, *refs, form, lines):
    num = len(lines)
    pools = [ref if ref.dtype == jnp.uint32 else ref.bitcast(jnp.uint32) for ref in refs[num : 2 * num]]
    fresh, rest = refs[2 * num : 3 * num], list(refs[3 * num : -1])
    old = [rest.pop(0) if not line.own else None for line in lines]
    semaphores = refs[-1]
    step = entries.shape[0]

    def each(do: Callable[[Any, int, int], None]) -> None:
        """do(entry, array, leader) for entries that have a place."""

        def body(i, carry):
            for a in range(num):
                leader = numbers[0, _FIELDS * (a + 1), i]
                pl.when(leader >= 0)(functools.partial(do, i, a, leader))
            return carry

        lax.fori_loop(0, step, body, 0)

    def copy(i, a, *, read: bool):
        page, row = pools[a].at[numbers[0, 0, i]], numbers[0, _FIELDS * a + 1, i]
        there = page.at[row] if len(page.shape) == 3 else page.at[pl.ds(row, 1)]
        here = fresh[a].at[i] if lines[a].own else old[a].at[pl.ds(i, 1)]
        return pltpu.make_async_copy(*((there, here) if read else (here, there)), semaphores.at[int(read)])

    def every(read: bool, do: Callable[[Any], None]) -> None:
        """do(copy) for the reads or the writes of all lines."""

        def one(i, a, leader):
            if not (read and lines[a].own):
                pl.when(leader == i)(lambda: do(copy(i, a, read=read)))

        each(one)

    def merge(i, a, leader):
        line = lines[a]
        if line.own:
            return
        first, shift = (numbers[0, _FIELDS * a + k, i] for k in (2, 3))
        lane = lax.broadcasted_iota(jnp.int32, (1, line.width), 1)
        mask = jnp.uint32((1 << (32 // line.pack)) - 1) << shift.astype(jnp.uint32)
        mask = jnp.where((lane >= first) & (lane < first + line.lanes), mask, jnp.uint32(0))
        new = fresh[a][pl.ds(i, 1)] << shift.astype(jnp.uint32)
        old[a][pl.ds(leader, 1)] = (old[a][pl.ds(leader, 1)] & ~mask) | (new & mask)

    every(True, lambda dma: dma.start())
    values, side = words.encode(entries[...], form)
    words.store_values(values, fresh[0], lines[0].own)
    if side is not None:
        fresh[1][...] = words.repeat(side, lines[1].lanes, lines[1].width)
    every(True, lambda dma: dma.wait())
    each(merge)
    every(False, lambda dma: dma.start())
    every(False, lambda dma: dma.wait())


def _as_words(x: jax.Array) -> jax.Array:
    """As a bitcast reference shows it: pack rows, the first in the low bits, are one row of words."""
    pack = 4 // x.dtype.itemsize
    if pack > 1:
        x = x.reshape(*x.shape[:-2], -1, pack, x.shape[-1]).swapaxes(-1, -2)
    return lax.bitcast_convert_type(x, jnp.uint32)


def _as_elements(x: jax.Array, like: jax.Array) -> jax.Array:
    x = lax.bitcast_convert_type(x, like.dtype)
    return (x.swapaxes(-1, -2) if like.dtype.itemsize < 4 else x).reshape(like.shape)


def _cost(entries: jax.Array, lines: list[Lines]) -> pl.CostEstimate:
    """As if every entry had a line of its own, which is so in a decode step."""
    line_bytes = sum(4 * math.prod(line.own) if line.own else 8 * line.width for line in lines)
    return pl.CostEstimate(
        flops=20 * entries.size,
        bytes_accessed=entries.size * entries.dtype.itemsize + entries.shape[0] * (line_bytes + 4 * _FIELDS),
        transcendentals=0,
    )
