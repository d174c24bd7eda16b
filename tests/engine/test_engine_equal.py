"""A greedy answer depends on the prompt alone: not on company, chunks, slots, cache hits or preemption.

On a real model with NaN-filled pools; what a request answers alone, in one chunk and without a cache, is the measure.
Faults 1, 3, 4, 6 to 11, 13 and 16 of other engines.
"""

import numpy as np
import pytest

from dsjax.cache.spec import EntryKind
from tests.fakes import assert_idle, drain, preempt, request, tokens_of
from tests.tiny_model import random_prompt, solo, tiny_config, tiny_engine

NO_CACHE = {"enable_prefix_caching": False}
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40, 41)
NUM_OUTPUT = 10
ATOL = 2e-4  # as for the golden data: chunks, and parts on several devices, add up in another order


def prompts(num: int) -> dict[str, list[int]]:
    return {f"r{i}": random_prompt(i, LENGTHS[i % len(LENGTHS)]) for i in range(num)}


def add(engine, name, prompt, num_output=NUM_OUTPUT, **params):
    engine.add(request(name, prompt, max_tokens=num_output, **params))


def answer(engine, prompt, num_output=NUM_OUTPUT, **params):
    """(tokens, cached tokens) of one more request."""
    add(engine, "one", prompt, num_output, **params)
    events = drain(engine)["one"]
    return tokens_of(events), events[-1].num_cached_tokens


def test_the_model_is_worth_testing_with():
    answers = [solo(prompt, NUM_OUTPUT) for prompt in prompts(20).values()]
    assert len({tuple(a) for a in answers}) == 20
    assert all(len(set(a)) > 2 for a in answers)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 64])
def test_64_staggered_requests_answer_as_if_alone(max_num_seqs):
    engine = tiny_engine(max_num_seqs=max_num_seqs)
    waiting, events = list(prompts(64).items()), {}
    while waiting or engine.has_work():
        for _ in range(3):
            if waiting:
                add(engine, *waiting.pop(0))
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    for name, prompt in prompts(64).items():
        assert tokens_of(events[name]) == solo(prompt, NUM_OUTPUT), name
    assert_idle(engine)


def test_two_prompts_and_two_decoding_rows_in_one_step():
    engine = tiny_engine(cache=NO_CACHE)
    lengths = {"c": 6, "d": 21, "a": 13, "b": 9}
    for name in "cd":
        add(engine, name, random_prompt(1, lengths[name]))
    engine.step()
    engine.step()
    for name in "ab":
        add(engine, name, random_prompt(1, lengths[name]))
    plan = engine.scheduler.schedule(0.0)
    expected = [("c", 1), ("d", 1), ("a", 13), ("b", 9)]
    rows = [[(r.request.parent_id, r.num_new) for r in part.rows] for part in plan.shards]
    assert sorted(row for part in rows for row in part) == sorted(expected)
    assert all(part == [row for row in expected if row in part] for part in rows)  # each shard in this order
    engine._in_flight.append(engine._in_flight[0]._replace(plan=plan, output=engine.runner.dispatch(plan)))
    engine.scheduler.dispatched(plan)
    events = {}
    for event in engine._complete(engine._in_flight.popleft()):
        events.setdefault(event.request_id, []).append(event)
    first = {name: tokens_of(e) for name, e in events.items()}
    for name, more in drain(engine).items():
        first[name] = first.get(name, []) + tokens_of(more)
    for name, length in lengths.items():
        want = solo(random_prompt(1, length), NUM_OUTPUT)
        assert first[name][-len(want) + 1 :] == want[1:]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 9, 17, 41])
def test_chunks_of_any_size(chunk):
    prompt = random_prompt(3, 41)
    whole = tiny_engine(max_num_seqs=1, cache=NO_CACHE)
    want, _ = answer(whole, prompt)
    engine = tiny_engine(max_num_seqs=1, cache=NO_CACHE, max_num_batched_tokens=chunk)
    assert answer(engine, prompt)[0] == want
    ours, theirs = engine.runner.logits["one#0"], whole.runner.logits["one#0"]
    assert ours.keys() == theirs.keys() == set(range(41 + NUM_OUTPUT - 1))
    for position, row in theirs.items():
        np.testing.assert_allclose(ours[position], row, atol=ATOL, err_msg=f"position {position}")


