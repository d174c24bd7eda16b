"""Which data shard a request runs on, and what shards share: one queue, in order, and nothing else."""

import pytest

from dsjax.cache.hashes import UnitHashes
from dsjax.cache.spec import EntryKind
from dsjax.request import Status
from dsjax.scheduler.placement import Candidate, preferred
from tests.fakes import assert_idle, check_caches, drain, fake_engine, preempt, request, tokens_of

NO_CACHE = {"enable_prefix_caching": False}  # no snapshots, so chunks end at the budget alone


def sent(engine):
    """The steps as {shard: [(id, start, new tokens)]}."""
    steps = []
    for step in engine.runner.sent:
        steps.append({})
        for row in step:
            steps[-1].setdefault(row.shard, []).append(row[:3])
    return steps


def where(engine):
    """{id: shard} of the running requests."""
    return {r.parent_id: r.shard for r in engine.scheduler.running}


@pytest.mark.parametrize(
    ("loads", "order"),
    [
        ([(50, 0.0, 0), (49, 0.9, 90)], [1, 0]),  # fewest tokens to compute, whatever the pages
        ([(50, 0.5, 10), (50, 0.4, 90)], [1, 0]),  # then the emptiest
        ([(50, 0.5, 11), (50, 0.5, 10)], [1, 0]),  # then where less of others' prefixes goes
        ([(50, 0.5, 10), (50, 0.5, 10)], [0, 1]),  # then the first
        ([(9, 0.0, 0), (7, 0.0, 0), (8, 0.0, 0)], [1, 2, 0]),
    ],
)
def test_order(loads, order):
    candidates = [Candidate(*load, index, num_cached=0, has_budget=True) for index, load in enumerate(loads)]
    assert preferred(candidates) == order


@pytest.mark.parametrize(
    ("shards", "order"),  # (tokens to compute, tokens cached, has budget)
    [
        ([(10, 40, False), (50, 0, True)], []),  # waits for the hit
        ([(10, 40, False), (50, 40, True)], [1]),  # no hit to wait for
        ([(10, 0, False), (50, 0, True)], [1]),  # nobody waits for load alone
        ([(60, 40, False), (50, 0, True)], [1]),  # waiting would take longer than computing the hit again
        ([(10, 40, False), (5, 8, True), (50, 0, True)], [1]),  # the third is worse than waiting, the second is not
        ([(10, 0, False), (10, 0, False)], []),
    ],
)
def test_whether_to_wait(shards, order):
    candidates = [
        Candidate(num_tokens, 0.0, 0, index, num_cached, has_budget)
        for index, (num_tokens, num_cached, has_budget) in enumerate(shards)
    ]
    assert preferred(candidates) == order


def test_candidate_counts_what_is_left_to_compute():
    engine = fake_engine(num_shards=2, max_num_batched_tokens=8)
    engine.add(request("a", range(100, 130), max_tokens=2))
    engine.step()
    new = request("b", range(100, 120))
    hashes = UnitHashes("", 8)
    found = [shard.candidate(new, hashes) for shard in engine.scheduler.shards]
    # shard 0: 30 - 8 of a, and 20 - 8 of b, whose first unit it has. It holds a page of each of its three pools.
    assert [(c.num_tokens, c.num_held, c.index) for c in found] == [(34, 3, 0), (20, 0, 1)]
    assert found[0].usage > found[1].usage == 0
    new = request("b", range(100, 120), prompt_logprobs=0)  # it must compute all of its prompt
    assert engine.scheduler.shards[0].candidate(new, hashes).num_tokens == 42


def test_requests_go_where_least_is_left_to_compute():
    engine = fake_engine(num_shards=2, cache=NO_CACHE, max_num_batched_tokens=16)
    for name, length in {"a": 30, "b": 10, "c": 4, "d": 20, "e": 5}.items():
        engine.add(request(name, [ord(name)] * length, max_tokens=2))
    drain(engine)
    # a has 30 tokens left, so b, then c go to the other shard; its budget is used up by d's first two tokens, and shard
    # 0 by a: e waits. In the next step the shards have 14 + 5 and 1 + 1 + 18 + 5 tokens with e.
    assert sent(engine)[:2] == [
        {0: [("a#0", 0, 16)], 1: [("b#0", 0, 10), ("c#0", 0, 4), ("d#0", 0, 2)]},
        {0: [("a#0", 16, 14), ("e#0", 0, 2)], 1: [("b#0", 10, 1), ("c#0", 4, 1), ("d#0", 2, 14)]},
    ]
    assert_idle(engine)


