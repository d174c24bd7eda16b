"""Random plans, packed all rows at once, against the same arrays written token by token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dsjax.cache.spec import EntryKind
from dsjax.runner.batch import PENDING, HostBatch, Layout, pack
from dsjax.runner.buckets import Bucket
from dsjax.runner.sampling import SlotParams
from dsjax.scheduler.plan import RowPlan, Rows
from pallas_kernels.cache_write import NOWHERE
from tests.runner.test_batch import SPEC, packed, row


def random_row(rng: random.Random, slot: int, is_decode: bool) -> RowPlan:
    num_tokens = rng.randint(1, 60)
    start = num_tokens - 1 if is_decode else rng.randrange(num_tokens)
    end = rng.randint(start + 1, num_tokens)
    num_pending = int(end == num_tokens > 1 and rng.random() < 0.5)
    kinds = {kind: SPEC.kinds[kind] for kind in SPEC.pool_kinds}
    tables = {kind: {i: rng.randrange(k.num_pages) for i in range(k.table_width)} for kind, k in kinds.items()}
    return row(
        f"r{slot}",
        slot,
        [rng.randrange(200) for _ in range(num_tokens - num_pending)],
        start,
        end,
        tables,
        num_pending=num_pending,
        num_shared=rng.randrange(40),
        temperature=rng.choice([0.0, 0.5]),
        top_p=rng.choice([1.0, 0.5]),
    )


def expected(bucket: Bucket, rows: list[RowPlan]) -> dict[str, np.ndarray]:
    """The arrays of ints, one token after another; those of the sampling parameters left out."""
    layout = Layout(bucket, SPEC)
    a = layout.views(np.zeros(layout.num_ints, np.int32), layout.ints)
    for name, fill in {"window_slot": NOWHERE, "row_slot": NOWHERE, "block_token": bucket.num_tokens}.items():
        a[name].fill(fill)
    for kind in SPEC.compressed_kinds:
        pieces = bucket.num_pieces(SPEC.kinds[kind].ratio)
        fills = {"row": bucket.num_rows, "entry_slot": NOWHERE, "last_token": bucket.num_tokens, "of_token": pieces}
        for name, fill in fills.items():
            if f"{kind.value}.{name}" in a:
                a[f"{kind.value}.{name}"].fill(fill)
    token, block, piece = 0, -1, dict.fromkeys(SPEC.compressed_kinds, -1)
    for r, plan in enumerate(rows):
        ids, tables = plan.request.token_ids, plan.cache.tables
        a["row_slot"][r], a["row_position"][r], a["samples"][r] = plan.cache.slot, plan.start, plan.samples
        for kind, table in tables.items():
            a[f"{kind.value}.table"][r] = table
        for position in range(plan.start, plan.end):
            a["token_ids"][token] = ids[position] if position < len(ids) else PENDING
            a["next_token"][token] = ids[position + 1] if position + 1 < len(ids) else 0
            a["token_row"][token], a["positions"][token] = r, position
            window = SPEC.kinds[EntryKind.WINDOW]
            page, entry = divmod(position, window.entries_per_page)
            page = tables[EntryKind.WINDOW][page % window.table_width]
            a["window_slot"][token] = page * window.entries_per_page + entry
            within = (position - plan.start) % bucket.block
            if within == 0:
                block += 1
                a["block_row"][block], a["block_position"][block] = r, position
            a["block_length"][block] += 1
            a["block_token"][block, within], a["token_block"][token] = token, block * bucket.block + within
            for kind in SPEC.compressed_kinds:
                spec, name = SPEC.kinds[kind], kind.value
                entry, offset = divmod(position, spec.ratio)
                if position == plan.start or offset == 0:
                    piece[kind] += 1
                    a[f"{name}.first"][piece[kind]] = position == plan.start
                    a[f"{name}.row"][piece[kind]], a[f"{name}.window"][piece[kind]] = r, entry
                if offset == spec.ratio - 1:
                    a[f"{name}.complete"][piece[kind]] = 1
                    if entry >= plan.cache.num_shared // spec.ratio:
                        page, within_page = divmod(entry, spec.entries_per_page)
                        a[f"{name}.entry_slot"][piece[kind]] = tables[kind][page] * spec.entries_per_page + within_page
                a[f"{name}.last_token"][piece[kind]], a[f"{name}.last_of_row"][r] = token, piece[kind]
                if not bucket.is_decode:
                    a[f"{name}.of_token"][token] = piece[kind]
            a["row_last"][r] = token
            token += 1
    a["num_tokens"][...] = token
    order = sorted(range(block + 1), key=lambda b: a["block_length"][b] == 1)  # blocks of one query come last
    for name in ("block_row", "block_position", "block_length", "block_token"):
        a[name][: block + 1] = a[name][order]
    nth, within = np.divmod(a["token_block"][:token], bucket.block)
    a["token_block"][:token] = np.array([order.index(b) for b in nth], int) * bucket.block + within
    return a


@pytest.mark.parametrize("seed", range(20))
def test_all_rows_at_once_are_each_token_by_itself(seed: int):
    rng = random.Random(seed)
    is_decode = seed % 2 == 0
    bucket = Bucket(4, 4, 1) if is_decode else Bucket(240, 4, 16)
    rows = [random_row(rng, slot, is_decode) for slot in rng.sample(range(4), rng.randint(0, 4))]
    actual, _ = packed(bucket, *rows)
    for name, array in expected(bucket, rows).items():
        if name not in ("top_k", "seed", "flags"):
            assert actual[name].tolist() == array.tolist(), name


@pytest.mark.parametrize("seed", range(10))
def test_steps_that_begin_from_the_one_before_are_as_packed_anew(seed: int):
    rng = random.Random(seed)
    layout, slots = Layout(Bucket(4, 4, 1), SPEC), SlotParams(4)
    plans = [random_row(rng, slot, is_decode=True) for slot in rng.sample(range(4), 3)]
    for step in range(40):
        if rng.random() < 0.1:  # one comes in another's place, with parameters of its own
            r = rng.randrange(3)
            plans[r] = random_row(rng, plans[r].cache.slot, is_decode=True)
        rows = Rows.of(plans)
        slots.begin(rows)
        ints, floats = pack(layout, rows, slots)
        anew = pack_anew(layout, rows)
        assert ints.tolist() == anew.ints.tolist() and floats.tolist() == anew.floats.tolist(), step
        plans = [row._replace(start=row.start + 1, first_of_stay=False) for row in plans if row.start < 63]
        if len(plans) < 3:
            break


def pack_anew(layout: Layout, rows: Rows) -> HostBatch:
    slots = SlotParams(4)
    slots.begin(Rows.of([row._replace(first_of_stay=True) for row in rows]))
    return pack(layout, rows, slots)
