"""Exact schedules: who gets how many tokens in which step. Pages are plentiful unless a test says otherwise."""

import pytest

from dsjax.cache.spec import EntryKind
from dsjax.errors import ErrorCode, RequestError
from dsjax.request import Status
from tests.fakes import Sent, assert_idle, drain, fake_engine, preempt, request, tokens_of

NO_CACHE = {"enable_prefix_caching": False}  # no snapshots, so chunks end at the budget alone


def sent(engine):
    """Rows of every step as (id, start, new tokens)."""
    return [[row[:3] for row in step] for step in engine.runner.sent]


def test_a_prompt_is_cut_at_the_budget_and_only_its_last_chunk_samples():
    engine = fake_engine(cache=NO_CACHE, max_num_batched_tokens=16)
    engine.add(request("a", range(1, 41), max_tokens=2))
    events = drain(engine)
    assert engine.runner.sent == [
        [Sent("a#0", 0, 16, False)],
        [Sent("a#0", 16, 16, False)],
        [Sent("a#0", 32, 8, True)],
        [Sent("a#0", 40, 1, True)],
    ]
    assert tokens_of(events["a"]) == [41, 42]


def test_running_rows_come_before_new_ones_and_new_ones_share_what_is_left():
    engine = fake_engine(cache=NO_CACHE, max_num_batched_tokens=16)
    engine.add(request("a", [1] * 4, max_tokens=8))
    engine.step()
    engine.add(request("b", [2] * 10, max_tokens=8))
    engine.add(request("c", [3] * 10, max_tokens=8))
    engine.step()
    engine.step()
    assert sent(engine) == [
        [("a#0", 0, 4)],
        [("a#0", 4, 1), ("b#0", 0, 10), ("c#0", 0, 5)],
        [("a#0", 5, 1), ("b#0", 10, 1), ("c#0", 5, 5)],
    ]


def test_every_running_row_gets_its_token_while_a_long_prompt_is_prefilled():
    engine = fake_engine(cache=NO_CACHE, max_num_batched_tokens=8)
    engine.add(request("long", [9] * 60, max_tokens=1))
    engine.step()
    for name in "abc":
        engine.add(request(name, [1], max_tokens=30))
    for _ in range(8):
        engine.step()
    # the budget is the long prompt's until it is done: it came first
    assert sent(engine)[:8] == [[("long#0", 8 * i, min(8, 60 - 8 * i))] for i in range(7)] + [
        [("long#0", 56, 4), ("a#0", 0, 1), ("b#0", 0, 1), ("c#0", 0, 1)]
    ]
    drain(engine)
    engine = fake_engine(cache=NO_CACHE, max_num_batched_tokens=8)
    for name in "abc":
        engine.add(request(name, [1], max_tokens=30))
    engine.step()
    engine.add(request("long", [9] * 60, max_tokens=1))
    engine.step()
    engine.step()
    three = ("a#0", 1, 1), ("b#0", 1, 1), ("c#0", 1, 1)
    assert sent(engine)[1] == [*three, ("long#0", 0, 5)]
    assert [row[2] for row in sent(engine)[2]] == [1, 1, 1, 5]


def test_a_running_prompt_leaves_a_token_for_each_row_behind_it():
    engine = fake_engine(cache=NO_CACHE, max_num_batched_tokens=8, max_num_seqs=3)
    engine.add(request("a", [1] * 7, max_tokens=4))
    engine.add(request("b", [2] * 30, max_tokens=1))
    engine.step()
    engine.step()
    engine.add(request("c", [3], max_tokens=1))
    engine.step()
    assert sent(engine) == [
        [("a#0", 0, 7), ("b#0", 0, 1)],
        [("a#0", 7, 1), ("b#0", 1, 7)],
        [("a#0", 8, 1), ("b#0", 8, 7)],
    ]


def test_no_row_starves_when_the_budget_is_one_token_a_row():
    engine = fake_engine(cache=NO_CACHE, max_num_batched_tokens=4, max_num_seqs=4)
    for name in "abcd":
        engine.add(request(name, [ord(name)] * 3, max_tokens=3))
    events = drain(engine)
    assert {name: tokens_of(events[name]) for name in "abcd"} == {
        name: [ord(name) + i for i in (1, 2, 3)] for name in "abcd"
    }
    for step in sent(engine):
        assert sum(row[2] for row in step) <= 4


def test_first_come_first_served_over_max_num_seqs():
    engine = fake_engine(max_num_seqs=2)
    for name in "abcd":
        engine.add(request(name, [ord(name)], max_tokens=3))
    engine.step()
    assert [r.parent_id for r in engine.scheduler.running] == ["a", "b"]
    assert [r.parent_id for r in engine.scheduler.waiting] == ["c", "d"]
    events = drain(engine)
    assert list(events) == ["a", "b", "c", "d"]
    assert max(len(step) for step in sent(engine)) == 2


