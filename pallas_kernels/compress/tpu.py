"""Compression on a TPU: one pass over the step's tokens, their rows' states read and written in place by DMA.

A grid step has 128 tokens. A window's running sums are a segmented scan along its tokens (log2 ratio rounds of shifting
and merging whole vectors, 128 channels at a time), whatever the rows' cuts: sums that a window or a row begins with are
merged into its first token. They come from the row's state, or in a row that goes on from the step before, from the
last token's sums there; so a step is a cut like any other. After every token its sums are what the row's state would
be, so the state of a row is the one at its last token. The sums of the pieces' last tokens are gathered, and after the
last step all entries are normalised and rotated at once.

A prompt is bound by reading values and logits once; a decode step by the states' copies, all in flight together.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.compress.sums import Sum, merge, where
from pallas_kernels.entry_format import LANES
from pallas_kernels.target import Target

if TYPE_CHECKING:
    from pallas_kernels.compress.api import Finish, Pieces

_TOKENS = 128  # of a grid step
_ENTRIES = 64  # normalised and rotated together
_VMEM_LIMIT = 60 << 20


def supports(width: int, finish: Finish, target: Target) -> bool:
    """Whether the kernel takes entries of that width."""
    return target.has_tpu_kernels and width % LANES == 0 and 2 * finish.cos.shape[1] <= LANES


def compress(
    values: jax.Array,
    logits: jax.Array,
    pieces: Pieces,
    states: jax.Array,
    row_slot: jax.Array,
    row_position: jax.Array,
    finish: Finish,
    *,
    ratio: int,
    overlap: bool,
    dtype: jnp.dtype,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """As `api.compress`."""
    num, channels = values.shape
    width = finish.scale.shape[0]
    tile = min(_TOKENS, -(-num // 8) * 8)
    steps = -(-num // tile)
    pad = ((0, steps * tile - num), (0, 0))
    values, logits = jnp.pad(values, pad), jnp.pad(logits, pad)
    decode = pieces.of_token is None
    num_entries = pieces.row.shape[0]
    room = num_entries if num_entries <= _ENTRIES else -(-num_entries // _ENTRIES) * _ENTRIES
    room = max(-(-room // 16) * 16, steps * tile if decode else 0)

    info, scalars = _plan(pieces, row_slot, row_position, states.shape[0], num, tile, steps, ratio)
    cos, sin = (jnp.pad(x, ((0, room - num_entries), (0, 0))) for x in _tables(finish))
    whole = lambda *shape: pl.BlockSpec(shape, lambda i, *_: (0,) * len(shape))  # noqa: E731
    tokens = pl.BlockSpec((tile, channels), lambda i, *_: (i, 0))
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    entries, states = pl.pallas_call(
        functools.partial(
            _kernel, ratio=ratio, overlap=overlap, decode=decode, width=width, eps=finish.eps, chunk=min(_ENTRIES, room)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps,),
            in_specs=[
                pl.BlockSpec((8, tile), lambda i, *_: (0, i)),
                tokens,
                tokens,
                whole(1, width),
                whole(*cos.shape),
                whole(*sin.shape),
                hbm,
            ],
            out_specs=[whole(room, width), hbm],
            scratch_shapes=[
                pltpu.VMEM((tile, 3 * channels), jnp.float32),
                pltpu.VMEM((tile, width), jnp.float32),
                pltpu.VMEM((room, width), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((room, width), dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={len(scalars) + 6: 1},
        compiler_params=None if target.interpret else pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=_cost(values, row_slot.shape[0], num_entries * width * jnp.dtype(dtype).itemsize, ratio),
        interpret=target.interpret,
        name="compress",
    )(*scalars, info, values, logits, finish.scale.astype(jnp.float32)[None], cos, sin, states)
    return entries[:num_entries], states


def _plan(
    pieces: Pieces,
    row_slot: jax.Array,
    row_position: jax.Array,
    slots: int,
    num: int,
    tile: int,
    steps: int,
    ratio: int,
) -> tuple[jax.Array, list[jax.Array]]:
    """What the kernel knows of each token [8, steps * tile] (all rows alike): eight times the tokens since its piece or
    the grid step began, and flags: 1, it is the first of its row or of the step; 2, its window began before it; 4, its
    row has a window before this one. And scalars: the rows' slots, first and last tokens, the pieces' last tokens, and
    which rows begin, rows end and pieces end before each step [3, steps + 1]."""
    total = steps * tile
    token = jnp.arange(total, dtype=jnp.int32)
    used = row_slot < slots
    midst = pieces.first & (jnp.take(row_position, pieces.row, mode="clip") % ratio != 0)
    of_piece = 2 * midst + 4 * (pieces.window > 0)
    if pieces.of_token is None:
        last_token = row_last = token[: row_slot.shape[0]]
        info = jnp.pad(of_piece + 1, (0, total - of_piece.shape[0]))
        row_last = jnp.where(used, row_last, total)
        row_first = row_last
    else:
        last_token = pieces.last_token
        begin = jnp.concatenate([jnp.zeros(1, jnp.int32), last_token[:-1] + 1])
        row_last = jnp.where(used, jnp.take(last_token, pieces.last_of_row, mode="clip"), total)
        row_first = jnp.where(used, jnp.concatenate([jnp.zeros(1, jnp.int32), row_last[:-1] + 1]), total)
        of_token = jnp.pad(pieces.of_token, (0, total - num), constant_values=pieces.row.shape[0])
        real = of_token < pieces.row.shape[0]
        packed = jnp.stack([begin, of_piece + pieces.first])
        begin, flags = jnp.take(packed, of_token, axis=1, mode="clip")
        goes_on = token > begin  # so its window began before it, and it begins no row
        first_of_step = token % tile == 0
        flags = jnp.where(goes_on, flags & 4 | 2 | first_of_step, flags | first_of_step)
        since = token - jnp.maximum(begin, token // tile * tile)
        info = jnp.where(real, 8 * since + flags, 0)
    starts = jnp.arange(steps + 1, dtype=jnp.int32)[:, None] * tile
    before = jnp.stack([jnp.sum(x < starts, axis=1, dtype=jnp.int32) for x in (row_first, row_last, last_token)])
    scalars = [jnp.where(used, row_slot, 0), row_first, row_last, last_token, before]
    return jnp.broadcast_to(info.astype(jnp.int32), (8, total)), [x.astype(jnp.int32) for x in scalars]


def _tables(finish: Finish) -> tuple[jax.Array, jax.Array]:
    """[NP, 128] what the last channels and their neighbours in a pair are multiplied by."""
    rest = ((0, 0), (LANES - 2 * finish.cos.shape[1], 0))
    signed = jnp.stack([-finish.sin, finish.sin], axis=2).reshape(finish.sin.shape[0], -1)
    return jnp.pad(jnp.repeat(finish.cos, 2, axis=1), rest, constant_values=1), jnp.pad(signed, rest)


def _kernel(slots, row_first, row_last, last_token, before, info, values, logits, scale, cos, sin, *refs, **static):
    _, entries, states, sums, pooled, gathered, semaphores = refs
    step, last_step = pl.program_id(0), pl.num_programs(0) - 1
    tile, base = sums.shape[0], step * sums.shape[0]

    if not static["decode"]:  # where a row goes on, its first token takes what the last one before has left

        @pl.when(step > 0)
        def _():
            sums[pl.ds(0, 1)] = sums[pl.ds(tile - 1, 1)]

    def each(which: int, do) -> None:
        """do(i) for the rows that begin (0) or end (1), or the pieces that end (2), in this step."""

        def body(i, carry):
            do(i)
            return carry

        lax.fori_loop(before[which, step], before[which, step + 1], body, 0)

    def read(r):
        return pltpu.make_async_copy(
            states.at[pl.ds(slots[r], 1)], sums.at[pl.ds(row_first[r] - base, 1)], semaphores.at[0]
        )

    def write(r):
        return pltpu.make_async_copy(
            sums.at[pl.ds(row_last[r] - base, 1)], states.at[pl.ds(slots[r], 1)], semaphores.at[1]
        )

    each(0, lambda r: read(r).start())
    each(0, lambda r: read(r).wait())
    _pool(info[...].T[:, :1], values, logits, sums, pooled, static)
    each(1, lambda r: write(r).start())
    if static["decode"]:
        gathered[pl.ds(base, tile)] = pooled[...]
    else:

        def gather(p):
            gathered[pl.ds(p, 1)] = pooled[pl.ds(last_token[p] - base, 1)]

        each(2, gather)
    each(1, lambda r: write(r).wait())

    @pl.when(step == last_step)
    def _():
        _finish(gathered, scale, cos, sin, entries, static)


def _pool(info, values, logits, sums, pooled, static) -> None:
    """Replaces the sums that tokens begin with by those they leave, and pools them, 128 channels at a time."""
    channels, width = values.shape[1], static["width"]
    since, first, midst, has_before = info >> 3, info & 1 != 0, info & 2 != 0, info & 4 != 0

    def scan(x: Sum) -> Sum:
        shift = 1
        while shift < min(static["ratio"], values.shape[0]) and not static["decode"]:
            x = merge(x, where(since >= shift, _down(x, shift)))
            shift *= 2
        return x

    def slab(i, carry):
        lanes = [pl.ds(pl.multiple_of(i * LANES + k * width, LANES), LANES) for k in range(channels // width)]
        parts = [
            [pl.ds(pl.multiple_of(i * LANES + k * width + j * channels, LANES), LANES) for j in range(3)]
            for k in range(channels // width)
        ]

        def tokens(k) -> Sum:
            x = logits[:, lanes[k]]
            return Sum(x, jnp.ones_like(x), values[:, lanes[k]])

        def held(k) -> Sum:
            return Sum(*(sums[:, part] for part in parts[k]))

        def keep(k, x: Sum) -> None:
            for part, array in zip(parts[k], x, strict=True):
                sums[:, part] = array

        a_held = held(0)
        a = scan(merge(tokens(0), where(first & midst, a_held)))
        if static["overlap"]:
            last_a = where(has_before, where(first, a_held, _down(a, 1)))
            begins = where(midst, where(first, held(1)), last_a)
            e = scan(merge(tokens(1), begins))
            keep(1, e)
        else:
            e = a
        keep(0, a)
        pooled[:, lanes[0]] = e.total / e.denominator
        return carry

    lax.fori_loop(0, width // LANES, slab, 0)


def _down(x: Sum, shift: int) -> Sum:
    """Each token's is the one of `shift` tokens before."""
    return Sum(*(pltpu.roll(array, shift, axis=0) for array in x))


def _finish(gathered, scale, cos, sin, entries, static) -> None:
    chunk, width = static["chunk"], static["width"]

    def body(i, carry):
        rows = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        x = gathered[rows]
        x = x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + static["eps"]) * scale[...]
        if width > LANES:
            entries[rows, : width - LANES] = x[:, : width - LANES].astype(entries.dtype)
        x = x[:, width - LANES :]
        odd = lax.broadcasted_iota(jnp.int32, x.shape, 1) % 2 == 1
        pair = jnp.where(odd, pltpu.roll(x, 1, axis=1), pltpu.roll(x, LANES - 1, axis=1))
        entries[rows, width - LANES :] = (x * cos[rows] + pair * sin[rows]).astype(entries.dtype)
        return carry

    lax.fori_loop(0, gathered.shape[0] // chunk, body, 0)


def _cost(values: jax.Array, rows: int, entry_bytes: int, ratio: int) -> pl.CostEstimate:
    rounds = max(1, (ratio - 1).bit_length())
    return pl.CostEstimate(
        flops=12 * rounds * values.size,
        bytes_accessed=2 * values.size * 4 + entry_bytes + 2 * rows * 3 * values.shape[1] * 4,
        transcendentals=2 * rounds * values.size,
    )
