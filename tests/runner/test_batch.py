"""A plan written by hand, and exactly the arrays it becomes."""

import numpy as np
import pytest

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.manager import NO_BOUNDARY, RequestCache
from dsjax.cache.spec import EntryKind
from dsjax.request import Request, SamplingParams
from dsjax.runner.batch import PENDING, Layout, pack
from dsjax.runner.buckets import Bucket
from dsjax.runner.sampling import SlotParams
from dsjax.scheduler.plan import RowPlan, Rows
from pallas_kernels.cache_write import NOWHERE
from tests.cache.specs import cache_spec

# window 8 in pages of 8; CSA: 4 tokens an entry, 8 entries a page; HCA: 8 tokens an entry, 2 entries a page
SPEC = cache_spec(num_seqs=4, budget=32, max_model_len=64)
TABLES = {kind: np.zeros((4, SPEC.kinds[kind].table_width), np.int32) for kind in SPEC.pool_kinds}  # of all slots
NO_PAGE = {kind: SPEC.kinds[kind].num_pages for kind in SPEC.pool_kinds}


def row(name, slot, tokens, start, end, tables, *, num_pending=0, num_shared=0, num_prompt=None, **params):
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    req = Request(
        request_id=name,
        prompt_token_ids=list(tokens[:num_prompt]),
        params=SamplingParams(**params),
        token_ids=list(tokens),
        num_pending=num_pending,
        seed=(7 << 32) + 5,
    )
    for kind in SPEC.pool_kinds:
        table = TABLES[kind][slot]
        table.fill(NO_PAGE[kind])
        for index, page in tables[kind].items():
            table[index % SPEC.kinds[kind].table_width] = page
    cache = RequestCache(
        request_id=name,
        slot=slot,
        num_cached=0,
        num_shared=num_shared,
        num_computed=start,
        slot_tables=TABLES,
        pages={},
        window={},
        hashes=UnitHashes("", SPEC.unit_tokens),
        caches_prefix=False,
        num_promised=end,
        boundary=NO_BOUNDARY,
    )
    samples = end == req.num_tokens
    return RowPlan(request=req, cache=cache, start=start, num_new=end - start, samples=samples, first_of_stay=True)


def packed(bucket, *rows):
    layout, slots, columns = Layout(bucket, SPEC), SlotParams(4), Rows.of(rows)
    slots.begin(columns)
    host = pack(layout, columns, slots)
    return layout.views(host.ints, layout.ints), layout.views(host.floats, layout.floats)


def test_a_chunk_and_a_decode_row():
    pages = {EntryKind.WINDOW: {0: 5, 1: 9}, EntryKind.CSA: {0: 2}, EntryKind.HCA: {0: 4}}
    chunk = row("chunk", 3, range(100, 120), 6, 11, pages, temperature=0)
    decode = row(
        "decode", 1, range(30, 45), 15, 16, {EntryKind.WINDOW: {1: 7}, EntryKind.CSA: {0: 3}, EntryKind.HCA: {0: 6}},
        num_pending=1, num_prompt=10, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, presence_penalty=1.0, seed=5,
    )  # fmt: skip
    a, f = packed(Bucket(16, 4, 4), chunk, decode)
    pad = [0] * 10
    assert a["num_tokens"] == 6
    assert a["token_ids"].tolist() == [106, 107, 108, 109, 110, PENDING, *pad]
    assert a["token_row"].tolist() == [0] * 5 + [1, *pad]
    assert a["positions"].tolist() == [6, 7, 8, 9, 10, 15, *pad]
    # window page 0 is page 5, page 1 is page 9 (chunk) or 7 (decode)
    assert a["window_slot"].tolist() == [5 * 8 + 6, 5 * 8 + 7, 9 * 8, 9 * 8 + 1, 9 * 8 + 2, 7 * 8 + 7] + [NOWHERE] * 10
    assert a["row_slot"].tolist() == [3, 1, NOWHERE, NOWHERE]
    assert a["row_position"].tolist() == [6, 15, 0, 0]
    assert a["row_last"].tolist() == [4, 5, 0, 0]
    assert a["samples"].tolist() == [0, 1, 0, 0]
    # blocks of 4 queries: 4 + 1 of the chunk, 1 of the decode row, and unused ones
    num_blocks = Bucket(16, 4, 4).num_blocks
    unused = [0] * (num_blocks - 3)
    assert a["block_row"].tolist() == [0, 0, 1, *unused]
    assert a["block_position"].tolist() == [6, 10, 15, *unused]
    assert a["block_length"].tolist() == [4, 1, 1, *unused]
    assert a["block_token"].tolist()[:3] == [[0, 1, 2, 3], [4, 16, 16, 16], [5, 16, 16, 16]]
    assert (a["block_token"][3:] == 16).all()
    assert a["token_block"].tolist()[:6] == [0, 1, 2, 3, 4, 8]
    # CSA windows of 4 tokens: 6-7 ends window 1, 8-10 begins window 2; token 15 ends window 3
    num = Bucket(16, 4, 4).num_pieces(4)
    rest = num - 3
    assert a["csa.row"].tolist() == [0, 0, 1] + [4] * rest
    assert a["csa.window"].tolist() == [1, 2, 3] + [0] * rest
    assert a["csa.first"].tolist() == [1, 0, 1] + [0] * rest
    assert a["csa.complete"].tolist() == [1, 0, 1] + [0] * rest
    assert a["csa.entry_slot"].tolist() == [2 * 8 + 1, NOWHERE, 3 * 8 + 3] + [NOWHERE] * rest
    assert a["csa.last_of_row"].tolist() == [1, 2, 0, 0]
    assert a["csa.of_token"].tolist() == [0, 0, 1, 1, 1, 2] + [num] * 10
    # HCA windows of 8 tokens: 6-7 ends window 0, 8-10 begins window 1; token 15 ends window 1
    assert a["hca.window"].tolist()[:3] == [0, 1, 1]
    assert a["hca.entry_slot"].tolist()[:3] == [4 * 2, NOWHERE, 6 * 2 + 1]
    assert a["csa.table"].tolist()[0] == [2] + [NO_PAGE[EntryKind.CSA]] * (SPEC.kinds[EntryKind.CSA].table_width - 1)
    # sampling: of rows that draw
    assert a["flags"].tolist() == [1, 1, 1, 0, 0, 0]  # random, filter, penalties
    assert a["seed"].tolist() == [[0, 0], [5, 7], [0, 0], [0, 0]]
    assert a["top_k"].tolist() == [0, 0, 0, 0]
    assert f["temperature"].tolist() == [0, 0.5, 0, 0]
    assert f["top_p"].tolist() == pytest.approx([1, 0.9, 1, 1])
    assert f["min_p"].tolist() == pytest.approx([0, 0.1, 0, 0])
    assert f["presence_penalty"].tolist() == [0, 1, 0, 0]
    assert f["repetition_penalty"].tolist() == [1, 1, 1, 1]