def test_a_step_is_sent_before_the_one_before_it_is_read():
    engine = fake_engine()
    engine.add(request("a", [1, 2], max_tokens=3))
    assert engine.step() == []
    assert (len(engine.runner.sent), engine.runner.num_read) == (1, 0)
    assert [e.token_ids for e in engine.step()] == [(3,)]
    assert (len(engine.runner.sent), engine.runner.num_read) == (2, 1)
    assert [e.token_ids for e in engine.step()] == [(4,)]
    last = engine.step()  # its last token is in flight: nothing to send
    assert [(e.token_ids, e.finished) for e in last] == [((5,), True)]
    assert (len(engine.runner.sent), engine.runner.num_read) == (3, 3)
    assert_idle(engine)


def test_a_limit_is_known_in_advance_so_no_step_is_wasted_on_it():
    engine = fake_engine()
    engine.add(request("a", [1], max_tokens=4))
    drain(engine)
    assert sent(engine) == [[("a#0", i, 1)] for i in range(4)]


def test_a_stop_is_not_known_in_advance_and_what_was_drawn_beyond_it_is_dropped():
    engine = fake_engine()
    engine.add(request("a", [1], max_tokens=9, stop_token_ids=[4]))
    events = drain(engine)
    assert tokens_of(events["a"]) == [2, 3, 4]
    assert sent(engine) == [[("a#0", i, 1)] for i in range(4)]
    assert_idle(engine)


def test_chunks_end_where_snapshots_are_due():
    # unit 8, a prompt of 5 units: a snapshot on every unit, and at the end
    engine = fake_engine()
    engine.add(request("a", range(1, 44), max_tokens=1))
    drain(engine)
    assert sent(engine) == [[("a#0", start, min(8, 43 - start))] for start in range(0, 43, 8)]


def test_long_prompts_have_snapshots_at_intervals_and_on_the_last_unit():
    engine = fake_engine(cache={"snapshot_interval_tokens": 32})
    engine.add(request("a", [i % 250 for i in range(101)], max_tokens=1))
    drain(engine)
    assert sent(engine) == [[("a#0", 0, 32)], [("a#0", 32, 32)], [("a#0", 64, 32)], [("a#0", 96, 5)]]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole():
    engine = fake_engine(cache=NO_CACHE, enable_chunked_prefill=False, max_num_batched_tokens=32)
    engine.add(request("a", [1] * 20, max_tokens=2))
    engine.add(request("b", [2] * 20, max_tokens=1))
    engine.add(request("c", [3] * 31, max_tokens=1))
    drain(engine)
    assert sent(engine) == [
        [("a#0", 0, 20)],
        [("a#0", 20, 1), ("b#0", 0, 20)],
        [("c#0", 0, 31)],
    ]
    with pytest.raises(RequestError, match="33 tokens, more than max_num_batched_tokens=32"):
        engine.add(request("d", [1] * 33, max_tokens=1))


def test_without_chunked_prefill_snapshots_do_not_cut_a_prompt():
    engine = fake_engine(enable_chunked_prefill=False, max_num_batched_tokens=32)
    engine.add(request("a", [1] * 29, max_tokens=1))
    drain(engine)
    assert sent(engine) == [[("a#0", 0, 29)]]


# CSA pages of 8 entries hold 32 tokens: a request of up to 35 tokens needs one, and another one to go on.
def test_the_last_admitted_is_preempted_first_and_resumes_first():
    engine = fake_engine(cache=NO_CACHE, num_pages={EntryKind.CSA: 4})
    engine.add(request("a", [1] * 28, max_tokens=20))
    for name in "bcd":
        engine.add(request(name, [ord(name)] * 28, max_tokens=20))
    events = drain(engine)
    assert engine.stats().num_preemptions > 0
    order = []  # the steps in which a prompt was begun
    for step in sent(engine):
        order += [row[0][0] for row in step if row[1] == 0]
    assert order[:4] == ["a", "b", "c", "d"]
    for name in "abcd":
        last = 1 if name == "a" else ord(name)
        assert tokens_of(events[name]) == list(range(last + 1, last + 21))
    assert_idle(engine)


