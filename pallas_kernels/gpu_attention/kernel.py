"""The Mosaic GPU kernel of attention: keys streamed from pages or gathered one by one, for blocks of a row's queries.

A block of threads is up to 64 of a block's (query, head) pairs, its rows: one query of a model with 64 heads, eight
where a device has 8 of them. It reads the keys its queries see and no others, 32 at a time: pages (or parts of one) and
gathered entries alike arrive in a ring of shared-memory buffers while earlier ones are attended to. In a prompt, too,
entries chosen of a long context are gathered, found in the queries' masks: a thirtieth of them may be what is needed.
What bounds the speed is reading each key once a block of threads, at decode from memory, in a prompt mostly from L2,
where the blocks of other heads and queries have it.

A warpgroup makes the logits of its part of a chunk's keys, all share them through shared memory, and each adds up its
part of the width: the sum over keys [rows, width] in float32 would not fit the registers of one. The matmuls are
`mma` (warp level), which Hopper and Blackwell both have. The sink is where the softmax starts: a key without a value.

Shared memory for 64 rows of width 512 in bfloat16: queries 64 KiB, buffers 128 to 144 KiB, logits and weights 12 KiB.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.blocks import Pages
from pallas_kernels.gpu_attention import codes
from pallas_kernels.gpu_attention.keys import CHUNK, Keys, together
from pallas_kernels.gpu_attention.softmax import COLUMNS, FLOOR, Seen, Softmax
from pallas_kernels.gpu_attention.stream import Stream
from pallas_kernels.online_softmax import Running
from pallas_kernels.target import Target

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

_MAX_WIDTH = 512  # whose buffers fit shared memory, and whose sums the registers


def supports(q: jax.Array, pages: list[Pages], target: Target) -> bool:
    """Whether the kernel takes these: widths of 128 to 512, bfloat16, int8 or fp8 pages of 8, 16 or 32 k entries, any
    decode step, and blocks of queries whose number of heads divides 64 or is divided by it.

    Float32 too where it is interpreted, for exact comparisons.
    """
    _, block, heads, width = q.shape
    dtypes = (jnp.bfloat16, jnp.float32) if target.interpret else (jnp.bfloat16,)
    return (
        target.has_gpu_kernels
        and _rows(block, heads) > 0
        and width % (2 * COLUMNS) == 0
        and width <= _MAX_WIDTH
        and q.dtype in dtypes
        and all(p.pool.values.dtype == q.dtype or codes.supports(p.pool.format) for p in pages)
        and all(p.entries_per_page in (8, 16) or p.entries_per_page % CHUNK == 0 for p in pages)
    )


def _rows(block: int, heads: int) -> int:
    """Rows of a block of threads: a part of one query's, or those of several queries; 0 if that cannot be."""
    if block == 1:
        return 64 if heads > 32 else 32 if heads > 16 else 16
    fits = (m for m in (64, 32, 16) if block * heads % m == 0 and (m % heads == 0 or heads % m == 0))
    return next(fits, 0)