def test_a_batch_that_drains_from_eight_to_one():
    engine = tiny_engine()
    for i in range(8):
        add(engine, f"r{i}", random_prompt(i, 5 + i), 3 + 2 * i)
    events, sizes = {}, []
    while engine.has_work():
        sizes.append(engine.stats().num_running)
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert set(sizes) >= set(range(1, 9))
    for i in range(8):
        assert tokens_of(events[f"r{i}"]) == solo(random_prompt(i, 5 + i), 3 + 2 * i)


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 23, 24, 25, 39, 40, 41])
@pytest.mark.parametrize("when", ["after A has ended", "while A runs", "after B took A's slot"])
def test_prefix_hits_at_units_and_beside_them(length, when):
    shared = random_prompt(9, length)
    a, b, c = [*shared, 11, 12], random_prompt(8, 30), [*shared, 21, 22, 23]
    engine = tiny_engine(max_num_seqs=2)
    add(engine, "a", a, 40 if when == "while A runs" else 4)
    if when == "while A runs":
        for _ in range(8):
            engine.step()
        assert engine.scheduler.running
        add(engine, "b", b, 3)
        while any(r.parent_id == "b" for r in (*engine.scheduler.running, *engine.scheduler.waiting)):
            engine.step()
    else:
        drain(engine)
        add(engine, "b", b, 40)
        for _ in range(8):
            engine.step()
        if when == "after A has ended":
            engine.cancel("b")
    tokens, cached = answer(engine, c)
    assert tokens == solo(c, NUM_OUTPUT)
    assert cached == length // 8 * 8
    assert answer(engine, c) == (tokens, (len(c) - 1) // 8 * 8)
    assert_idle(engine)


@pytest.mark.parametrize("length", [8, 9, 16, 17, 32, 33, 40, 64, 65])
def test_a_prompt_sent_again_recomputes_one_token_at_least(length):
    engine, prompt = tiny_engine(), random_prompt(5, length)
    want = solo(prompt, NUM_OUTPUT)
    for expected in (0, (length - 1) // 8 * 8, (length - 1) // 8 * 8):
        before = engine.stats().num_cached_tokens
        assert answer(engine, prompt) == (want, expected)
        assert engine.stats().num_cached_tokens - before == expected


def test_a_turn_that_goes_on_hits_the_end_of_the_one_before():
    """The end of an answer may lie inside a unit and inside windows of both ratios."""
    for length in range(9, 18):
        engine, first = tiny_engine(), random_prompt(6, length)
        tokens, _ = answer(engine, first, 6)
        turn = [*first, *tokens, 5, 6, 7]
        got, cached = answer(engine, turn)
        assert got == solo(turn, NUM_OUTPUT)
        assert cached == length + 5  # the answer's last token was never computed


def test_salts_keep_tenants_apart():
    engine, prompt = tiny_engine(), random_prompt(5, 24)
    want = solo(prompt, NUM_OUTPUT)
    for salt, cached in (("s1", 0), ("s2", 0), ("s1", 16), ("s2", 16), ("", 0)):
        assert answer(engine, prompt, salt=salt) == (want, cached)


@pytest.mark.parametrize("length", [20, 24, 32, 33])
def test_another_last_token_leaves_all_earlier_logits_identical(length):
    prompt = random_prompt(2, length)
    engine = tiny_engine(cache=NO_CACHE)
    answer(engine, prompt, 1)
    x = engine.runner.logits.pop("one#0")
    answer(engine, [*prompt[:-1], (prompt[-1] + 1) % tiny_config().vocab_size], 1)
    y = engine.runner.logits["one#0"]
    for position in range(length - 1):
        assert (x[position] == y[position]).all(), position
    assert (x[length - 1] != y[length - 1]).any()


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_at_each_of_16_successive_steps(caching):
    victim, company = random_prompt(7, 13), random_prompt(8, 10)
    want = solo(victim, 20)
    engine = tiny_engine(max_num_seqs=2, cache={"enable_prefix_caching": caching})
    for step in range(16):
        add(engine, "company", company, 24)
        add(engine, "victim", victim, 20)
        tokens = []
        while engine.has_work():
            running = [r for r in engine.scheduler.running if r.parent_id == "victim"]
            if running and len(tokens) == step and running[0].num_preemptions == 0:
                preempt(engine.scheduler, running[0])
            tokens += tokens_of([e for e in engine.step() if e.request_id == "victim"])
        assert tokens == want, step
        assert engine.stats().num_preemptions == step + 1
    assert_idle(engine)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_because_pages_run_out(caching):
    engine = tiny_engine(
        max_num_seqs=6, cache={"enable_prefix_caching": caching}, num_pages={EntryKind.CSA: 5, EntryKind.HCA: 11}
    )
    for name, prompt in prompts(12).items():
        add(engine, name, prompt, 40)
    events = drain(engine)
    assert engine.stats().num_preemptions > 3
    for name, prompt in prompts(12).items():
        assert tokens_of(events[name]) == solo(prompt, 40), name
    assert_idle(engine)