def test_decoding_rows_are_spread():
    engine = fake_engine(num_shards=4, cache=NO_CACHE)
    for i in range(6):
        engine.add(request(f"r{i}", [i] * 3, max_tokens=40))
        engine.step()
        engine.step()
    # the last two go where requests hold fewest pages: to the youngest
    assert where(engine) == {"r0": 0, "r1": 1, "r2": 2, "r3": 3, "r4": 2, "r5": 3}
    drain(engine)
    assert_idle(engine)


def test_each_shard_has_a_budget_and_slots_of_its_own():
    engine = fake_engine(num_shards=2, cache=NO_CACHE, max_num_seqs=2, max_num_batched_tokens=8)
    for name in "abcde":
        engine.add(request(name, [ord(name)] * 4, max_tokens=3))
    engine.step()
    assert sent(engine) == [{0: [("a#0", 0, 4), ("c#0", 0, 4)], 1: [("b#0", 0, 4), ("d#0", 0, 4)]}]
    stats = engine.stats()
    assert (stats.num_running, stats.num_running_per_shard, stats.num_waiting) == (4, (2, 2), 1)
    assert [request.slot for request in engine.scheduler.running] == [0, 1, 0, 1]
    events = drain(engine)
    assert tokens_of(events["e"]) == [102, 103, 104]
    assert_idle(engine)


def test_gauges_are_of_all_shards():
    engine = fake_engine(num_shards=2, cache=NO_CACHE, num_pages={EntryKind.CSA: 4})
    one = fake_engine(cache=NO_CACHE, num_pages={EntryKind.CSA: 4})
    for name, length in {"a": 30, "b": 3}.items():
        engine.add(request(name, [ord(name)] * length, max_tokens=3))
    engine.step()
    stats, spec = engine.stats(), engine.runner.spec
    assert stats.num_pages_total == 2 * one.stats().num_pages_total
    assert stats.kv_cache_usage == engine.caches[0].usage > engine.caches[1].usage > 0
    assert stats.num_pages_free == stats.num_pages_total - sum(c.num_total - c.num_free for c in engine.caches)
    assert spec.kinds[EntryKind.CSA].num_pages == 4  # a shard's, not the engine's
    drain(engine)
    assert_idle(engine)


# --- prefixes -------------------------------------------------------------------------------------


def test_a_prefix_is_used_where_it_is():
    engine = fake_engine(num_shards=2)
    engine.add(request("a", range(100, 140), max_tokens=1))
    engine.add(request("b", range(50, 90), max_tokens=1))
    drain(engine)
    for name, prompt, shard in (("c", range(50, 91), 1), ("d", range(100, 141), 0), ("e", range(50, 91), 1)):
        engine.runner.sent.clear()
        engine.runner.num_read = 0
        engine.add(request(name, prompt, max_tokens=1))
        events = drain(engine)
        assert sent(engine) == [{shard: [(f"{name}#0", 40, 1)]}]
        assert events[name][0].num_cached_tokens == 40
    assert_idle(engine)


@pytest.mark.parametrize(("load", "shard", "num_cached"), [(30, 0, 40), (60, 1, 0)])
def test_a_hit_is_given_up_when_the_work_before_it_is_more_than_it_saves(load, shard, num_cached):
    engine = fake_engine(num_shards=2, max_num_batched_tokens=16, cache={"num_snapshots": 32})
    engine.add(request("a", range(100, 140), max_tokens=1))
    drain(engine)
    engine.add(request("busy", [*range(100, 140), *[7] * load], max_tokens=2))
    engine.step()
    assert (where(engine), engine.scheduler.shards[0].num_tokens_left) == ({"busy": 0}, load - 8)
    engine.add(request("b", range(100, 145), max_tokens=2))
    for _ in range(2):  # the first step's budget is busy's, on shard 0
        engine.step()
        assert where(engine).get("b", 0) == shard
    assert drain(engine)["b"][0].num_cached_tokens == num_cached
    assert_idle(engine)