def test_preemption_step_by_step():
    engine = fake_engine(cache=NO_CACHE, num_pages={EntryKind.CSA: 2}, max_num_batched_tokens=64)
    engine.add(request("a", [1] * 30, max_tokens=8))
    engine.add(request("b", [2] * 30, max_tokens=4))
    events = drain(engine)
    assert sent(engine) == [
        [("a#0", 0, 30), ("b#0", 0, 30)],
        [("a#0", 30, 1), ("b#0", 30, 1)],
        [("a#0", 31, 1), ("b#0", 31, 1)],  # up to 32 tokens: page 0
        [("a#0", 32, 1), ("b#0", 32, 1)],
        [("a#0", 33, 1)],  # b ended at 34 tokens, its last in flight
        [("a#0", 34, 1)],
        [("a#0", 35, 1)],  # token 36 completes the entry that begins page 1
        [("a#0", 36, 1)],
    ]
    assert engine.stats().num_preemptions == 0
    engine.add(request("a", [1] * 30, max_tokens=8))
    engine.add(request("b", [2] * 30, max_tokens=8))
    engine.runner.sent.clear()
    engine.runner.num_read = 0
    events = drain(engine)
    assert sent(engine) == [
        [("a#0", 0, 30), ("b#0", 0, 30)],
        *[[("a#0", 30 + i, 1), ("b#0", 30 + i, 1)] for i in range(5)],
        [("a#0", 35, 1)],  # a needs a second page: b is preempted, its token 36 in flight
        [("a#0", 36, 1)],
        [("b#0", 0, 36)],  # from the start, with all its tokens
        [("b#0", 36, 1)],
    ]
    assert tokens_of(events["b"]) == list(range(3, 11))
    assert engine.stats().num_preemptions == 1


def test_a_preempted_request_waits_for_its_token_in_flight():
    engine = fake_engine()
    engine.add(request("a", [1] * 5, max_tokens=6))
    engine.step()
    (running,) = engine.scheduler.running
    assert running.num_pending == 1
    preempt(engine.scheduler, running)
    assert (running.status, running.num_computed, running.slot) == (Status.WAITING, 0, -1)
    assert [e.token_ids for e in engine.step()] == [(2,)]  # nothing sent: how it goes on was not known
    assert len(engine.runner.sent) == 1
    assert tokens_of(drain(engine)["a"]) == [3, 4, 5, 6, 7]
    assert sent(engine)[1] == [("a#0", 5, 1)]  # what it had computed came from the prefix cache
    assert_idle(engine)


def test_siblings_wait_for_the_first_ones_prompt_and_then_hit_it():
    engine = fake_engine(max_num_batched_tokens=16)
    engine.add(request("a", range(100, 140), n=3, max_tokens=2))
    engine.add(request("b", [1] * 5, max_tokens=1))
    events = drain(engine)
    steps = sent(engine)
    assert steps[0] == [("a#0", 0, 8), ("b#0", 0, 5)]  # the siblings let others pass
    assert [step[0] for step in steps[1:5]] == [("a#0", 8 * i, 8) for i in (1, 2, 3, 4)]
    assert steps[5] == [("a#0", 40, 1), ("a#1", 32, 8), ("a#2", 32, 7)]
    for index in range(3):
        assert tokens_of(events["a"], index) == [140, 141]
    first = {e.index: e.num_cached_tokens for e in events["a"]}
    assert first == {0: 0, 1: 32, 2: 32}
    assert_idle(engine)


@pytest.mark.parametrize("end", ["finish", "cancel", "preempt"])
def test_siblings_go_on_when_the_first_ends_early(end):
    engine = fake_engine(cache=NO_CACHE, max_num_batched_tokens=8)
    engine.add(request("a", [5] * 20, n=2, max_tokens=1 if end == "finish" else 4))
    engine.step()
    first = engine.scheduler.running[0]
    if end == "preempt":
        preempt(engine.scheduler, first)
    if end == "cancel":
        engine._end(engine._by_request[first], keep=False)
    events = drain(engine)
    assert tokens_of(events["a"], 1) == ([6] if end == "finish" else [6, 7, 8, 9])
    assert_idle(engine)


def test_the_queue_is_bounded_and_n_counts():
    engine = fake_engine(max_num_waiting=3, max_num_seqs=1)
    engine.add(request("a", [1], n=2))
    with pytest.raises(RequestError, match="max_num_waiting=3") as caught:
        engine.add(request("b", [1], n=2))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    with pytest.raises(RequestError, match="n=4 is more than may wait: max_num_waiting=3") as caught:
        engine.add(request("b", [1], n=4))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    engine.add(request("b", [1], max_tokens=1))
    with pytest.raises(RequestError, match="3 requests are waiting"):
        engine.add(request("c", [1]))
    engine.step()  # one runs now
    engine.add(request("c", [1], max_tokens=1))
    assert engine.stats().num_waiting == 3
    assert (engine.cancel("a"), engine.cancel("c")) == (True, True)
    drain(engine)
    assert_idle(engine)


def test_a_head_that_does_not_fit_holds_back_those_behind_it():
    # one page of CSA: the second long prompt waits for the first, and the short one behind it does not overtake
    engine = fake_engine(cache=NO_CACHE, num_pages={EntryKind.CSA: 1}, max_num_batched_tokens=64)
    for name, length in (("a", 20), ("b", 20), ("c", 3)):
        engine.add(request(name, [ord(name)] * length, max_tokens=2))
    drain(engine)
    assert sent(engine) == [
        [("a#0", 0, 20)],
        [("a#0", 20, 1)],
        [("b#0", 0, 20), ("c#0", 0, 3)],
        [("b#0", 20, 1)],  # token 4 of c completes an entry, and b holds the page
        [("c#0", 0, 4)],
    ]
