"""Packs a step plan into the arrays a compiled step takes: two flat vectors, so that dispatch passes few arguments."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.cache.spec import CacheSpec, EntryKind, KindSpec
from dsjax.model.batch import ForwardBatch
from dsjax.runner import sampling
from dsjax.runner.buckets import Bucket
from dsjax.runner.sampling import DecodeStep, SamplingBatch, SlotParams
from dsjax.scheduler.plan import Rows
from pallas_kernels.blocks import Packing, QueryBlocks
from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.compress import Pieces

PENDING = -1  # in token_ids: the id is the slot's last sampled token, still on the device


class HostBatch(NamedTuple):
    ints: np.ndarray
    floats: np.ndarray


class Layout:
    """Names and shapes of the arrays inside the two vectors, for one bucket."""

    def __init__(self, bucket: Bucket, spec: CacheSpec):
        t, r, nb, b = bucket.num_tokens, bucket.num_rows, bucket.num_blocks, bucket.block
        self.bucket, self.spec = bucket, spec
        self.ints: dict[str, tuple[int, ...]] = {
            "token_ids": (t,),
            "token_row": (t,),
            "next_token": (t,),
            "num_tokens": (),
            "row_slot": (r,),
            "row_last": (r,),
            "positions": (t,),  # with the next two, see `decode_positions`
            "row_position": (r,),
            "block_position": (nb,),
            "block_row": (nb,),
            "block_length": (nb,),
            "block_token": (nb, b),
            "token_block": (t,),
            "samples": (r,),
            "top_k": (r,),
            "seed": (r, 2),
        }
        for kind in spec.pool_kinds:
            self.ints[f"{kind.value}.table"] = (r, spec.kinds[kind].table_width)
        pieces = {kind.value: (bucket.num_pieces(spec.kinds[kind].ratio),) for kind in spec.compressed_kinds}
        for kind, shape in pieces.items():
            self.ints |= dict.fromkeys((f"{kind}.row", f"{kind}.first", f"{kind}.last_token"), shape)
            self.ints[f"{kind}.last_of_row"] = (r,)
            if not bucket.is_decode:
                self.ints[f"{kind}.of_token"] = (t,)
        # From here on, see `decode_entries`.
        self.ints |= {f"{kind}.window": shape for kind, shape in pieces.items()}
        self.ints |= {f"{kind}.complete": shape for kind, shape in pieces.items()}
        self.ints["window_slot"] = (t,)
        self.ints |= {f"{kind}.entry_slot": shape for kind, shape in pieces.items()}
        self.ints["flags"] = (len(sampling.FLAGS),)  # last, see `flags`
        sizes = itertools.accumulate(map(math.prod, self.ints.values()), initial=0)
        self.offsets = dict(zip(self.ints, sizes, strict=False))
        self.floats = {name: (r,) for name in sampling.FLOATS}
        self.num_ints = sum(math.prod(shape) for shape in self.ints.values())
        self.num_floats = sum(math.prod(shape) for shape in self.floats.values())
        self.padding = self._padding()
        kinds = [spec.kinds[kind] for kind in spec.pool_kinds]
        sizes = [(k.ratio, k.ratio - 1, k.entries_per_page, k.table_width) for k in kinds]
        self.kind_sizes = np.array(sizes, np.int32).T[:, :, None]  # four columns [pool kinds, 1]

    def _padding(self) -> HostBatch:
        """A step without rows: padding is out of range, wherever something would be written to or read from."""
        ints, floats = np.zeros(self.num_ints, np.int32), np.zeros(self.num_floats, np.float32)
        a, f, bucket = self.views(ints, self.ints), self.views(floats, self.floats), self.bucket
        a["window_slot"].fill(NOWHERE)
        a["row_slot"].fill(NOWHERE)
        a["block_token"].fill(bucket.num_tokens)
        for kind in self.spec.compressed_kinds:
            a[f"{kind.value}.row"].fill(bucket.num_rows)
            a[f"{kind.value}.entry_slot"].fill(NOWHERE)
            a[f"{kind.value}.last_token"].fill(bucket.num_tokens)
            if not bucket.is_decode:
                a[f"{kind.value}.of_token"].fill(a[f"{kind.value}.row"].size)
        f["top_p"].fill(1)
        f["repetition_penalty"].fill(1)
        return HostBatch(ints, floats)

    def flags(self, ints: np.ndarray) -> np.ndarray:
        """The flags of packed vectors [..., num_ints], writable."""
        return ints[..., self.num_ints - len(sampling.FLAGS) :]

    def decode_positions(self, ints: np.ndarray) -> np.ndarray:
        """[3, R] of a decode step's packed vector: of tokens, rows and blocks, which are the same. Writable."""
        begin, num_rows = self.offsets["positions"], self.bucket.num_rows
        return ints[begin : begin + 3 * num_rows].reshape(3, num_rows)

    def decode_entries(self, ints: np.ndarray) -> np.ndarray:
        """[3 K + 1, R] of a decode step's packed vector: of its K compressed kinds, the window that each row's token is
        in, and whether it completes it; then of the window and those kinds, where the entry goes. Writable."""
        num, num_rows = 3 * len(self.spec.compressed_kinds) + 1, self.bucket.num_rows
        end = self.num_ints - len(sampling.FLAGS)
        return ints[end - num * num_rows : end].reshape(num, num_rows)

    def views(self, vector, shapes: dict[str, tuple[int, ...]]) -> dict:
        """Cuts a vector (numpy: writable views; jax: slices) into its named arrays."""
        out, offset = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            part = vector[offset : offset + size]
            out[name] = part if len(shape) == 1 else part.reshape(shape)
            offset += size
        return out