def test_siblings_follow_the_first_to_its_shard():
    engine = fake_engine(num_shards=2, max_num_batched_tokens=16)
    engine.add(request("x", [1] * 3, max_tokens=20))
    engine.add(request("a", range(100, 140), n=3, max_tokens=2))
    events = drain(engine)
    shards = {row.request_id: row.shard for step in engine.runner.sent for row in step}
    assert shards == {"x#0": 0, "a#0": 1, "a#1": 1, "a#2": 1}
    assert {e.index: e.num_cached_tokens for e in events["a"]} == {0: 0, 1: 32, 2: 32}
    assert_idle(engine)


def test_siblings_go_elsewhere_when_the_shard_of_the_first_has_no_slot():
    engine = fake_engine(num_shards=2, max_num_seqs=1, max_num_batched_tokens=64)
    engine.add(request("a", range(100, 140), n=2, max_tokens=9))
    events = drain(engine)
    shards = {row.request_id: row.shard for step in engine.runner.sent for row in step}
    assert shards == {"a#0": 0, "a#1": 1}
    assert [tokens_of(events["a"], i) for i in range(2)] == [[*range(140, 149)]] * 2
    assert_idle(engine)


# --- the queue --------------------------------------------------------------------------------------


def test_a_head_that_fits_no_shard_holds_back_those_behind_it():
    # a CSA page holds 32 tokens: a and b fill the shards, c fits neither, d, of no complete entry, would
    engine = fake_engine(num_shards=2, cache=NO_CACHE, num_pages={EntryKind.CSA: 2}, max_num_batched_tokens=64)
    for name, length, max_tokens in (("a", 40, 2), ("b", 40, 4), ("c", 40, 2), ("d", 3, 1)):
        engine.add(request(name, [ord(name)] * length, max_tokens=max_tokens))
    drain(engine)
    assert sent(engine) == [
        {0: [("a#0", 0, 40)], 1: [("b#0", 0, 40)]},
        {0: [("a#0", 40, 1)], 1: [("b#0", 40, 1)]},
        {1: [("b#0", 41, 1)]},  # a's last token is in flight, and its pages are held until it is read
        {0: [("c#0", 0, 40)], 1: [("b#0", 42, 1), ("d#0", 0, 3)]},
        {0: [("c#0", 40, 1)]},
    ]
    assert_idle(engine)


def test_a_head_goes_to_the_next_best_shard_when_the_best_has_no_pages():
    engine = fake_engine(num_shards=2, cache=NO_CACHE, num_pages={EntryKind.CSA: 3}, max_num_batched_tokens=64)
    engine.add(request("a", [1] * 70, max_tokens=20))
    for name in "bcd":
        engine.step()
        engine.step()
        engine.add(request(name, [ord(name)] * 4, max_tokens=20))
    engine.step()
    # for c and d shard 0 has the fewer rows or as many, but a has all its pages
    assert where(engine) == {"a": 0, "b": 1, "c": 1, "d": 1}
    drain(engine)
    assert_idle(engine)


def test_without_chunked_prefill_a_prompt_goes_where_the_budget_holds_it():
    engine = fake_engine(num_shards=2, cache=NO_CACHE, enable_chunked_prefill=False, max_num_batched_tokens=32)
    for name, length in {"a": 20, "b": 22, "c": 12, "d": 11}.items():
        engine.add(request(name, [ord(name)] * length, max_tokens=1))
    drain(engine)
    # c prefers shard 0, and fits; d fits neither, waits, and goes where fewer rows are
    assert sent(engine) == [{0: [("a#0", 0, 20), ("c#0", 0, 12)], 1: [("b#0", 0, 22)]}, {1: [("d#0", 0, 11)]}]


