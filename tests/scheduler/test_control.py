"""Feedback, admission by predicted wait, shedding and degradation in the engine, on a clock that the tests set."""

import dataclasses
import random

import pytest

from dsjax.config import FeedbackConfig, OverloadConfig
from dsjax.errors import ErrorCode, RequestError
from dsjax.request import FinishReason
from dsjax.serving_config import PathConfig, TenantConfig
from tests.fakes import Clock, assert_idle, check_caches, fake_engine, request, tokens_of

COUNTERS = (
    "num_requests num_finished num_preemptions num_generated_tokens num_steps num_computed_tokens num_refused num_shed "
    "num_degrade_changes num_limit_changes"
).split()


def engine_of(overload=None, feedback=None, **settings):
    config = {"overload": OverloadConfig(**(overload or {})), "feedback": FeedbackConfig(**(feedback or {}))}
    return fake_engine(num_shards=1, clock=Clock(), config=config, **settings)


def step(engine, seconds=1.0, num=1):
    """Steps that take so long each; returns their events."""
    events = []
    for _ in range(num):
        events += engine.step()
        engine.clock.now_s += seconds
    return events


def finish(engine, seconds=1.0):
    events = []
    for _ in range(3000):
        events += step(engine, seconds)
        if not engine.has_work():
            break
    assert_idle(engine)
    return events


def refusal(engine, req) -> RequestError:
    with pytest.raises(RequestError) as caught:
        engine.add(req)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    return caught.value


def ended(events) -> dict[str, list]:
    """How each request ended, once for each sequence."""
    out: dict[str, list] = {}
    for event in events:
        if event.finished:
            out.setdefault(event.request_id, []).append(event.finish_reason or event.error.code)
    return out


def busy(overload, **settings):
    """An engine that decodes two requests a second, two tokens a step, while `a` and `b` wait."""
    engine = engine_of(overload, max_num_seqs=2, max_num_batched_tokens=2, cache={"enable_prefix_caching": False})
    for name in ("x", "y"):
        engine.add(request(name, [1], max_tokens=30))
    step(engine, num=2)
    for name in ("a", "b"):
        engine.add(request(name, [1] * 5, max_tokens=5))
    return engine


# --- admission ----------------------------------------------------------------------------------


def test_a_request_that_would_wait_too_long_is_refused_and_told_when_to_come_back():
    engine = busy({"max_predicted_wait_s": 12.0})
    assert engine.stats().predicted_wait_s == 0.0  # no step has been read while requests waited
    step(engine, num=3)
    assert engine.stats().predicted_wait_s == 10.0  # a and b: 20 tokens at 2 a second
    engine.add(request("c", [1] * 5, max_tokens=5))
    error = refusal(engine, request("d", [1] * 5, max_tokens=5))
    assert str(error) == "the request would wait 15.0 s, longer than the limit max_predicted_wait_s=12; retry later"
    assert error.retry_after_s == 3.0
    assert (engine.stats().num_refused, engine.stats().num_waiting) == (1, 3)
    assert ended(finish(engine)) == {name: [FinishReason.LENGTH] for name in "xyabc"}


def test_a_request_that_cannot_make_its_deadline_is_refused_at_once():
    engine = busy({"max_predicted_wait_s": 100.0})
    step(engine, num=3)
    now_s = engine.clock()
    error = refusal(engine, request("c", [1], max_tokens=5, deadline_s=now_s + 9.0))
    assert str(error) == "the request would wait 10.0 s, longer than its deadline in 9.0 s; retry later"
    engine.add(request("c", [1], max_tokens=5, deadline_s=now_s + 10.0))


def test_without_a_limit_nothing_is_predicted_for_anyone():
    engine = busy({})
    step(engine, num=3)
    engine.add(request("c", [1], max_tokens=5, deadline_s=engine.clock() + 1.0))


def test_a_full_queue_says_when_to_come_back():
    engine = engine_of(max_num_waiting=2, max_num_seqs=1, max_num_batched_tokens=1)
    for name in "abc":
        engine.add(request(name, [1] * 4, max_tokens=4))
        step(engine)
    step(engine, num=2)
    error = refusal(engine, request("d", [1] * 4, max_tokens=4))
    assert (error.retry_after_s, engine.stats().num_refused) == (8.0, 1)  # its own 8 tokens, at 1 a second
    assert str(error) == "2 requests are waiting and 1 more exceed the limit max_num_waiting=2; retry later"


# --- shedding -----------------------------------------------------------------------------------