def pack(layout: Layout, rows: Rows, slots: SlotParams) -> HostBatch:
    """The numpy side: each array at once, for all rows of a data shard or micro-batch together; perhaps for none.

    `slots` is the shard's, and knows the rows' requests. The arrays are new ones, or never change.
    """
    if not rows:
        return layout.padding
    if layout.bucket.is_decode:
        return _pack_decode(layout, rows, slots)
    spec, num_rows, start, num_new = layout.spec, len(rows), rows.start, rows.num_new
    ints, floats = layout.padding.ints.copy(), layout.padding.floats.copy()
    a, f = layout.views(ints, layout.ints), layout.views(floats, layout.floats)
    a["row_slot"][:num_rows] = rows.slot
    a["row_position"][:num_rows] = start
    for kind in spec.pool_kinds:
        a[f"{kind.value}.table"][:num_rows] = _slot_tables(rows)[kind][rows.slot]
    slots.pack(a, f, rows)
    known = _token_ids(rows)
    a["token_ids"][: known.size] = known
    tokens, num_shared = _Runs(num_new), slots.num_shared[rows.slot]
    _pack_tokens(a, layout, tokens, start, num_new)
    for kind in spec.compressed_kinds:
        _pack_pieces(a, layout, kind, start, rows.end, num_shared, tokens)
    np.maximum(known[1:], 0, out=a["next_token"][: known.size - 1])
    a["next_token"][a["row_last"][:num_rows]] = _following(rows)
    return HostBatch(ints, floats)


def _pack_decode(layout: Layout, rows: Rows, slots: SlotParams) -> HostBatch:
    """A step in which token r is all there is of row r. What its slots say stands if the step before had the same."""
    step, slot, start = slots.decode_step, rows.slot, rows.start
    if step is None or step.bucket != layout.bucket or not rows.all_sample or not _same(step.slot, slot):
        step = _decode_step(layout, rows, slots)
        slots.decode_step = step if rows.all_sample else None
        ints, ids = step.ints.copy(), np.array(_last_ids(rows), np.int32)
    else:  # each slot drew its row's token, known by now or not
        ints, ids = step.ints.copy(), PENDING
    tables, num_rows, num_kinds = _slot_tables(rows), len(rows), len(layout.spec.compressed_kinds)
    ints[layout.offsets["token_ids"] :][:num_rows] = ids
    layout.decode_positions(ints)[:, :num_rows] = start
    for kind, begin, width in step.tables:
        into = ints[begin : begin + num_rows * width].reshape(num_rows, width)
        tables[kind].take(slot, axis=0, out=into, mode="clip")  # faster than "raise", which copies again
    # Of all kinds together, [kinds, rows]: numpy takes as long for one kind. An entry of the window is a token.
    ratio, last, per_page, width = layout.kind_sizes
    entry, part = np.divmod(start, ratio)
    page, within = np.divmod(entry, per_page)
    place = ints.take(step.table_begin + page % width) * per_page + within
    complete = part == last
    entries = layout.decode_entries(ints)[:, :num_rows]
    entries[:num_kinds] = entry[1:]
    entries[num_kinds : 2 * num_kinds] = complete[1:]
    entries[2 * num_kinds :] = np.where(complete & (entry >= step.first_new), place, NOWHERE)
    if layout.flags(step.ints)[-1]:
        layout.flags(ints)[-1] = slots.asks_of_prompts(rows)
    return HostBatch(ints, step.floats)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or np.array_equal(a, b)