def test_a_head_that_waits_is_hashed_once():
    engine = fake_engine(num_shards=2, max_num_seqs=2, num_pages={EntryKind.CSA: 1})
    for name in "abc":
        engine.add(request(name, [ord(name)] * 20, max_tokens=9))
    engine.step()
    (hashes,) = engine.scheduler._hashes.values()
    assert (where(engine), len(hashes.digests)) == ({"a": 0, "b": 1}, 3)
    engine.step()
    assert list(engine.scheduler._hashes.values()) == [hashes]
    while "c" not in where(engine):
        engine.step()
    (c,) = [r for r in engine.scheduler.running if r.parent_id == "c"]
    assert engine.caches[c.shard].request("c#0").hashes is hashes
    drain(engine)
    assert_idle(engine)


# --- preemption -------------------------------------------------------------------------------------


def test_a_preempted_request_moves_to_another_shard():
    engine = fake_engine(num_shards=2, cache=NO_CACHE, num_pages={EntryKind.CSA: 2}, max_num_batched_tokens=64)
    engine.add(request("a", [1] * 30, max_tokens=12))
    engine.add(request("x", [9] * 60, max_tokens=1))
    engine.add(request("b", [2] * 30, max_tokens=12))
    events = drain(engine)
    assert sent(engine) == [
        {0: [("a#0", 0, 30), ("b#0", 0, 30)], 1: [("x#0", 0, 60)]},
        *[{0: [("a#0", 30 + i, 1), ("b#0", 30 + i, 1)]} for i in range(5)],
        {0: [("a#0", 35, 1)]},  # a needs a second page: b is preempted, its token 36 in flight
        {0: [("a#0", 36, 1)], 1: [("b#0", 0, 36)]},  # shard 1 is empty
        *[{0: [("a#0", 37 + i, 1)], 1: [("b#0", 36 + i, 1)]} for i in range(4)],
        {1: [("b#0", 40, 1)]},
    ]
    assert tokens_of(events["b"]) == list(range(3, 15))
    assert engine.stats().num_preemptions == 1
    assert_idle(engine)


def test_pages_of_another_shard_do_not_help():
    engine = fake_engine(num_shards=2, cache=NO_CACHE, num_pages={EntryKind.CSA: 2}, max_num_batched_tokens=64)
    engine.add(request("a", [1] * 30, max_tokens=12))
    engine.step()
    engine.add(request("b", [2] * 30, max_tokens=12))
    engine.step()
    assert where(engine) == {"a": 0, "b": 1}
    drain(engine)
    assert engine.stats().num_preemptions == 0  # 42 tokens are two pages, and each has a shard's two
    assert_idle(engine)


def test_preempted_requests_of_all_shards_wait_in_the_order_they_came():
    engine = fake_engine(num_shards=2, max_num_seqs=2)
    for name in "abcd":
        engine.add(request(name, [ord(name)] * 9, max_tokens=8))
    engine.step()
    engine.add(request("e", [5] * 3, max_tokens=2))
    engine.step()
    assert where(engine) == {"a": 0, "c": 0, "b": 1, "d": 1}
    by_name = {r.parent_id: r for r in engine.scheduler.running}
    for name in "cbad":
        preempt(engine.scheduler, by_name[name])
    assert [r.parent_id for r in engine.scheduler.waiting] == ["a", "b", "c", "d", "e"]
    assert {(r.status, r.shard, r.slot) for r in engine.scheduler.waiting} == {(Status.WAITING, -1, -1)}
    drain(engine)
    assert_idle(engine)


def test_one_that_moves_keeps_its_place_before_those_who_came_later():
    engine = fake_engine(num_shards=2, max_num_seqs=2)
    for name in "abc":
        engine.add(request(name, [ord(name)] * 9, max_tokens=20))
    engine.step()
    engine.step()
    assert where(engine) == {"a": 0, "c": 0, "b": 1}
    first = engine.scheduler.running[0]
    preempt(engine.scheduler, first)
    engine.step()  # reads its token
    engine.add(request("d", [4] * 40, max_tokens=2))
    while first.status is Status.WAITING:
        engine.step()
        check_caches(engine)
    for shard in engine.scheduler.shards:
        assert [r.order for r in shard.running] == sorted(r.order for r in shard.running)
    drain(engine)
    assert_idle(engine)
