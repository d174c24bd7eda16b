"""A step that goes on as the one before did is the step that would have been planned from scratch."""

import pytest

from dsjax.cache.spec import EntryKind
from dsjax.scheduler.streak import Streak
from tests.fakes import ByteTokenizer, Clock, drain, fake_engine, request, tokens_of
from tests.scheduler.test_policies_random import SETTINGS, PolicyTraffic


def play(**settings) -> tuple[list, dict, dict]:
    """What was sent, what was answered and the totals, of random traffic."""
    engine = fake_engine(tokenizer=ByteTokenizer(), clock=Clock(1.0), **settings)
    traffic = PolicyTraffic(engine, seed=5, num_requests=150)
    traffic.run(per_step=0.12)
    return engine.runner.sent, traffic.answers, vars(engine.scheduler.counters)  # type: ignore[attr-defined]


@pytest.fixture
def granted(monkeypatch):
    """Whether each streak that could have gone on did."""
    answers, grant = [], Streak.grant
    monkeypatch.setattr(Streak, "grant", lambda streak: answers.append(grant(streak)) or answers[-1])
    return answers


@pytest.mark.parametrize("name", [*SETTINGS, "plain"])
def test_random_traffic_is_planned_the_same(name, granted, monkeypatch):
    settings = {"num_shards": 1, **SETTINGS.get(name, {})}
    with_streaks = play(**settings)
    assert any(granted) or name not in ("plain", "priority", "no preemption")  # others' turns and shares change often
    monkeypatch.setattr(Streak, "grant", lambda streak: False)
    assert play(**settings) == with_streaks


def test_a_streak_lasts_until_a_request_may_end(granted):
    engine = fake_engine(num_shards=1)
    engine.add(request("a", [1, 2, 3], max_tokens=9))
    engine.add(request("b", [4, 5, 6], max_tokens=20))
    events = drain(engine)
    assert tokens_of(events["a"]) == list(range(4, 13)) and tokens_of(events["b"]) == list(range(7, 27))
    # Of a's 9 steps the first computes the prompt; once its last token is in flight, b goes on alone after one step
    # planned from scratch, and another when a has ended.
    assert granted == [True] * 8 + [False] + [True] * 9 + [False]


def test_missing_pages_end_a_streak(granted):
    engine = fake_engine(num_shards=1, num_pages={EntryKind.CSA: 5})
    for name in "ab":
        engine.add(request(name, range(1, 40), max_tokens=60))
    events = drain(engine)
    assert tokens_of(events["a"]) == tokens_of(events["b"]) == list(range(40, 100))
    assert engine.stats().num_preemptions > 0 and any(granted)


def test_what_a_streak_did_not_write_down_is_there_when_it_ends(granted):
    engine = fake_engine(num_shards=1)
    for name in "ab":
        engine.add(request(name, [1, 2, 3], max_tokens=40))
    for _ in range(7):
        engine.step()
    assert any(granted)
    shard = engine.scheduler.shards[0]
    (going, ended), held = shard.running, shard.cache.request(shard.running[0].request_id)
    assert shard.num_tokens_left == 2  # one each, drawn by the step in flight
    assert engine.cancel("b")
    assert (going.num_computed, going.num_pending, held.num_computed) == (9, 1, 9)  # the prompt, and 6 steps more
    assert going.token_ids == list(range(1, 10)) and shard.num_tokens_left == 1
    assert ended.num_pending == 1 and ended.slot == -1
    assert tokens_of(drain(engine)["a"]) == list(range(10, 44))
    shard.cache.check()
