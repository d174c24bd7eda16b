"""Exact schedules of each policy: who gets how many tokens in which step."""

import pytest

from dsjax.cache.spec import EntryKind
from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Status
from dsjax.scheduler.policy import MAX_RECLAIMS, Limits
from dsjax.serving_config import PathConfig, TenantConfig
from tests.fakes import Clock, assert_idle, drain, fake_engine, request, tokens_of

NO_CACHE = {"enable_prefix_caching": False}  # no snapshots, so chunks end at the budget alone
# Paths of a model of 128 tokens: with 4 tokens of answer a prompt is hot up to 19 tokens, cold from 36 on.
PATHS = {
    "hot": PathConfig(max_tokens=24),
    "warm": PathConfig(max_tokens=40),
    "cold": PathConfig(share=0.5, budget_share=0.5),
}


def engine_of(**settings):
    return fake_engine(num_shards=1, clock=Clock(), **{"cache": NO_CACHE, **settings})


def run(engine, num=1):
    """Steps; events go on in `finish`."""
    for _ in range(num):
        engine.events = [*getattr(engine, "events", []), *engine.step()]


def finish(engine):
    """Drains; tokens by request id, from the first."""
    found = {}
    for event in [*getattr(engine, "events", []), *(e for events in drain(engine).values() for e in events)]:
        found.setdefault(event.request_id, []).extend(event.token_ids)
    assert_idle(engine)
    return found


def steps(engine, first=0):
    """Rows of every step as {id: new tokens}."""
    return [{row.request_id[:-2]: row.num_new for row in step} for step in engine.runner.sent[first:]]


def running(engine):
    return [r.parent_id for r in engine.scheduler.running]


def waiting(engine):
    return [r.parent_id for r in engine.scheduler.waiting]


# --- order -----------------------------------------------------------------------------------------


def test_shortest_first_also_stops_a_running_prompt_and_who_comes_too_late_stays_behind():
    engine = engine_of(scheduling_policy="shortest", length_penalty=1.0, max_overtake_s=30.0, max_num_batched_tokens=8)
    clock = engine.clock
    engine.add(request("long", [9] * 60, max_tokens=1))  # counts as of second 30
    engine.step()
    clock.now_s = 10
    engine.add(request("short", [1] * 6, max_tokens=2))  # counts as of 18
    engine.add(request("tiny", [2] * 2, max_tokens=2))  # 14
    engine.step()
    clock.now_s = 26
    engine.add(request("late", [3] * 6, max_tokens=2))  # 34: more than 30 after the long one
    for _ in range(6):
        engine.step()
    assert steps(engine)[:7] == [
        {"long": 8},
        {"tiny": 2, "short": 6},
        {"tiny": 1, "short": 1, "long": 6},
        {"long": 8},
        {"long": 8},
        {"long": 8},
        {"long": 8},
    ]
    drain(engine)
    assert steps(engine)[8:10] == [{"long": 6, "late": 2}, {"late": 4}]
    assert_idle(engine)


@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
def test_short_requests_behind_a_long_one(policy):
    # known fault 14: ten prompts of 16 tokens behind one of 2,000
    engine = engine_of(
        scheduling_policy=policy, max_num_batched_tokens=64, max_num_seqs=16, max_model_len=2100, length_penalty=0.1
    )
    engine.add(request("long", [9] * 2000, max_tokens=1))
    for number in range(10):
        engine.add(request(f"s{number}", [number + 1] * 16, max_tokens=1))
    drain(engine)
    last_short = max(i for i, step in enumerate(steps(engine)) if any(name != "long" for name in step))
    assert last_short == {"fcfs": 33, "shortest": 2}[policy]
    assert len(steps(engine)) == 34  # the long one ends as early either way


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest"])
def test_priorities(policy):
    engine = engine_of(scheduling_policy=policy, max_num_seqs=1)
    for number, priority in enumerate((0, 2, 1, -1, 0)):
        engine.add(request(f"r{number}", [1], max_tokens=1, priority=priority))
    events = drain(engine)
    assert list(events) == [f"r{i}" for i in ((0, 1, 2, 3, 4) if policy == "fcfs" else (3, 0, 4, 2, 1))]


def test_priority_is_worth_so_many_seconds():
    engine = engine_of(scheduling_policy="priority", priority_step_s=10.0, max_num_seqs=1)
    for second, (name, priority) in enumerate([("a", 0), ("low", 1), ("b", 0)]):
        engine.clock.now_s = 9.0 * second
        engine.add(request(name, [1], max_tokens=1, priority=priority))
    engine.clock.now_s = 19.5
    engine.add(request("late", [1], max_tokens=1))
    assert waiting(engine) == ["a", "b", "low", "late"]