def attend(
    q: jax.Array,  # [NB, B, N, H]
    segments: list[Keys],
    sink: jax.Array,  # [N]
    *,
    scale: float,
    target: Target,
    partial: bool,
) -> jax.Array | Running:
    """[NB, B, N, H] float32 with the sinks; `partial`: what this device's keys make of the softmax, [NB, B, N, ...]."""
    num_blocks, block, heads, width = q.shape
    rows = _rows(block, heads)
    threads = 2 if rows > 16 else 1
    num_queries = max(1, rows // heads) if block > 1 else 1  # of a block of threads
    segments = [together(keys, num_queries) for keys in segments]
    used = block * heads
    groups = -(-used // rows)
    pad = ((0, 0), (0, groups * rows - used))
    queries = jnp.pad(q.reshape(num_blocks, used, width), (*pad, (0, 0)))
    if partial:
        start = jnp.full((1, used), FLOOR, jnp.float32), jnp.zeros((1, used), jnp.float32)
    else:
        start = jnp.tile(sink.astype(jnp.float32), block)[None], jnp.ones((1, used), jnp.float32)
    start = [jnp.pad(x, pad)[0] for x in start]
    ranges = jnp.stack([x for keys in segments for x in (keys.begin, keys.end)], axis=2).astype(jnp.int32)
    arrays = [{"index": k.index, "arrays": k.arrays, "mask": k.mask} for k in segments]
    flat, tree = jax.tree.flatten(arrays)

    shapes = [jax.ShapeDtypeStruct((num_blocks, groups * rows, *last), jnp.float32) for last in ((width,), (), ())]
    tiles = (plgpu.TilingTransform((8, 128 // q.dtype.itemsize)), plgpu.SwizzleTransform(128))
    geometry = tuple(keys.geometry for keys in segments)
    rings = sorted({g.ring for g in geometry if not g.tiled}, key=str)
    tiled_slots = 4 if not rings else 2  # room for 32 KiB each
    scratch = {
        "queries": plgpu.SMEM((rows, width), q.dtype, transforms=tiles),
        "keys": plgpu.SMEM((tiled_slots, CHUNK, width), q.dtype, transforms=tiles),
        "rings": plgpu.RefUnion(*([plgpu.SMEM(*x) for x in ring] for ring in rings)) if rings else None,
        "logits": plgpu.SMEM((rows, CHUNK), jnp.float32),
        "weights": plgpu.SMEM((rows, CHUNK), q.dtype),
        "chosen": [
            plgpu.SMEM((g.ring[0][0][0], CHUNK), jnp.int32) if k.mask is not None and num_queries > 1 else None
            for k, g in zip(segments, geometry, strict=True)
        ],
        "begin": plgpu.SMEM((len(segments), threads, rows), jnp.int32),
        "end": plgpu.SMEM((len(segments), threads, rows), jnp.int32),
        "queries_here": plgpu.Barrier(),
        "keys_here": [
            plgpu.Barrier(num_arrivals=g.num_copies, num_barriers=tiled_slots if g.tiled else g.ring[0][0][0])
            for g in geometry
        ],
        "together": plgpu.Barrier(num_arrivals=threads),
    }
    constants: dict[str, Any] = {
        "geometry": geometry,
        "rings": [None if g.tiled else rings.index(g.ring) for g in geometry],
        "heads": heads if block > 1 else groups * rows,
        "threads": threads,
        "scale": scale,
        "interpret": target.interpret,
    }

    def paged_attention(*refs):
        num_in = 4 + len(flat)
        _kernel(refs[:4], jax.tree.unflatten(tree, refs[4:num_in]), refs[num_in:-1], refs[-1], **constants)

    out = plgpu.kernel(
        paged_attention,
        out_type=shapes if partial else shapes[:1],
        scratch_types=[scratch],
        grid=(num_blocks, groups),
        grid_names=("block", "group"),
        num_threads=threads,
        thread_name="warpgroup",
        # With layouts written out: inferring them takes minutes.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=cost(q, segments),
        interpret=plgpu.InterpretGPUParams() if target.interpret else None,
    )(ranges, queries, *start, *flat)
    total, *rest = (x[:, :used].reshape(num_blocks, block, heads, -1) for x in out)
    return Running(rest[0], rest[1], total) if partial else total


def _kernel(inputs, arrays, outs, scratch, *, geometry, rings, heads, threads, scale, interpret):
    ranges, q, start_maximum, start_denominator = inputs
    block, group, thread = (lax.axis_index(name) for name in ("block", "group", "warpgroup"))
    num_rows = scratch["queries"].shape[0]
    rows = pl.ds(group * num_rows, num_rows)
    queries = [lax.div(group * num_rows, heads) + i for i in range(max(1, num_rows // heads))]
    softmax = Softmax(scratch, heads, threads, thread, scale, interpret)

    @pl.when(thread == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q.at[block, rows], scratch["queries"], scratch["queries_here"])

    plgpu.barrier_wait(scratch["queries_here"])
    streams = []
    for n, segment in enumerate(arrays):
        begins, ends = ([ranges[block, query, 2 * n + i] for query in queries] for i in range(2))
        mask, chosen = segment["mask"], scratch["chosen"][n]
        seen = Seen(
            first=functools.reduce(jnp.minimum, begins),
            last=functools.reduce(jnp.maximum, ends),
            begin=softmax.keep(scratch["begin"].at[n], begins),
            end=softmax.keep(scratch["end"].at[n], ends),
            chosen=chosen,
        )
        keys, ring = scratch["keys"], [] if rings[n] is None else scratch["rings"][rings[n]]
        stream = Stream(
            geometry=geometry[n],
            index=segment["index"].at[block],
            mask=None if mask is None else mask.at[block],
            queries=queries,
            arrays=segment["arrays"],
            begin=seen.first,
            end=seen.last,
            ring=[keys] if rings[n] is None else ring,
            keys=keys if geometry[n].coded or rings[n] is None else ring[0],
            chosen=chosen,
            arrived=scratch["keys_here"][n],
            leads=thread == 0,
            own=softmax.own,
        )
        streams.append((stream, seen))
    state = softmax.start(start_maximum.at[rows], start_denominator.at[rows])
    for n, (stream, seen) in enumerate(streams):
        if n:
            softmax.read_all()  # the last buffers of the segment before
        state = stream.run(functools.partial(softmax.add, seen=seen), state)
    softmax.finish(state, [out.at[block, rows] for out in outs])


def cost(q: jax.Array, segments: list[Keys]) -> pl.CostEstimate:
    """Upper bounds from the shapes: a block sees all the keys it may, which are read from memory once for all of it."""
    num_blocks, block, _, width = q.shape
    keys = sum(s.most for s in segments)
    key_bytes = sum(s.most * s.geometry.entry_bytes for s in segments)
    index_bytes = sum(4 * (s.most if s.listed else -(-s.most // s.geometry.epp)) for s in segments)
    index_bytes += sum(4 * block * s.mask.shape[2] for s in segments if s.mask is not None)
    return pl.CostEstimate(
        flops=4 * q.size * keys,
        bytes_accessed=q.size * (q.dtype.itemsize + 4) + num_blocks * (key_bytes + index_bytes),
        transcendentals=q.size // width * keys,
    )