def full(**settings):
    """`run` runs, `a`, `b` and `c` wait with priorities 1, 2, 2, and no more may."""
    engine = engine_of(max_num_waiting=3, max_num_seqs=1, **settings)
    engine.add(request("run", [1], max_tokens=20, priority=5))
    step(engine)
    for name, priority in (("a", 1), ("b", 2), ("c", 2)):
        engine.add(request(name, [1], max_tokens=2, priority=priority))
    return engine


def test_a_full_queue_gives_up_its_least_urgent_for_a_more_urgent_one():
    engine = full()
    refusal(engine, request("d", [1], max_tokens=2, priority=2))
    engine.add(request("d", [1], max_tokens=2, priority=1))
    assert [r.parent_id for r in engine.scheduler.waiting] == ["a", "b", "d"]
    [told] = [event for event in step(engine) if event.error]
    assert (told.request_id, told.error.code, told.error.retry_after_s) == ("c", ErrorCode.RESOURCE_EXHAUSTED, 1.0)
    assert str(told.error) == (
        "given up while waiting, for a more urgent request (enable_shedding): 2 wait, the limit max_num_waiting=3; "
        "retry later"
    )
    events = finish(engine)
    assert ended(events) == {name: [FinishReason.LENGTH] for name in ("run", "a", "b", "d")}
    stats = engine.stats()
    assert (stats.num_shed, stats.num_refused, stats.num_requests, stats.num_finished) == (1, 1, 5, 5)


def test_shedding_can_be_turned_off():
    engine = full(overload={"enable_shedding": False})
    refusal(engine, request("d", [1], max_tokens=2))
    assert engine.stats().num_shed == 0


def test_an_id_stays_live_until_its_caller_is_told_and_cancel_takes_it_quietly():
    engine = full()
    engine.add(request("d", [1], max_tokens=2))  # c goes
    with pytest.raises(RequestError) as caught:
        engine.add(request("c", [1], max_tokens=2))
    assert caught.value.code is ErrorCode.ALREADY_EXISTS
    assert engine.cancel("c")
    assert ended(finish(engine)) == {name: [FinishReason.LENGTH] for name in ("run", "a", "b", "d")}


def test_an_engine_that_has_only_to_tell_has_work():
    engine = full()
    for name in ("run", "a", "b"):
        engine.cancel(name)
    step(engine)  # c starts
    engine.cancel("c")
    step(engine)
    assert not engine.has_work()
    for name in ("e", "f", "g"):
        engine.add(request(name, [1], max_tokens=2, priority=9))
    engine.add(request("h", [1], max_tokens=2))
    engine.cancel("h")
    engine.cancel("e")
    engine.cancel("f")
    assert engine.has_work() and engine.wake_s() is None
    assert ended(step(engine)) == {"g": [ErrorCode.RESOURCE_EXHAUSTED]}
    assert not engine.has_work()


def test_all_sequences_of_a_shed_request_end():
    engine = engine_of(max_num_waiting=3, max_num_seqs=1)
    engine.add(request("run", [1], max_tokens=20))
    step(engine)
    engine.add(request("n", [1], max_tokens=2, n=3, priority=1))
    engine.add(request("two", [1], max_tokens=2, n=2))
    assert ended(step(engine)) == {"n": [ErrorCode.RESOURCE_EXHAUSTED] * 3}
    assert engine.stats().num_shed == 3
    finish(engine)


def test_a_tenant_that_floods_the_queue_gives_way_but_its_limit_is_its_own():
    tenants = (TenantConfig(name="flood", weight=2.0), TenantConfig(name="few", weight=4.0, max_num_waiting=1))
    engine = engine_of(max_num_waiting=4, max_num_seqs=1, tenants=tenants)
    engine.add(request("run", [1], max_tokens=20))
    step(engine)
    for i in range(4):
        engine.add(request(f"f{i}", [1], max_tokens=3, tenant="flood"))
    engine.add(request("one", [1], max_tokens=3, tenant="few"))  # 16 tokens / 2 wait of the one, 4 / 4 of the other
    assert [r.parent_id for r in engine.scheduler.waiting] == ["f0", "f1", "f2", "one"]
    error = refusal(engine, request("two", [1], max_tokens=3, tenant="few"))
    assert "its max_num_waiting=1" in str(error) and engine.stats().num_shed == 1
    assert ended(finish(engine))["f3"] == [ErrorCode.RESOURCE_EXHAUSTED]


def test_a_queue_that_is_too_long_gives_up_what_is_less_urgent_and_ahead():
    engine = busy({"max_predicted_wait_s": 8.0})
    step(engine, num=3)
    engine.scheduler.waiting.head(lambda r: False, set(), lambda t: False).priority = 1  # a
    engine.add(request("c", [1], max_tokens=5))  # would wait 10 s, and 5 s without a
    assert [r.parent_id for r in engine.scheduler.waiting] == ["b", "c"]
    assert ended(finish(engine))["a"] == [ErrorCode.RESOURCE_EXHAUSTED]