def test_expected_length_is_learnt_from_answers_and_bounded_by_max_tokens():
    engine = engine_of(expected_output_tokens=40)
    engine.add(request("a", [1] * 5, max_tokens=8))
    engine.add(request("b", [1] * 5, max_tokens=100))
    engine.add(request("c", [1] * 100))
    assert [r.expected_tokens for r in engine.scheduler.waiting] == [13, 45, 128]
    drain(engine)
    engine.add(request("d", [1] * 5, max_tokens=100))  # answers of 8, 100 and 28: a little more than 40
    (d,) = engine.scheduler.waiting
    assert d.expected_tokens == 5 + 41  # 40 - 32/32 = 39, then 39 + 61/32 = 40.9, then 40.5


# --- paths -----------------------------------------------------------------------------------------


def test_cold_prompts_leave_their_share_of_a_step_to_others_and_take_what_nobody_wants():
    engine = engine_of(**PATHS, max_num_batched_tokens=16)
    engine.add(request("cold", [9] * 100, max_tokens=4))
    engine.step()
    engine.add(request("hot", [1] * 12, max_tokens=4))
    engine.step()
    engine.step()
    assert steps(engine) == [{"cold": 16}, {"cold": 8, "hot": 8}, {"cold": 12, "hot": 4}]
    drain(engine)
    assert_idle(engine)


def test_chunks_of_a_path():
    cold = PathConfig(chunk_tokens=6)
    engine = engine_of(**{**PATHS, "cold": cold}, max_num_batched_tokens=16)
    engine.add(request("cold", [9] * 40, max_tokens=1))
    engine.add(request("hot", [9] * 8, max_tokens=1))
    engine.step()
    engine.step()
    assert steps(engine) == [{"cold": 6, "hot": 8}, {"cold": 6}]


def test_rows_of_a_path_and_colder_ones():
    warm = PathConfig(max_tokens=40, share=0.75)
    engine = engine_of(**{**PATHS, "warm": warm}, max_num_batched_tokens=256)  # of 4 rows 3 and 2
    for name, length in (("c1", 40), ("c2", 40), ("c3", 40), ("w1", 24), ("w2", 24), ("h1", 4), ("h2", 4)):
        engine.add(request(name, [1] * length, max_tokens=4))
    engine.step()
    engine.step()
    engine.step()
    assert (running(engine), waiting(engine)) == (["c1", "c2", "w1", "h1"], ["c3", "w2", "h2"])
    events = drain(engine)
    assert len(events) == 7
    assert_idle(engine)


# CSA pages of 8 entries hold 32 tokens.
def test_a_lone_cold_request_may_have_all_pages_and_gives_back_what_hot_ones_need():
    engine = engine_of(**PATHS, num_pages={EntryKind.CSA: 4}, max_num_batched_tokens=128)
    engine.add(request("cold", [9] * 120, max_tokens=4))
    run(engine, 2)
    stats = engine.stats()
    assert (stats.kv_cache_usage, stats.num_pages_of["csa"], stats.num_pages_used_of["csa"]) == (1.0, 4, 4)
    assert stats.num_pages_used_of["hca"] < stats.num_pages_of["hca"]  # and most pages of the sum are free
    engine.add(request("hot", [1] * 8, max_tokens=4))
    run(engine)
    assert (running(engine), waiting(engine)) == (["hot"], ["cold"])
    assert [r.num_reclaims for r in engine.scheduler.waiting] == [1]
    assert finish(engine) == {"cold": [10, 11, 12, 13], "hot": [2, 3, 4, 5]}


def test_a_request_gives_way_a_bounded_number_of_times():
    engine = engine_of(**PATHS, num_pages={EntryKind.CSA: 4}, max_num_batched_tokens=128)
    engine.add(request("cold", [9] * 120, max_tokens=4))
    (cold,) = engine.scheduler.waiting
    for number in range(40):
        if engine.scheduler.num_live < 2:
            engine.add(request(f"hot{number}", [1] * 8, max_tokens=2))
        engine.step()
    assert cold.num_reclaims == MAX_RECLAIMS and cold.status is Status.FINISHED
    drain(engine)
    assert_idle(engine)


