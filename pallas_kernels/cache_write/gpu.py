"""Storing quantised entries on a GPU: a block of threads quantises 16 entries and copies each to its place, in place.

A group of channels with one scale is one tile of registers [16, group]: its largest magnitude is a reduction over the
few threads that share a row. Codes and side words of the 16 entries are put together in shared memory, from where an
entry's go to its page in copies of their own; an index key's side word is a store by itself. Nothing of a page is
read: a GPU's memory is written byte by byte. Entries that are floats have no kernel: XLA's scatter is one, in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import scales
from pallas_kernels.cache_write import codes
from pallas_kernels.entry_format import FP4_GROUP, FP8_GROUP, EntryFormat
from pallas_kernels.pool import Pool, in_key_basis
from pallas_kernels.target import Target

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

_ENTRIES = 16  # of a block
_ROPE = 64
_QUARTER = _ROPE // 4  # of the rotary channels have their low bytes at the same bits of the side words
_COPY = 256  # elements that one copy takes at most
_ROW = 128  # bytes that a copy's place in shared memory is a multiple of


def supports(pool: Pool, target: Target) -> bool:
    """Whether the kernel stores in it: quantised pages of latents with 64 rotary channels, or of keys of 128."""
    form = pool.format
    latents = form.rope == _ROPE and form.num_codes % FP8_GROUP == 0 and form.width % _COPY == 0
    return target.has_gpu_kernels and form.quantised and not pool.tiled and (latents or form.width == 128)


def cache_write(
    pool: Pool, slots: jax.Array, entries: jax.Array, *, layer: int | jax.Array, num_pages: int, target: Target
) -> Pool:
    """As `api.cache_write`."""
    form, side = pool.format, pool.side
    assert side is not None
    if form.name == "fp4":
        entries = in_key_basis(entries.astype(jnp.float32), form)
    pad = -entries.shape[0] % _ENTRIES
    entries = jnp.pad(entries, ((0, pad), (0, 0)))
    slots = jnp.pad(slots, (0, pad), constant_values=num_pages * pool.entries_per_page)
    page, entry = slots // pool.entries_per_page, slots % pool.entries_per_page
    places = jnp.stack([jnp.where(page < num_pages, page + layer * num_pages, -1), entry]).astype(jnp.int32)
    width = pool.values.shape[2]
    words = (_ENTRIES, -(-4 * form.side_words // _ROW) * _ROW // 4) if form.rope else (_ENTRIES,)

    def cache_write(places, entries, values, side, scratch):
        _kernel(places, entries, values, side, scratch, form)

    refs = jax.new_ref(pool.values), jax.new_ref(side)
    plgpu.kernel(
        cache_write,
        out_type=(),
        scratch_types=[
            {"values": plgpu.SMEM((_ENTRIES, max(width, _ROW)), jnp.uint8), "side": plgpu.SMEM(words, jnp.uint32)}
        ],
        grid=(entries.shape[0] // _ENTRIES,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=pl.CostEstimate(
            flops=20 * entries.size,
            bytes_accessed=entries.size * entries.dtype.itemsize + entries.shape[0] * (width + 4 * form.side_words + 8),
            transcendentals=0,
        ),
        interpret=plgpu.InterpretGPUParams() if target.interpret else None,
    )(places, entries, *refs)
    return dataclasses.replace(pool, values=refs[0][...], side=refs[1][...])


def _kernel(places, entries, values, side, scratch, form: EntryFormat) -> None:
    first = lax.axis_index("block") * _ENTRIES
    x = entries.at[pl.ds(first, _ENTRIES)]
    if form.name == "fp4":
        _encode_fp4(x, scratch)
    else:
        _encode(x, scratch, form)
    plgpu.commit_smem()

    def copy(i, carry):
        page, entry = places[0, first + i], places[1, first + i]

        @pl.when(page >= 0)
        def _():
            width = values.shape[2]
            for c in range(0, width, min(_COPY, width)):
                columns = pl.ds(c, min(_COPY, width))
                plgpu.copy_smem_to_gmem(scratch["values"].at[i, columns], values.at[page, entry, columns])
            if form.rope:
                plgpu.copy_smem_to_gmem(scratch["side"].at[i, pl.ds(0, side.shape[2])], side.at[page, entry])
            else:
                side[page, 0, entry] = scratch["side"][i]

        return carry

    lax.fori_loop(0, _ENTRIES, copy, 0)
    plgpu.wait_smem_to_gmem(0)


def _layout(group: int) -> Any:
    """Of [16, group]: eight threads share a row, each has neighbours."""
    return plgpu.Layout.TILED(plgpu.Tiling(((16, group), (4, group), (group // 8,))), (-5,), (-3, -2), -1)


def _load(x, first: int, group: int) -> jax.Array:
    return plgpu.load(x.at[:, pl.ds(first, group)], layout=_layout(group), optimized=False).astype(jnp.float32)


def _most(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=1)


def _spread(x: jax.Array, group: int) -> jax.Array:
    """[16] -> [16, group]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (_ENTRIES, group), [0]), _layout(group))


