"""CSA attention on a TPU: decode rows gather their entries one by one, blocks stream them under a mask.

A decode row's k entries lie anywhere, so each comes by a DMA of its own, in chunks of which one is on its way while the
other is attended to; what bounds the speed is how many such copies the chip keeps in flight. Entries are [4, 128] in
memory: a row of 512 in one line could not be copied alone (its offset is not a whole tile). The window's pages are
streamed first. A block of a prompt's queries shares its entries, so there it is cheaper to read each page once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target
from pallas_kernels.tpu_attention import attend
from pallas_kernels.tpu_softmax import LANES, Softmax, as_keys, stream

CHUNK = 64  # entries of a gather in one buffer
_UNROLL = 8  # copies started in one turn of the loop


def csa_attention(
    q: jax.Array,
    blocks: QueryBlocks,
    window_pages: Pages,
    entry_pages: Pages,
    chosen: jax.Array,
    sink: jax.Array,
    *,
    window: int,
    ratio: int,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    """As `tpu_attention.attend`; `chosen` [NB, k] for B = 1, those in use first."""
    common = {"window": window, "ratio": ratio, "scale": scale, "target": target}
    if q.shape[1] > 1:
        return attend(q, blocks, window_pages, entry_pages, chosen, sink, **common, partial=partial)
    run = attend(q, blocks, window_pages, None, None, sink, **common, partial=True)
    assert isinstance(run, Running)
    return _gather(q, blocks, entry_pages, chosen, sink, run, scale=scale, target=target, partial=partial)


def _gather(
    q: jax.Array,  # [NB, 1, N, H]
    blocks: QueryBlocks,
    pages: Pages,
    chosen: jax.Array,  # [NB, k]
    sink: jax.Array,
    run: Running,  # the window's part, [NB, 1, N, ...]
    *,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    num_blocks, _, heads, width = q.shape
    k = chosen.shape[1]
    count, slot = pages.chosen(blocks, chosen)
    padded = -(-k // CHUNK) * CHUNK
    slot = jnp.pad(slot, ((0, 0), (0, padded - k)))[:, None]  # [NB, 1, k]; those past `count` copy entry 0 of the pool
    pool = pages.pool.values.reshape(-1, *pages.pool.values.shape[2:])

    row = pl.BlockSpec((1, heads, width), lambda i, _: (i, 0, 0))
    lanes = pl.BlockSpec((1, heads, LANES), lambda i, _: (i, 0, 0))
    shapes = [jax.ShapeDtypeStruct((num_blocks, heads, n), jnp.float32) for n in (width, LANES, LANES)]
    before = [
        run.total.reshape(num_blocks, heads, width),
        *(jnp.broadcast_to(x.reshape(num_blocks, heads, 1), (num_blocks, heads, LANES)) for x in run[:2]),
    ]
    kernel = functools.partial(_kernel, scale=scale, partial=partial)
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks,),
            in_specs=[
                pl.BlockSpec((1, 1, padded), lambda i, _: (i, 0, 0), memory_space=pltpu.SMEM),
                row,
                pl.BlockSpec((heads, 1), lambda i, _: (0, 0)),
                row,
                lanes,
                lanes,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[row, lanes, lanes] if partial else [row],
            scratch_shapes=[
                pltpu.VMEM((2, CHUNK, *pool.shape[1:]), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                *Softmax.scratch(heads, width),
            ],
        ),
        out_shape=shapes if partial else shapes[:1],
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * k,
            bytes_accessed=q.size * (q.dtype.itemsize + 8) + num_blocks * k * (width * pool.dtype.itemsize + 4),
            transcendentals=num_blocks * heads * k,
        ),
        interpret=target.interpret,
        name="gathered_attention",
    )(count, slot, q[:, 0], sink.astype(jnp.float32)[:, None], *before, pool)
    if not partial:
        return out[0].reshape(q.shape)
    total, maximum, denominator = (x[:, None] for x in out)
    return Running(maximum[..., :1], denominator[..., :1], total)


def _kernel(counts, slots, q_ref, sink_ref, total, maximum, denominator, pool, *rest, scale, partial):
    outs, (buffer, semaphores, *state) = rest[: 3 if partial else 1], rest[3 if partial else 1 :]
    softmax = Softmax(*state)
    count = counts[pl.program_id(0)]
    softmax.total[...], softmax.maximum[...], softmax.denominator[...] = total[0], maximum[0], denominator[0]
    q = q_ref[0]

    def dma(chunk, half, j):
        slot = slots[0, 0, chunk * CHUNK + j]
        return pltpu.make_async_copy(pool.at[slot], buffer.at[half, j], semaphores.at[half])

    class Copies:
        """CHUNK copies that are started and waited for in loops."""

        def __init__(self, chunk, half):
            self.chunk, self.half = chunk, half

        def _each(self, do):
            def body(j, carry):
                do(dma(self.chunk, self.half, j))
                return carry

            lax.fori_loop(0, CHUNK, body, 0, unroll=_UNROLL)

        def start(self):
            self._each(lambda copy: copy.start())

        def wait(self):
            self._each(lambda copy: copy.wait())

    def use(chunk, half):
        keys = as_keys(buffer[half], q.dtype)
        left = count - chunk * CHUNK
        keys = jnp.where(lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < left, keys, jnp.zeros_like(keys))
        mask = lax.broadcasted_iota(jnp.int32, (q.shape[0], CHUNK), 1) < left
        softmax.add(q, keys, mask, scale)

    stream(jnp.int32(0), (count + CHUNK - 1) // CHUNK, lambda chunk, half: [Copies(chunk, half)], use)
    if partial:
        for out, value in zip(outs, (softmax.total, softmax.maximum, softmax.denominator), strict=True):
            out[0] = value[...]
    else:
        outs[0][0] = softmax.finish(sink_ref[...])