def test_entries_that_exist_already_are_not_stored_again():
    tables = {EntryKind.WINDOW: {0: 0, 1: 1}, EntryKind.CSA: {0: 2}, EntryKind.HCA: {0: 4}}
    a, _ = packed(Bucket(16, 4, 4), row("r", 0, range(16), 0, 12, tables, num_shared=8))
    assert a["csa.complete"].tolist()[:3] == [1, 1, 1]
    assert a["csa.entry_slot"].tolist()[:3] == [NOWHERE, NOWHERE, 2 * 8 + 2]
    assert a["hca.entry_slot"].tolist()[:2] == [NOWHERE, NOWHERE]


def test_a_decode_bucket_has_one_piece_and_one_block_a_row():
    tables = {EntryKind.WINDOW: {0: 0}, EntryKind.CSA: {0: 2}, EntryKind.HCA: {0: 4}}
    rows = [row(f"r{i}", i, range(4 + i), 3 + i, 4 + i, tables) for i in range(3)]
    a, _ = packed(Bucket(4, 4, 1), *rows)
    assert a["positions"].tolist() == [3, 4, 5, 0]
    assert a["csa.row"].tolist() == [0, 1, 2, 4]
    assert a["csa.window"].tolist() == [0, 1, 1, 0]
    assert a["csa.complete"].tolist() == [1, 0, 0, 0]
    assert a["csa.entry_slot"].tolist() == [16, NOWHERE, NOWHERE, NOWHERE]
    assert a["csa.last_of_row"].tolist() == [0, 1, 2, 0]
    assert a["block_length"].tolist() == [1, 1, 1, 0]
    assert a["block_token"].tolist() == [[0], [1], [2], [4]]
    assert "csa.of_token" not in a


def test_a_decode_step_that_goes_on_takes_its_tokens_from_the_slots_that_drew_them():
    tables = {EntryKind.WINDOW: {0: 0}, EntryKind.CSA: {0: 2}, EntryKind.HCA: {0: 4}}
    layout, slots = Layout(Bucket(2, 2, 1), SPEC), SlotParams(4)

    def token_ids(*rows, begins=False):
        columns = Rows.of([plan._replace(first_of_stay=begins) for plan in rows])
        slots.begin(columns)
        return layout.views(pack(layout, columns, slots).ints, layout.ints)["token_ids"].tolist()

    def rows(start, num_pending=0):
        return [row(f"r{i}", i, range(10, 11 + start - num_pending), start, start + 1, tables, num_pending=num_pending)
                for i in range(2)]  # fmt: skip

    assert token_ids(*rows(3), begins=True) == [13, 13]  # the slots may have drawn another's
    assert token_ids(*rows(4, num_pending=1)) == [PENDING, PENDING]
    assert token_ids(*rows(5)) == [PENDING, PENDING]  # though they are known
    assert token_ids(rows(6)[0]) == [16, 0]
    assert token_ids(*rows(3), begins=True) == [13, 13]


def test_what_is_asked_of_logprobs_and_bias():
    tables = {EntryKind.WINDOW: {0: 0}, EntryKind.CSA: {0: 2}, EntryKind.HCA: {0: 4}}
    prompt = row("p", 0, range(50, 60), 0, 6, tables, prompt_logprobs=1, logprobs=2, temperature=0)
    a, _ = packed(Bucket(16, 4, 4), prompt)
    assert a["next_token"].tolist()[:6] == [51, 52, 53, 54, 55, 56]
    assert a["flags"].tolist() == [0, 0, 0, 0, 0, 1]  # it does not draw yet
    whole = row("p", 0, range(50, 56), 0, 6, tables, prompt_logprobs=1, logprobs=2, min_tokens=1, temperature=0)
    a, f = packed(Bucket(16, 4, 4), whole)
    assert a["next_token"].tolist()[:6] == [51, 52, 53, 54, 55, 0]
    assert a["flags"].tolist() == [0, 0, 0, 1, 1, 1]
    assert f["use_bias"].tolist() == [1, 0, 0, 0]
