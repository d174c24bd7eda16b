"""Scores and selection of index keys on a TPU, in one kernel: no score ever leaves fast memory.

A grid step is a block of queries. It streams the pages that the block's last query sees through two buffers, a chunk of
pages at a time, and keeps the scores as int32 of the same order; the first chunk of the next block is on its way while
this one's are selected from. A block none of whose queries sees more than k entries reads no key.

The k-th largest score of every query is found by its bits, most significant first: a pass over the scores in fast
memory settles `digit` bits by counting how many scores reach each of 2 ** digit - 1 candidates. Entries equal to it are
taken up to an index that is found in the same way, and only where there are too many.

A block's mask goes out as one int32 an entry, a bit a query. A decode row's mask is turned into indices: entries lie
[G, 128], so that which group of 128 the j-th chosen entry is in follows from the groups' running counts, and its place
there from the group's row of the mask, which one matmul with a one-hot matrix brings to lane j: k / (64 * heads) of the
scoring's work. A decode row is bound by the bytes of its keys, a block of a prompt by the matrix unit.

Where several devices share the pages the kernel makes the scores of those here; the choice among all devices' best
ones is the jnp path's.

Fast memory: scores 4 B a query and entry (a block of 16 and 32,768 entries, a context of 131,072 tokens: 2 MiB).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.entry_format import LANES
from pallas_kernels.indexer_topk import reference, tuning
from pallas_kernels.indexer_topk.tpu_scores import LOWEST, Scores, Sizes, entries_of, floats_of
from pallas_kernels.target import Target

_VMEM_LIMIT = 60 << 20  # of 64 MiB a core on v5p and tpu7x
_ROW, _POSITION, _LENGTH, _PAGES, _BEGIN, _OFFSET, _INDEX = range(7)  # of the scalars


def indexer_topk(
    q: jax.Array, weights: jax.Array, blocks: QueryBlocks, pages: Pages, *, ratio: int, k: int, target: Target
) -> jax.Array:
    """As `api.indexer_topk`, for more than k entries."""
    num_blocks, block, heads, width = q.shape
    shared = pages.count > 1
    if block > 32:
        raise ValueError(f"indexer_topk: a block of {block} queries is more than the 32 bits of an entry's mask")
    epp = pages.entries_per_page
    sizes = Sizes(
        block,
        heads,
        epp,
        math.lcm(epp, tuning.CHUNK),
        ratio,
        k,
        tuning.digit_bits(block),
        pages.max_entries,
        pages.pool.format,
        pages.count,
    )
    chunks = -(-pages.max_entries // sizes.chunk)
    tiles = chunks * sizes.chunk // sizes.tile
    rows = block * heads
    table = pages.table[:, None]  # [R, 1, P]
    pools = [x for x in (pages.pool.values, pages.pool.side) if x is not None]
    lanes_of_k = -(-k // LANES) * LANES
    out = (tiles, sizes.rows, LANES) if shared else (1, lanes_of_k) if block == 1 else (tiles, LANES)

    def table_of(ahead: int) -> pl.BlockSpec:
        def index(i, scalars):
            return scalars[_ROW, jnp.minimum(i + ahead, num_blocks - 1)], 0, 0

        return pl.BlockSpec((1, 1, table.shape[2]), index, memory_space=pltpu.SMEM)

    # A group of 128 runs of entries is compacted at a time.
    score_tiles = -(-tiles // 16) * 16 if block == 1 else tiles
    result = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks,),
            in_specs=[
                table_of(0),
                table_of(1),
                pl.BlockSpec((1, rows, width), lambda i, _: (i, 0, 0)),
                pl.BlockSpec((1, block, heads), lambda i, _: (i, 0, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in pools),
            ],
            out_specs=pl.BlockSpec((1, *out), lambda i, _: (i, *[0] * len(out))),
            scratch_shapes=[
                [pltpu.VMEM((2, sizes.pages, *pool.shape[1:]), pool.dtype) for pool in pools],
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                *([] if shared else [pltpu.VMEM((score_tiles, sizes.rows, LANES), jnp.int32)]),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_blocks, *out), jnp.int32),
        compiler_params=None if target.interpret else pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT),
        cost_estimate=_cost(q, weights, pages, out),
        interpret=target.interpret,
        name="indexer_topk",
    )(_scalars(blocks, pages, sizes), table, table, q.reshape(num_blocks, rows, width), weights, *pools)
    if shared:
        scores = result if block == 1 else result.swapaxes(1, 2)
        scores = scores.reshape(num_blocks, block, -1)[..., : pages.max_entries]
        return reference.best_of_all(floats_of(scores), pages, k)
    if block == 1:
        return result[:, 0, :k]
    return result  # bits, as chosen.pack makes them


def _scalars(blocks: QueryBlocks, pages: Pages, sizes: Sizes) -> jax.Array:
    """[7, NB] int32: row, position, length; pages to score; chunks of the blocks before; first page of the layer; the
    device's index among those that share the pages."""
    seen = jnp.where(blocks.length > 0, lax.div(blocks.position + blocks.length, sizes.ratio), 0)
    num_pages = jnp.where(seen > sizes.k, -(-pages.num_here(seen) // sizes.epp), 0)
    chunks = -(-num_pages // sizes.pages)
    offset = jnp.full_like(seen, pages.layer * pages.num_pages)
    index = jnp.full_like(seen, pages.index)
    scalars = [blocks.row, blocks.position, blocks.length, num_pages, jnp.cumsum(chunks) - chunks, offset, index]
    return jnp.stack([x.astype(jnp.int32) for x in scalars])


def _cost(q: jax.Array, weights: jax.Array, pages: Pages, out: tuple[int, ...]) -> pl.CostEstimate:
    """Upper bounds from the shapes: every entry the tables can name is visible."""
    num_blocks, _, _, width = q.shape
    pools = [x for x in (pages.pool.values, pages.pool.side) if x is not None]
    page_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in pools)
    key_bytes = num_blocks * pages.table.shape[1] * page_bytes
    table_bytes = num_blocks * pages.table.shape[1] * 4
    out_bytes = num_blocks * math.prod(out) * 4
    return pl.CostEstimate(
        flops=(2 * width + 2) * weights.size * pages.max_entries,
        bytes_accessed=q.size * q.dtype.itemsize + weights.size * 4 + key_bytes + table_bytes + out_bytes,
        transcendentals=0,
    )


def _kernel(scalars, table, next_table, q, weights, *refs, sizes: Sizes):
    num_pools = 1 + sizes.form.quantised
    pools, (out, buffers, wide, semaphores, *scratch) = refs[:num_pools], refs[num_pools:]
    scores = scratch[0] if scratch else out.at[0]
    i, last_block = pl.program_id(0), pl.num_programs(0) - 1
    position, length, num_pages, begin = (scalars[n, i] for n in (_POSITION, _LENGTH, _PAGES, _BEGIN))
    num_chunks = lax.div(num_pages + (sizes.pages - 1), sizes.pages)
    query = lax.broadcasted_iota(jnp.int32, (sizes.rows, LANES), 0) if sizes.block > 1 else 0
    visible = jnp.where(query < length, lax.div(position + query + 1, sizes.ratio), 0)
    if sizes.count > 1:  # those that are here
        visible = lax.div(visible + (sizes.count - 1 - scalars[_INDEX, i]), sizes.count)

    def each_copy(block, table, chunk, do: Callable[[Any], None]) -> None:
        """Of a block's chunk."""
        slot = lax.rem(scalars[_BEGIN, block] + chunk, 2)
        first = chunk * sizes.pages

        def body(n, carry):
            page = table[0, 0, first + n] + scalars[_OFFSET, block]
            for pool, buffer in zip(pools, buffers, strict=True):
                do(pltpu.make_async_copy(pool.at[page], buffer.at[slot, n], semaphores.at[slot]))
            return carry

        lax.fori_loop(0, jnp.minimum(sizes.pages, scalars[_PAGES, block] - first), body, 0)

    def start(copy) -> None:
        copy.start()

    def wait(copy) -> None:
        copy.wait()

    making = Scores(q, wide, scores, visible, sizes)
    before, after = jnp.maximum(i - 1, 0), jnp.minimum(i + 1, last_block)

    @pl.when((num_chunks > 0) & ((i == 0) | (scalars[_PAGES, before] == 0)))
    def _() -> None:  # nobody has started it
        each_copy(i, table, 0, start)

    def score(chunk, carry):
        @pl.when(chunk + 1 < num_chunks)
        def _() -> None:
            each_copy(i, table, chunk + 1, start)

        @pl.when((chunk + 1 == num_chunks) & (i < last_block))
        def _() -> None:
            each_copy(after, next_table, 0, start)

        each_copy(i, table, chunk, wait)
        making.add(chunk, [buffer.at[lax.rem(begin + chunk, 2)] for buffer in buffers])
        return carry

    @pl.when(num_chunks > 0)
    def _() -> None:
        making.start(weights)
        lax.fori_loop(0, num_chunks, score, 0)

    if not scratch:
        making.fill(num_chunks, out.shape[1])
        return

    @pl.when(num_chunks > 0)
    def _() -> None:
        threshold, limit = _Best(scores, num_chunks, sizes).find()

        def chosen(tile, entry):
            return ((tile > threshold) | ((tile == threshold) & (entry < limit))) & (entry < visible)

        _write(out, scores, num_chunks, chosen, sizes)

    @pl.when(num_chunks == 0)
    def _() -> None:
        _write_everything(out, visible, sizes)


class _Best:
    """Finds each query's k-th largest score. All values are [rows, 128], the same for all of a query's lanes."""

    def __init__(self, scores, num_chunks, sizes: Sizes):
        self.scores, self.num_chunks, self.sizes = scores, num_chunks, sizes

    def find(self) -> tuple[jax.Array, jax.Array]:
        """The k-th largest score, and the entry before which those equal to it are chosen."""
        k, shape = self.sizes.k, (self.sizes.rows, LANES)
        threshold = self.search(
            32, jnp.full(shape, LOWEST, jnp.int32), lambda tile, _, candidates: tile >= candidates, lambda n: n >= k
        )
        above, equal = self.count(2, lambda tile, _: jnp.stack([tile > threshold, tile == threshold]))
        spare = k - above

        def among_equal() -> jax.Array:
            bits = self.sizes.max_entries.bit_length()
            return self.search(
                bits,
                jnp.zeros(shape, jnp.int32),
                lambda tile, entry, candidates: (tile == threshold) & (entry < candidates),
                lambda n: n <= spare,
            )

        tied = jnp.max(jnp.where((equal > spare) & (threshold > LOWEST), 1.0, 0.0)) > 0
        return threshold, lax.cond(tied, among_equal, lambda: jnp.full(shape, self.sizes.max_entries, jnp.int32))

    def search(self, bits: int, start: jax.Array, test, holds) -> jax.Array:
        """The largest start + x, x of `bits` bits, for which `holds`(how many scores pass `test`); for less it does."""
        digit = self.sizes.digit
        passes, num = -(-bits // digit), (1 << digit) - 1
        steps = lax.broadcasted_iota(jnp.int32, (num, *start.shape), 0) + 1

        def body(n, value):
            shift = digit * (passes - 1 - n)
            candidates = value + (steps << shift)
            held = holds(self.count(num, lambda tile, entry: test(tile, entry, candidates)))
            return value + (jnp.sum(held.astype(jnp.int32), axis=0) << shift)

        return lax.fori_loop(0, passes, body, start)

    def count(self, num: int, test) -> jax.Array:
        """[num, rows, 128] how many of a query's scores pass each of the `num` tests of test(tile, entries)."""
        tiles = self.sizes.chunk // self.sizes.tile

        def body(chunk, total):
            for n in range(tiles):
                number = chunk * tiles + n
                total += test(self.scores[number], entries_of(number, self.sizes)).astype(jnp.int32)
            return total

        total = lax.fori_loop(0, self.num_chunks, body, jnp.zeros((num, self.sizes.rows, LANES), jnp.int32))
        every = jnp.sum(total.astype(jnp.float32), axis=2, keepdims=True)
        if self.sizes.block == 1:
            every = jnp.sum(every, axis=1, keepdims=True)
        return jnp.broadcast_to(every, total.shape).astype(jnp.int32)


def _write(out, scores, num_chunks, chosen, sizes: Sizes) -> None:
    if sizes.block == 1:
        _write_indices(out, scores, num_chunks, chosen, sizes)
        return
    out[0] = jnp.zeros(out.shape[1:], jnp.int32)
    tiles = sizes.chunk // sizes.tile

    def body(chunk, carry):
        for n in range(tiles):
            number = chunk * tiles + n
            _write_bits(out, number, chosen(scores[number], entries_of(number, sizes)))
        return carry

    lax.fori_loop(0, num_chunks, body, 0)


def _write_bits(out, number, mask) -> None:
    query = lax.broadcasted_iota(jnp.int32, mask.shape, 0)
    bits = jnp.where(mask, jnp.int32(1) << query, 0)
    out[0, pl.ds(number, 1)] = jnp.sum(bits, axis=0, keepdims=True)


def _write_indices(out, scores, num_chunks, chosen, sizes: Sizes) -> None:
    """The chosen entries in ascending order. Groups are 128 entries; 128 groups are taken at a time."""
    k = out.shape[2]
    place = lax.broadcasted_iota(jnp.int32, (1, k), 1).astype(jnp.float32)
    square = (LANES, LANES)
    up_to = lax.broadcasted_iota(jnp.int32, square, 1) <= lax.broadcasted_iota(jnp.int32, square, 0)
    up_to = up_to.astype(jnp.bfloat16)  # [n, m]: m <= n
    dot = functools.partial(lax.dot_general, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
    tiles = LANES * LANES // sizes.tile

    def body(n, state):
        total, groups, before, rows = state
        mask = jnp.concatenate(
            [chosen(scores[n * tiles + m], entries_of(n * tiles + m, sizes)) for m in range(tiles)]
        ).astype(jnp.bfloat16)  # [groups, entries]
        count = jnp.sum(mask.astype(jnp.float32), axis=1, keepdims=True)
        end = total + jnp.sum(dot(up_to, mask, (((1,), (0,)), ((), ()))), axis=1, keepdims=True)  # [groups, 1]
        past = end <= place  # [groups, k]
        here = jnp.logical_not(past) & (end - count <= place)
        groups += jnp.sum(past.astype(jnp.float32), axis=0, keepdims=True)
        before += jnp.sum(jnp.where(past, count, 0.0), axis=0, keepdims=True)
        rows += dot(mask, here.astype(jnp.bfloat16), (((0,), (0,)), ((), ())))  # each place's group: [entries, k]
        return total + jnp.sum(count), groups, before, rows

    zero = jnp.zeros((1, k), jnp.float32)
    num = lax.div(num_chunks * (sizes.chunk // sizes.tile) + (tiles - 1), tiles)
    total, groups, before, rows = lax.fori_loop(
        0, num, body, (jnp.float32(0), zero, zero, jnp.zeros((LANES, k), jnp.float32))
    )
    counts = dot(up_to, rows.astype(jnp.bfloat16), (((1,), (0,)), ((), ())))
    in_group = jnp.sum((counts <= place - before).astype(jnp.float32), axis=0, keepdims=True)
    index = (groups * LANES + in_group).astype(jnp.int32)
    out[0] = jnp.where(place < total, index, sizes.max_entries)


def _write_everything(out, visible, sizes: Sizes) -> None:
    if sizes.block == 1:
        place = lax.broadcasted_iota(jnp.int32, out.shape[1:], 1)
        out[0] = jnp.where(place < visible, place, sizes.max_entries)
        return
    out[0] = jnp.zeros(out.shape[1:], jnp.int32)

    def body(number, carry):
        _write_bits(out, number, entries_of(number, sizes) < visible)
        return carry

    lax.fori_loop(0, min(-(-sizes.k // LANES), out.shape[1]), body, 0)