def test_cold_requests_together_stay_within_their_pages_except_the_first():
    engine = engine_of(**PATHS, num_pages={EntryKind.CSA: 8}, max_num_batched_tokens=256, max_model_len=256)
    engine.add(request("c1", [9] * 64, max_tokens=80))
    engine.add(request("c2", [8] * 20, max_tokens=40))
    run(engine, 2)
    # half of 8 pages is theirs: the first has 2, the second 1
    assert (running(engine), steps(engine)) == (["c1", "c2"], [{"c1": 64, "c2": 20}, {"c1": 1, "c2": 1}])
    while "c2" in steps(engine)[-1]:
        run(engine)
    (c2,) = (r for r in engine.scheduler.running if r.parent_id == "c2")
    assert c2.num_computed == 23  # c1's token 68 begins a page: c2 holds what it has until c1 has ended
    found = finish(engine)
    assert [len(found[name]) for name in ("c1", "c2")] == [80, 40]
    assert engine.stats().num_preemptions == 0


# --- preemption ------------------------------------------------------------------------------------


def test_above_the_threshold_the_cheapest_is_preempted_and_nobody_is_admitted():
    engine = engine_of(num_pages={EntryKind.CSA: 4}, preemption_threshold=0.75, max_num_batched_tokens=128)
    for name, length in (("a", 32), ("b", 50), ("c", 31)):
        engine.add(request(name, [ord(name)] * length, max_tokens=12))
    run(engine)
    # a and b have 3 of 4 pages, which is the threshold: c waits
    assert (running(engine), waiting(engine)) == (["a", "b"], ["c"])
    run(engine, 4)  # a's token 36 begins a page
    assert (running(engine), engine.stats().kv_cache_usage) == (["a", "b"], 1.0)
    run(engine)
    assert (running(engine), waiting(engine)) == (["a"], ["b", "c"])
    found = finish(engine)
    assert all(len(found[name]) == 12 for name in "abc")


def test_what_was_preempted_above_the_threshold_starts_again_when_it_fits_below():
    sizes = {"max_model_len": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 64, "cache": {}}
    engine = engine_of(num_pages={EntryKind.CSA: 40}, preemption_threshold=0.85, **sizes)
    for name in "abcd":
        engine.add(request(name, [ord(name)] * 190, max_tokens=200))
    run(engine, 20)
    engine.add(request("e", [ord("e")] * 400, max_tokens=20))
    found = finish(engine)
    assert [len(found[name]) for name in "abcde"] == [200] * 4 + [20]
    stats = engine.stats()
    assert stats.num_preemptions < 10 and stats.num_computed_tokens < 3000  # 1160 + 820 at least


def test_of_later_requests_the_one_that_loses_least_is_preempted():
    engine = engine_of(num_pages={EntryKind.CSA: 3}, max_num_batched_tokens=128)
    for name, length in (("a", 34), ("b", 20), ("c", 30)):
        engine.add(request(name, [ord(name)] * length, max_tokens=12))
    while not engine.stats().num_preemptions:
        engine.step()
    assert (running(engine), waiting(engine)) == (["a", "c"], ["b"])
    drain(engine)
    assert_idle(engine)


def test_without_preemption_a_request_starts_when_all_of_it_fits():
    engine = engine_of(num_pages={EntryKind.CSA: 4}, enable_preemption=False, max_num_batched_tokens=128)
    engine.add(request("a", [1] * 30, max_tokens=40))  # 70 tokens: three pages, though it has one now
    engine.add(request("b", [2] * 30, max_tokens=10))  # two
    engine.step()
    assert (running(engine), waiting(engine)) == (["a"], ["b"])
    drain(engine)
    assert engine.stats().num_preemptions == 0
    assert_idle(engine)


def test_an_urgent_request_takes_a_row_from_a_less_urgent_one():
    engine = engine_of(scheduling_policy="priority", max_num_seqs=2)
    for name, priority in (("a", 1), ("b", 3)):
        engine.add(request(name, [ord(name)] * 3, max_tokens=9, priority=priority))
    run(engine)
    engine.add(request("urgent", [5] * 3, max_tokens=2, priority=0))
    run(engine)
    assert (running(engine), waiting(engine)) == (["urgent", "a"], ["b"])
    found = finish(engine)
    assert found == {"a": list(range(98, 107)), "b": list(range(99, 108)), "urgent": [6, 7]}


# --- batching --------------------------------------------------------------------------------------


def test_a_lone_request_waits_for_company_no_longer_than_its_deadline():
    engine = engine_of(batch_wait_s=60.0)
    engine.add(request("a", [1], deadline_s=2.0))
    assert engine.step() == [] and engine.wake_s() == 2.0
    engine.clock.now_s = 2.0
    (event,) = engine.step()
    assert event.error.code is ErrorCode.DEADLINE_EXCEEDED and engine.wake_s() is None