def _decode_step(layout: Layout, rows: Rows, slots: SlotParams) -> DecodeStep:
    """What of a decode step does not change from one to the next of the same rows."""
    ints, floats, num_rows = layout.padding.ints.copy(), layout.padding.floats.copy(), len(rows)
    a, f = layout.views(ints, layout.ints), layout.views(floats, layout.floats)
    kinds = [kind.value for kind in layout.spec.compressed_kinds]
    each = [f"{kind}.{name}" for kind in kinds for name in ("row", "last_token", "last_of_row")]
    for name in ("token_row", "row_last", "block_row", "token_block", *each):
        a[name][:num_rows] = np.arange(num_rows)
    a["block_token"][:num_rows, 0] = np.arange(num_rows)
    for name in ("block_length", *(f"{kind}.first" for kind in kinds)):
        a[name][:num_rows] = 1
    a["num_tokens"][...] = num_rows
    a["row_slot"][:num_rows] = rows.slot
    a["next_token"][:num_rows] = _following(rows)
    slots.pack(a, f, rows)
    spec = layout.spec
    tables = [(kind, layout.offsets[f"{kind.value}.table"], spec.kinds[kind].table_width) for kind in spec.pool_kinds]
    begins = [begin + width * np.arange(num_rows, dtype=np.int32) for _, begin, width in tables]
    # Entries below num_shared are in shared pages already: recomputing must not store them twice.
    first_new = slots.num_shared[rows.slot] // layout.kind_sizes[0]
    first_new[0] = 0  # the window's are its own
    return DecodeStep(layout.bucket, rows.slot, ints, floats, tables, np.stack(begins), first_new)


def _slot_tables(rows: Rows) -> dict[EntryKind, np.ndarray]:
    """The page tables of all slots."""
    return rows.caches[0].slot_tables