# --- degradation --------------------------------------------------------------------------------

DEGRADES = {"enable_degradation": True, "degrade_after_s": 5.0, "degraded_max_tokens": 3}
SMALL = {"max_num_waiting": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8}


def loaded(level, **settings):
    """An engine that has come to that mode, with `run` running and `w0` and `w1` waiting since it was in none."""
    engine = engine_of(DEGRADES, **{**SMALL, "cache": {"enable_prefix_caching": False}, **settings})
    engine.add(request("run", [1], max_tokens=60, logprobs=1))
    step(engine)
    for i in range(2):
        engine.add(request(f"w{i}", [1] * 20, max_tokens=10, logprobs=1))
    events = step(engine, num=5 * level + 1)
    assert engine.stats().degrade_level == level
    return engine, events


def test_a_shortened_answer_is_the_beginning_of_the_full_one_and_others_keep_theirs():
    engine, events = loaded(1)
    engine.add(request("new", [7], max_tokens=10))
    events += finish(engine)
    assert ended(events) == {name: [FinishReason.LENGTH] for name in ("run", "w0", "w1", "new")}
    tokens = {name: tokens_of([e for e in events if e.request_id == name]) for name in ended(events)}
    assert tokens["new"] == [8, 9, 10]
    assert tokens["w0"] == list(range(2, 12)) and len(tokens["run"]) == 60


def test_chunks_get_smaller_and_grow_again():
    engine, _ = loaded(2)
    first = len(engine.runner.sent)
    finish(engine)
    chunks = {row.request_id: [] for step in engine.runner.sent[first:] for row in step}
    for sent in engine.runner.sent[first:]:
        for row in sent:
            chunks[row.request_id].append(row.num_new)
    assert chunks["w0#0"][:10] == [2] * 10  # a fourth of the budget
    step(engine, num=20)
    assert engine.stats().degrade_level == 0 and engine.scheduler.limits.chunk_tokens == 0
    engine.add(request("after", [1] * 20, max_tokens=1))
    first = len(engine.runner.sent)
    finish(engine)
    assert [row.num_new for sent in engine.runner.sent[first:] for row in sent] == [8, 8, 4]


def test_new_requests_get_no_logprobs_and_others_do():
    engine, events = loaded(3)
    engine.add(request("new", [1], max_tokens=2, logprobs=1, prompt_logprobs=1))
    events += finish(engine)
    with_logprobs = {e.request_id for e in events if e.logprobs or e.prompt_logprobs}
    assert with_logprobs == {"run", "w0", "w1"}
    assert ended(events)["new"] == [FinishReason.LENGTH]


def test_an_idle_engine_calms_down_though_it_plans_no_steps():
    engine, _ = loaded(4, hot=PathConfig(max_tokens=8), warm=PathConfig(max_tokens=16))
    finish(engine, seconds=0.01)
    assert engine.control.ladder.level == 4 and engine.wake_s() is None
    engine.clock.now_s += 3600
    engine.add(request("cold", [1] * 30, max_tokens=4, logprobs=2))
    events = finish(engine)
    assert ended(events) == {"cold": [FinishReason.LENGTH]} and events[0].logprobs
    assert engine.stats().degrade_level == 0


def test_new_cold_requests_are_refused_and_those_that_wait_are_served():
    paths = {"hot": PathConfig(max_tokens=8), "warm": PathConfig(max_tokens=16)}
    engine, events = loaded(4, **paths)
    error = refusal(engine, request("cold", [1] * 20, max_tokens=2))
    assert str(error) == (
        "prompt and expected output make 22 tokens, and under load requests of warm.max_tokens=16 and more are refused "
        "(enable_degradation)"
    )
    assert error.retry_after_s == 5.0
    engine.add(request("hot", [1], max_tokens=2))
    events += finish(engine)
    assert {name: how[0] for name, how in ended(events).items()} == dict.fromkeys(
        ("run", "w0", "w1", "hot"), FinishReason.LENGTH
    )
    step(engine, num=30)
    engine.add(request("cold", [1] * 20, max_tokens=2))
    finish(engine)


# --- feedback -----------------------------------------------------------------------------------


def test_without_targets_the_limits_stay_the_configs():
    engine = engine_of(max_num_seqs=4, max_num_batched_tokens=32)
    engine.add(request("a", [1], max_tokens=50))
    finish(engine, seconds=100.0)
    stats = engine.stats()
    assert (stats.limit_num_batched_tokens, stats.limit_num_seqs, stats.num_limit_changes) == (32, 4, 0)


