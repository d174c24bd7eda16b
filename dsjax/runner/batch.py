"""Packs a step plan into the arrays a compiled step takes: two flat vectors, so that dispatch passes few arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.model.batch import ForwardBatch
from dsjax.runner import sampling
from dsjax.runner.buckets import Bucket
from dsjax.runner.sampling import SamplingBatch
from dsjax.scheduler.plan import RowPlan
from pallas_kernels.blocks import QueryBlocks
from pallas_kernels.cache_write import NOWHERE
from pallas_kernels.compress import Pieces

PENDING = -1  # in token_ids: the id is the slot's last sampled token, still on the device


class Layout:
    """Names and shapes of the arrays inside the two vectors, for one bucket."""

    def __init__(self, bucket: Bucket, spec: CacheSpec):
        t, r, nb, b = bucket.num_tokens, bucket.num_rows, bucket.num_blocks, bucket.block
        self.bucket, self.spec = bucket, spec
        self.ints: dict[str, tuple[int, ...]] = {
            "token_ids": (t,),
            "token_row": (t,),
            "positions": (t,),
            "window_slot": (t,),
            "next_token": (t,),
            "num_tokens": (),
            "row_slot": (r,),
            "row_position": (r,),
            "row_last": (r,),
            "block_row": (nb,),
            "block_position": (nb,),
            "block_length": (nb,),
            "block_token": (nb, b),
            "token_block": (t,),
            "samples": (r,),
            "top_k": (r,),
            "seed": (r, 2),
        }
        for kind in spec.pool_kinds:
            self.ints[f"{kind.value}.table"] = (r, spec.kinds[kind].table_width)
        for kind in spec.compressed_kinds:
            pieces = bucket.num_pieces(spec.kinds[kind].ratio)
            for name in ("row", "window", "first", "complete", "entry_slot", "last_token"):
                self.ints[f"{kind.value}.{name}"] = (pieces,)
            self.ints[f"{kind.value}.last_of_row"] = (r,)
            if not bucket.is_decode:
                self.ints[f"{kind.value}.of_token"] = (t,)
        self.ints["flags"] = (len(sampling.FLAGS),)  # last, see `flags`
        self.floats = {name: (r,) for name in sampling.FLOATS}
        self.num_ints = sum(math.prod(shape) for shape in self.ints.values())
        self.num_floats = sum(math.prod(shape) for shape in self.floats.values())

    def flags(self, ints: np.ndarray) -> np.ndarray:
        """The flags of packed vectors [..., num_ints], writable."""
        return ints[..., self.num_ints - len(sampling.FLAGS) :]

    def views(self, vector, shapes: dict[str, tuple[int, ...]]) -> dict:
        """Cuts a vector (numpy: writable views; jax: slices) into its named arrays."""
        out, offset = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            out[name] = vector[offset : offset + size].reshape(shape)
            offset += size
        return out


class HostBatch(NamedTuple):
    ints: np.ndarray
    floats: np.ndarray


def pack(layout: Layout, rows: Sequence[RowPlan]) -> HostBatch:
    """The numpy side: one pass over the rows, perhaps none."""
    bucket, spec = layout.bucket, layout.spec
    ints, floats = np.zeros(layout.num_ints, np.int32), np.zeros(layout.num_floats, np.float32)
    a, f = layout.views(ints, layout.ints), layout.views(floats, layout.floats)
    a["window_slot"].fill(NOWHERE)
    a["row_slot"].fill(NOWHERE)
    a["block_token"].fill(bucket.num_tokens)
    for kind in spec.compressed_kinds:
        a[f"{kind.value}.row"].fill(bucket.num_rows)
        a[f"{kind.value}.entry_slot"].fill(NOWHERE)
        a[f"{kind.value}.last_token"].fill(bucket.num_tokens)
        if not bucket.is_decode:
            a[f"{kind.value}.of_token"].fill(a[f"{kind.value}.row"].shape[0])
    window = spec.kinds[EntryKind.WINDOW]
    token = block = 0
    num_pieces = dict.fromkeys(spec.compressed_kinds, 0)
    for r, row in enumerate(rows):
        n, span = row.num_new, slice(token, token + row.num_new)
        position = np.arange(row.start, row.end, dtype=np.int32)
        known = row.request.token_ids[row.start : row.end]
        a["token_ids"][span] = known if len(known) == n else [*known, PENDING]
        a["token_row"][span] = r
        a["positions"][span] = position
        a["row_slot"][r], a["row_position"][r], a["row_last"][r] = row.cache.slot, row.start, token + n - 1
        for kind in spec.pool_kinds:
            a[f"{kind.value}.table"][r] = row.cache.tables[kind]
        epp = window.entries_per_page
        page = row.cache.tables[EntryKind.WINDOW][(position // epp) % window.table_width]
        a["window_slot"][span] = page * epp + position % epp
        blocks = -(-n // bucket.block)
        of_row = slice(block, block + blocks)
        first = np.arange(blocks, dtype=np.int32) * bucket.block
        a["block_row"][of_row] = r
        a["block_position"][of_row] = row.start + first
        a["block_length"][of_row] = np.minimum(n - first, bucket.block)
        grid = first[:, None] + np.arange(bucket.block, dtype=np.int32)
        a["block_token"][of_row] = np.where(grid < n, token + grid, bucket.num_tokens)
        a["token_block"][span] = block * bucket.block + np.arange(n)
        for kind in spec.compressed_kinds:
            num_pieces[kind] += _pack_pieces(a, kind, layout, row, r, token, num_pieces[kind])
        token, block = token + n, block + blocks
    a["num_tokens"][...] = token
    SamplingBatch.pack(a, f, rows)
    return HostBatch(ints, floats)


def _pack_pieces(a: dict, kind: EntryKind, layout: Layout, row, r: int, token: int, piece: int) -> int:
    """Fills the pieces of one row and kind; returns how many there are."""
    spec = layout.spec.kinds[kind]
    first, last = row.start // spec.ratio, (row.end - 1) // spec.ratio
    window = np.arange(first, last + 1, dtype=np.int32)
    span = slice(piece, piece + window.size)
    complete = (window + 1) * spec.ratio <= row.end
    # entries below num_shared are in shared pages already: recomputing must not store them twice
    store = complete & (window >= row.cache.num_shared // spec.ratio)
    pages = row.cache.tables[kind][np.minimum(window // spec.entries_per_page, spec.table_width - 1)]
    slot = pages * spec.entries_per_page + window % spec.entries_per_page
    name = kind.value
    a[f"{name}.row"][span] = r
    a[f"{name}.window"][span] = window
    a[f"{name}.first"][piece] = 1
    a[f"{name}.complete"][span] = complete
    a[f"{name}.entry_slot"][span] = np.where(store, slot, NOWHERE)
    a[f"{name}.last_token"][span] = token + np.minimum((window + 1) * spec.ratio, row.end) - row.start - 1
    a[f"{name}.last_of_row"][r] = piece + window.size - 1
    if not layout.bucket.is_decode:
        a[f"{name}.of_token"][token : token + row.num_new] = piece + np.arange(row.start, row.end) // spec.ratio - first
    return window.size


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
        blocks=QueryBlocks(a["block_row"], a["block_position"], a["block_length"]),
        block_token=a["block_token"],
        token_block=a["token_block"],
        window_slot=a["window_slot"],
        tables={kind: a[f"{kind.value}.table"] for kind in layout.spec.pool_kinds},
        pieces=pieces,
    )
    return batch, SamplingBatch.unpack(a, f)