def _slots(spec: KindSpec, table: np.ndarray, row: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Where in their pool the index-th entries of these rows of the table go; a window's table is a ring."""
    page, entry = np.divmod(index, spec.entries_per_page)
    return table[row, page % spec.table_width] * spec.entries_per_page + entry


def _pack_tokens(
    a: dict[str, np.ndarray], layout: Layout, tokens: _Runs, start: np.ndarray, num_new: np.ndarray
) -> None:
    """Where each token is, and its block of queries."""
    block, position = layout.bucket.block, tokens.counted + start[tokens.row]
    a["num_tokens"][...] = tokens.total
    a["token_row"][: tokens.total] = tokens.row
    a["positions"][: tokens.total] = position
    a["row_last"][: start.size] = tokens.first + num_new - 1
    window = layout.spec.kinds[EntryKind.WINDOW]
    slots = _slots(window, a[f"{EntryKind.WINDOW.value}.table"], tokens.row, position)
    a["window_slot"][: tokens.total] = slots
    blocks = _Runs(-(-num_new // block))
    begin = blocks.counted * block  # of the row's new tokens
    length = np.minimum(num_new[blocks.row] - begin, block)
    within = np.arange(block, dtype=np.int32)
    token = (tokens.first[blocks.row] + begin)[:, None] + within
    order = np.argsort(length == 1, kind="stable")  # of one query last: see pallas_kernels.groups
    a["block_row"][: blocks.total] = blocks.row[order]
    a["block_position"][: blocks.total] = (start[blocks.row] + begin)[order]
    a["block_length"][: blocks.total] = length[order]
    a["block_token"][: blocks.total] = np.where(within < length[:, None], token, layout.bucket.num_tokens)[order]
    place = np.empty_like(order)
    place[order] = np.arange(blocks.total)
    nth, within = np.divmod(tokens.counted, block)
    a["token_block"][: tokens.total] = place[blocks.first[tokens.row] + nth] * block + within


def _token_ids(rows: Rows) -> np.ndarray:
    """Of the rows' new tokens."""
    found: list[int] = []
    for request, start, end in zip(rows.requests, rows.start.tolist(), rows.end.tolist(), strict=True):
        token_ids = request.token_ids
        if start < len(token_ids):
            found += token_ids[start:end]
        if end > len(token_ids):
            found.append(PENDING)
    return np.array(found, np.int32)


def _last_ids(rows: Rows) -> list[int]:
    """Of rows that have one new token each."""
    starts = rows.start.tolist()
    return [
        token_ids[start] if start < len(token_ids) else PENDING
        for token_ids, start in zip([request.token_ids for request in rows.requests], starts, strict=True)
    ]


def _following(rows: Rows) -> int | list[int]:
    """The id after each row's last one; 0 where the step draws it."""
    if rows.all_sample:
        return 0
    return [0 if row.samples else row.request.token_ids[row.end] for row in rows]


class _Runs:
    """Of things that each row has some of, one row's after another's: [2, 3] is rows 0 0 1 1 1, counted 0 1 0 1 2."""

    def __init__(self, num: np.ndarray):
        past = np.cumsum(num, dtype=np.int32)
        self.total = int(past[-1])
        self.first = past - num  # [rows]
        self.row = np.repeat(np.arange(num.size, dtype=np.int32), num)
        self.counted = np.arange(self.total, dtype=np.int32) - self.first[self.row]


def _pack_pieces(
    a: dict[str, np.ndarray],
    layout: Layout,
    kind: EntryKind,
    start: np.ndarray,
    end: np.ndarray,
    num_shared: np.ndarray,
    tokens: _Runs,
) -> None:
    """The parts of compression windows of one kind that the new tokens [start, end) of the rows lie in."""
    spec, name = layout.spec.kinds[kind], kind.value
    first = start // spec.ratio
    pieces = _Runs((end - 1) // spec.ratio - first + 1)
    row, span = pieces.row, slice(pieces.total)
    window = first[row] + pieces.counted
    window_end = (window + 1) * spec.ratio
    complete = window_end <= end[row]
    # entries below num_shared are in shared pages already: recomputing must not store them twice
    store = complete & (window >= (num_shared // spec.ratio)[row])
    slot = _slots(spec, a[f"{name}.table"], row, window)
    a[f"{name}.row"][span] = row
    a[f"{name}.window"][span] = window
    a[f"{name}.first"][pieces.first] = 1
    a[f"{name}.complete"][span] = complete
    a[f"{name}.entry_slot"][span] = np.where(store, slot, NOWHERE)
    a[f"{name}.last_token"][span] = (tokens.first - start - 1)[row] + np.minimum(window_end, end[row])
    a[f"{name}.last_of_row"][: start.size] = pieces.first + (end - 1) // spec.ratio - first
    position = a["positions"][: tokens.total]
    a[f"{name}.of_token"][: tokens.total] = (pieces.first - first)[tokens.row] + position // spec.ratio


def unpack(
    layout: Layout, ints: jax.Array, floats: jax.Array, last_token: jax.Array
) -> tuple[ForwardBatch, SamplingBatch]:
    """The device side, inside the compiled step. `last_token` [num_slots] resolves PENDING ids."""
    a, f = layout.views(ints, layout.ints), layout.views(floats, layout.floats)
    slot_of_token = a["row_slot"][a["token_row"]]
    pending = jnp.take(last_token, slot_of_token, mode="clip")
    pieces = {}
    for kind in layout.spec.compressed_kinds:
        name = kind.value
        pieces[kind] = Pieces(
            of_token=None if layout.bucket.is_decode else a[f"{name}.of_token"],
            row=a[f"{name}.row"],
            window=a[f"{name}.window"],
            first=a[f"{name}.first"] != 0,
            complete=a[f"{name}.complete"] != 0,
            entry_slot=a[f"{name}.entry_slot"],
            last_token=a[f"{name}.last_token"],
            last_of_row=a[f"{name}.last_of_row"],
        )
    batch = ForwardBatch(
        token_ids=jnp.where(a["token_ids"] == PENDING, pending, a["token_ids"]),
        positions=a["positions"],
        num_tokens=a["num_tokens"],
        row_slot=a["row_slot"],
        row_position=a["row_position"],
        row_last=a["row_last"],
        blocks=QueryBlocks(
            a["block_row"], a["block_position"], a["block_length"], Packing(a["block_token"], a["token_block"])
        ),
        window_slot=a["window_slot"],
        tables={kind: a[f"{kind.value}.table"] for kind in layout.spec.pool_kinds},
        pieces=pieces,
    )
    return batch, SamplingBatch.unpack(a, f)