def test_a_lone_request_waits_for_company_until_the_time_is_over_or_the_batch_is_full():
    engine = engine_of(batch_wait_s=0.5, max_num_seqs=2)
    engine.add(request("a", [1], max_tokens=3))
    assert (engine.step(), engine.runner.sent, engine.wake_s()) == ([], [], 0.5)
    engine.clock.now_s = 0.5
    engine.step()
    assert (steps(engine), engine.wake_s()) == ([{"a": 1}], None)
    engine.add(request("b", [2], max_tokens=3))
    engine.step()  # not alone: no wait
    assert steps(engine)[1] == {"a": 1, "b": 1}
    drain(engine)
    engine.add(request("c", [1], max_tokens=1))
    engine.step()
    assert engine.wake_s() == 1.0
    engine.add(request("d", [1], max_tokens=1))
    engine.step()
    assert (steps(engine)[-1], engine.wake_s()) == ({"c": 1, "d": 1}, None)
    drain(engine)
    assert_idle(engine)


def test_rows_of_a_step_are_of_one_length_group():
    engine = engine_of(length_groups=3.0, max_num_batched_tokens=128)
    for name, length in (("a", 4), ("b", 60), ("c", 5), ("d", 70)):
        engine.add(request(name, [ord(name)] * length, max_tokens=6))
    engine.step()
    first = len(engine.runner.sent)
    events = drain(engine)
    for step in engine.runner.sent[first:]:
        lengths = [row.start + 1 for row in step if row.num_new == 1]
        assert not lengths or max(lengths) <= 3 * min(lengths)
    assert all(len(tokens_of(events[name])) == 6 for name in "abcd")
    assert_idle(engine)


def test_lowered_limits_hold_for_steps_to_come_and_rows_that_run_go_on():
    engine = engine_of(max_num_batched_tokens=32)
    for name in "abcd":
        engine.add(request(name, [ord(name)] * 20, max_tokens=6))
    engine.step()
    assert steps(engine) == [{"a": 20, "b": 12}]
    engine.scheduler.limits = Limits(max_num_batched_tokens=8, max_num_seqs=2, chunk_tokens=5)
    engine.step()
    engine.step()
    assert steps(engine)[1:] == [{"a": 1, "b": 5}, {"a": 1, "b": 3}]
    engine.scheduler.limits = Limits.of(engine.config.scheduler)
    engine.step()
    assert steps(engine)[3] == {"a": 1, "b": 1, "c": 20, "d": 10}
    engine.scheduler.limits = Limits(max_num_batched_tokens=1, max_num_seqs=1)
    engine.step()
    assert steps(engine)[4] == {"a": 1, "b": 1, "c": 1, "d": 1}  # each row goes on
    drain(engine)
    assert_idle(engine)


# --- tenants ---------------------------------------------------------------------------------------


def test_a_tenants_limits():
    free = TenantConfig(name="free", max_num_seqs=1, max_num_waiting=2)
    engine = engine_of(tenants=(free,))
    engine.add(request("f1", [1], max_tokens=9, tenant="free"))
    engine.add(request("f2", [1], max_tokens=9, tenant="free"))
    with pytest.raises(RequestError, match="2 requests of tenant 'free' are waiting and 1 more exceed its max_num_w"):
        engine.add(request("f3", [1], max_tokens=9, tenant="free"))
    engine.add(request("x1", [1], max_tokens=9, tenant="other"))
    engine.step()
    assert (running(engine), waiting(engine)) == (["f1", "x1"], ["f2"])
    with pytest.raises(RequestError) as caught:
        engine.add(request("f3", [1], max_tokens=9, tenant="free", n=2))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    drain(engine)
    assert_idle(engine)


def test_reserved_rows_are_left_to_their_tenant():
    engine = engine_of(tenants=(TenantConfig(name="vip", reserved_seqs=2),))
    for number in range(4):
        engine.add(request(f"r{number}", [1], max_tokens=9))
    engine.step()
    assert (running(engine), waiting(engine)) == (["r0", "r1"], ["r2", "r3"])
    engine.add(request("v0", [1], max_tokens=9, tenant="vip"))
    engine.step()
    assert running(engine) == ["r0", "r1", "v0"]
    drain(engine)
    assert_idle(engine)


def test_tenants_take_turns():
    engine = engine_of(max_num_seqs=1)
    for number in range(3):
        engine.add(request(f"a{number}", [1] * 100, max_tokens=1, tenant="a"))
    for number in range(3):
        engine.add(request(f"b{number}", [1] * 100, max_tokens=1, tenant="b"))
    events = drain(engine)
    # ten of them are a turn of 1,024 tokens
    assert list(events) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for number in range(12):
        engine.add(request(f"a{number}", [1] * 100, max_tokens=1, tenant="a"))
    engine.add(request("b", [1] * 100, max_tokens=1, tenant="b"))
    assert list(drain(engine)).index("b") == 10