def test_the_engine_settles_at_the_knee_of_its_device_and_answers_stay_the_same():
    knee, engine = 8, engine_of(feedback={"target_itl_ms": 50.0}, max_num_seqs=16, max_num_batched_tokens=64)
    rng, events, added, seen = random.Random(0), [], 0, []
    while engine.clock() < 60.0:
        while engine.scheduler.num_live < 24:  # always some that wait
            engine.add(request(str(added), [added % 200 + 1], max_tokens=rng.randint(20, 40)))
            added += 1
        rows = len(engine.scheduler.running)
        events += step(engine, 0.02 + 0.02 * max(0, rows - knee))
        if engine.clock() > 30.0:
            seen.append(engine.stats().limit_num_seqs)
    assert set(seen) <= {knee, knee + 1} and sum(value == knee for value in seen) >= 0.9 * len(seen)
    events += finish(engine, 0.02)
    for name, how in ended(events).items():
        tokens = tokens_of([e for e in events if e.request_id == name])
        assert how == [FinishReason.LENGTH]
        assert tokens == [(int(name) % 200 + 2 + i) % 256 for i in range(len(tokens))]
    assert len(ended(events)) == added


# --- everything at once -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_under_any_load_every_request_ends_once_and_counters_only_grow(seed):
    rng = random.Random(seed)
    engine = engine_of(
        {**DEGRADES, "max_predicted_wait_s": rng.choice([0.0, 20.0])},
        {"target_itl_ms": 500.0, "target_ttft_ms": rng.choice([0.0, 5000.0])},
        max_num_waiting=8,
        scheduling_policy=rng.choice(["fcfs", "priority", "shortest"]),
        tenants=(TenantConfig(name="vip", weight=4.0, reserved_seqs=1), TenantConfig(name="small", max_num_seqs=1)),
    )
    events, alive, accepted, cancelled, refused = [], set(), [], set(), 0
    last = dataclasses.asdict(engine.stats())
    for i in range(400):
        for _ in range(rng.choice([0, 0, 1, 3]) if i < 300 else 0):
            name, n = f"r{len(accepted) + refused}", rng.choice([1, 1, 1, 2])
            made = request(
                name,
                [rng.randint(1, 200) for _ in range(rng.randint(1, 60))],
                max_tokens=rng.randint(1, 20),
                n=n,
                priority=rng.randint(0, 2),
                tenant=rng.choice(["", "vip", "small"]),
                deadline_s=rng.choice([None, engine.clock() + rng.uniform(1, 60)]),
            )
            try:
                engine.add(made)
                accepted.append((name, n))
                alive.add(name)
            except RequestError as error:
                assert error.code is ErrorCode.RESOURCE_EXHAUSTED and (error.retry_after_s or 0.0) >= 1.0
                refused += 1
        if alive and rng.random() < 0.05:
            name = rng.choice(sorted(alive))
            engine.cancel(name)
            cancelled.add(name)
        events += step(engine, rng.choice([0.1, 0.5]))
        stats = dataclasses.asdict(engine.stats())
        assert all(stats[name] >= last[name] for name in COUNTERS)
        assert 2 <= stats["limit_num_seqs"] <= 4 and 0 <= stats["degrade_level"] <= 4
        assert stats["num_waiting"] <= 8 + 4 and 0.0 <= stats["kv_cache_usage"] <= 1.0
        assert stats["num_waiting"] + stats["num_running"] == engine.scheduler.num_live
        check_caches(engine)
        last = stats
    events += finish(engine, 0.1)
    how = ended(events)
    for name, n in accepted:
        assert len(how.get(name, [])) == n or (name in cancelled and len(how.get(name, [])) < n)
    assert set(how) <= {name for name, _ in accepted}
    stats = engine.stats()
    assert stats.num_refused == refused and stats.num_requests == sum(n for _, n in accepted) == stats.num_finished
    assert stats.num_shed <= sum(
        code is ErrorCode.RESOURCE_EXHAUSTED for codes in how.values() for code in codes
    ) + sum(n for name, n in accepted if name in cancelled)
    assert sum(len(e.token_ids) for e in events) <= stats.num_generated_tokens


def test_how_long_the_first_token_takes_of_the_latest_steps_pace():
    engine = engine_of(max_num_seqs=2, max_num_batched_tokens=8)
    assert engine.first_token_s(1) == float("inf")  # no step has been read
    engine.add(request("x", [1] * 8, max_tokens=3))
    finish(engine, 2.0)
    # a step takes 2 s, and one of 8 prompt tokens too: three steps, and 16 tokens at 4 a second
    assert engine.first_token_s(16) == pytest.approx(3 * 2.0 + 16 / 4)