def _store(out, x: jax.Array) -> None:
    plgpu.store(out, x.astype(out.dtype), optimized=False)


def _encode(x, scratch, form: EntryFormat) -> None:
    """int8 and fp8."""
    groups = range(0, form.num_codes, FP8_GROUP)
    values, words = scratch["values"], []
    per_group = form.name == "fp8" and form.rope > 0
    if not per_group:
        most = functools.reduce(jnp.maximum, [_most(_load(x, c, FP8_GROUP)) for c in groups])
        if form.name == "int8":
            scale = scales.int8_scale(most)
            words.append(codes.bits(scale))
        else:
            byte = scales.scale_byte(most, scales.FP8)
            scale = scales.inverse(byte)
            words.append(byte << 23)
    for i, c in enumerate(groups):
        here = _load(x, c, FP8_GROUP)
        if per_group:
            byte = scales.scale_byte(_most(here), scales.FP8)
            scale = scales.inverse(byte)
            if i % 4 == 0:
                words.append(byte)
            else:
                words[-1] |= byte << (8 * (i % 4))
        spread = _spread(scale, FP8_GROUP)
        code = codes.int8(here / spread) if form.name == "int8" else codes.e4m3(here * spread)
        _store(values.at[:, pl.ds(c, FP8_GROUP)], code)
    if not form.rope:
        _store(scratch["side"], words[0])
        return
    _encode_rotary(x, scratch, form)
    nothing = plgpu.layout_cast(jnp.zeros((_ENTRIES,), jnp.uint32), _layout(FP8_GROUP).reduce(1))
    words += [nothing] * (form.side_words - _QUARTER - len(words))
    for i, word in enumerate(words):
        _store(scratch["side"].at[:, _QUARTER + i], word)


def _encode_rotary(x, scratch, form: EntryFormat) -> None:
    """The high bytes of bfloat16 among the codes, the low ones in words."""
    layout = plgpu.Layout.TILED(plgpu.Tiling(((16, _QUARTER), (8, 8), (2,))), (-5, -4), (-3, -2), -1)
    word = None
    for k in range(4):
        columns = pl.ds(form.num_codes + k * _QUARTER, _QUARTER)
        rotary = codes.bfloat16(plgpu.load(x.at[:, columns], layout=layout, optimized=False).astype(jnp.float32))
        _store(scratch["values"].at[:, columns], rotary >> 8)
        low = (rotary & 0xFF) << (8 * k)
        word = low if word is None else word | low
    assert word is not None
    _store(scratch["side"].at[:, pl.ds(0, _QUARTER)], word)


def _encode_fp4(x, scratch) -> None:
    word, tiles = None, []
    for g in range(4):
        here = _load(x, FP4_GROUP * g, FP4_GROUP)
        byte = scales.scale_byte(_most(here), scales.FP4)
        tiles.append(codes.e2m1(here * _spread(scales.inverse(byte), FP4_GROUP)))
        word = byte if word is None else word | (byte << (8 * g))
    assert word is not None
    for g in range(2):
        _store(scratch["values"].at[:, pl.ds(FP4_GROUP * g, FP4_GROUP)], tiles[g] | (tiles[g + 2] << 4))
    _store(scratch["side"], word)
