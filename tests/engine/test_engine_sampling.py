"""Seeds, penalties, logprobs and the stops that the step itself holds back, on a real model."""

import numpy as np
import pytest

from dsjax.request import FinishReason
from tests import fakes
from tests.fakes import ByteTokenizer, assert_idle, drain, request, tokens_of
from tests.tiny_model import random_prompt, solo, tiny_config, tiny_engine

NO_CACHE = {"enable_prefix_caching": False}
PROMPT = random_prompt(3, 12)


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def preempt_once(engine, name, num_tokens):
    """Runs to the end; preempts the request when it has answered so many tokens."""
    events = []
    while engine.has_work():
        running = [r for r in engine.scheduler.running if r.parent_id == name]
        if running and len(tokens_of(events)) == num_tokens and not running[0].num_preemptions:
            fakes.preempt(engine.scheduler, running[0])
        events += [e for e in engine.step() if e.request_id == name]
    return events


SAMPLED = {
    "temperature": 1.0,
    "seed": 1234,
    "top_p": 0.95,
    "top_k": 40,
    "presence_penalty": 0.5,
    "logit_bias": {9: 2.0},
}


def test_a_seeded_request_gives_the_same_tokens_in_any_company():
    alone = tiny_engine(max_num_seqs=1, cache=NO_CACHE)
    alone.add(request("me", PROMPT, max_tokens=12, **SAMPLED))
    want = tokens_of(drain(alone)["me"])
    assert want != solo(PROMPT, 12)
    engine, found = tiny_engine(max_num_seqs=5, max_num_batched_tokens=16), []
    for i in range(7):
        engine.add(
            request(f"r{i}", random_prompt(i, 5 + 3 * i), max_tokens=9, temperature=0.3 * i, logit_bias={i: 1.0})
        )
        if i in (0, 3):
            engine.add(request(f"me{i}", PROMPT, max_tokens=12, **SAMPLED))
        found += engine.step()
    found += [event for events in drain(engine).values() for event in events]
    for name in ("me0", "me3"):
        assert tokens_of([e for e in found if e.request_id == name]) == want
    again = tiny_engine(max_num_seqs=5)
    for name in ("a", "b"):  # the second hits the first one's prefix
        again.add(request(name, PROMPT, max_tokens=12, **SAMPLED))
        again.add(request(name + "2", PROMPT, max_tokens=12, **{**SAMPLED, "seed": 1}))
        events = drain(again)
        assert tokens_of(events[name]) == want
        assert tokens_of(events[name + "2"]) != want


@pytest.mark.parametrize("num_tokens", [1, 4, 7])
@pytest.mark.parametrize("budget", [4, 64])
def test_penalties_and_seed_survive_preemption(num_tokens, budget):
    params = {**SAMPLED, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
    alone = tiny_engine(max_num_seqs=1, cache=NO_CACHE)
    alone.add(request("me", PROMPT, max_tokens=12, **params))
    want = tokens_of(drain(alone)["me"])
    engine = tiny_engine(max_num_seqs=2, max_num_batched_tokens=budget, cache=NO_CACHE)
    engine.add(request("me", PROMPT, max_tokens=12, **params))
    assert tokens_of(preempt_once(engine, "me", num_tokens)) == want


def test_n_draws_differ_and_are_those_of_their_seeds():
    engine = tiny_engine()
    engine.add(request("a", PROMPT, n=3, max_tokens=8, temperature=1.0, seed=40))
    events = drain(engine)["a"]
    drawn = [tokens_of(events, index) for index in range(3)]
    assert len({tuple(d) for d in drawn}) == 3
    for index in range(3):
        one = tiny_engine(cache=NO_CACHE)
        one.add(request("b", PROMPT, max_tokens=8, temperature=1.0, seed=40 + index))
        assert tokens_of(drain(one)["b"]) == drawn[index]
    greedy = tiny_engine()
    greedy.add(request("a", PROMPT, n=3, max_tokens=8))
    events = drain(greedy)["a"]
    assert [tokens_of(events, index) for index in range(3)] == [solo(PROMPT, 8)] * 3


def test_logprobs_are_the_log_softmax_of_the_logits():
    engine = tiny_engine(max_num_seqs=3, max_num_batched_tokens=7)
    engine.add(request("a", PROMPT, max_tokens=6, logprobs=5))
    engine.add(request("b", PROMPT, max_tokens=6, logprobs=0, temperature=1.5, seed=3, presence_penalty=2.0))
    engine.add(request("c", PROMPT, max_tokens=6))
    events = drain(engine)
    for name, num_top in (("a", 5), ("b", 0)):
        for j, event in enumerate(events[name]):
            want = log_softmax(engine.runner.logits[f"{name}#0"][len(PROMPT) - 1 + j])
            (found,) = event.logprobs
            assert (found.token_id,) == event.token_ids
            assert found.logprob == pytest.approx(want[found.token_id], abs=1e-4)
            assert found.rank == 1 + (want > want[found.token_id]).sum()
            assert [i for i, _ in found.top] == np.argsort(-want, kind="stable")[:num_top].tolist()
            assert [p for _, p in found.top] == pytest.approx(np.sort(want)[::-1][:num_top], abs=1e-4)
    assert all(e.logprobs == () for e in events["c"])


@pytest.mark.parametrize("preempt", [False, True])
def test_prompt_logprobs_come_once_and_whole(preempt):
    prompt = random_prompt(4, 37)  # more than the positions whose logits exist at a time
    engine = tiny_engine(max_num_batched_tokens=10)
    engine.add(request("warm", prompt, max_tokens=1))
    drain(engine)  # a hit would leave out what is asked for
    engine.add(request("a", prompt, max_tokens=3, prompt_logprobs=2, n=2))
    if preempt:
        for _ in range(2):
            engine.step()
        fakes.preempt(engine.scheduler, engine.scheduler.running[-1])
    events = drain(engine)["a"]
    for index in range(2):
        mine = [e for e in events if e.index == index]
        assert tokens_of(mine, index) == solo(prompt, 3)
        assert [e.prompt_logprobs is None for e in mine] == [False, True, True]
        assert mine[0].num_cached_tokens == 0
        first, *rest = mine[0].prompt_logprobs
        assert first is None and len(rest) == 36
        for position, found in enumerate(rest, 1):
            want = log_softmax(engine.runner.logits[f"a#{index}"][position - 1])
            assert found.token_id == prompt[position]
            assert found.logprob == pytest.approx(want[prompt[position]], abs=1e-4)
            assert found.rank == 1 + (want > want[prompt[position]]).sum()
            assert [i for i, _ in found.top] == np.argsort(-want, kind="stable")[:2].tolist()


def greedy_with_a_late_token(min_index):
    """(prompt, answer, i): the answer's token i does not occur before, so that it can be a stop."""
    for seed in range(50):
        prompt = random_prompt(seed, 10)
        answer = solo(prompt, 16)
        for i in range(min_index, 12):
            if answer[i] not in answer[:i]:
                return prompt, answer, i
    raise AssertionError("no prompt serves")


@pytest.mark.parametrize("by", ["eos", "stop_token_ids"])
def test_a_stop_token_is_held_back_until_min_tokens(by):
    prompt, answer, at = greedy_with_a_late_token(2)
    stop = answer[at]

    def run(**params):
        engine = tiny_engine(eos_token_ids=(stop,) if by == "eos" else ())
        stops = [] if by == "eos" else [stop]
        engine.add(request("a", prompt, max_tokens=16, ignore_eos=by != "eos", stop_token_ids=stops, **params))
        return drain(engine)["a"]

    events = run()
    assert (tokens_of(events), events[-1].finish_reason) == (answer[: at + 1], FinishReason.STOP)
    events = run(min_tokens=at)  # it is token at + 1
    assert tokens_of(events) == answer[: at + 1]
    events = run(min_tokens=at + 2)  # another token takes its place
    tokens = tokens_of(events)
    assert tokens[:at] == answer[:at] and len(tokens) >= at + 2
    assert stop not in tokens[: at + 2]
    assert len(tokens_of(run(min_tokens=16))) == 16


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("min_tokens", [1, 2, 3, 5])
def test_a_preempted_request_still_stops_once_min_tokens_are_reached(budget, min_tokens):
    """Recomputed in one chunk or several, whose first one ends before min_tokens."""
    prompt, answer, at = greedy_with_a_late_token(5)
    engine = tiny_engine(cache=NO_CACHE, max_num_batched_tokens=budget, max_num_seqs=2, eos_token_ids=(answer[at],))
    engine.add(request("a", prompt, max_tokens=16, min_tokens=min_tokens, ignore_eos=False))
    events = preempt_once(engine, "a", 3)
    assert (tokens_of(events), events[-1].finish_reason) == (answer[: at + 1], FinishReason.STOP)
    assert_idle(engine)


def test_min_tokens_holds_against_stop_strings():
    class Letters(ByteTokenizer):
        def token_bytes(self, token_id):
            return b"x"

    for min_tokens in (1, 2, 8, 9):
        engine = tiny_engine(tokenizer=Letters())
        engine.add(request("a", PROMPT, max_tokens=20, stop=["x"], min_tokens=min_tokens))
        events = drain(engine)["a"]
        assert len(tokens_of(events)) == min_tokens
        assert "".join(e.text for e in events) == "x" * (min_tokens - 1)


def test_eos_the_model_does_not_have_is_no_stop():
    engine = tiny_engine(eos_token_ids=(100_000,))
    engine.add(request("a", PROMPT, max_tokens=4, min_tokens=2, ignore_eos=False))
    assert tokens_of(drain(engine)["a"]) == solo(PROMPT, 4)


OTHERS = [token for token in range(tiny_config().vocab_size) if token != 7]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "top_p": 1e-46},  # 0 in float32, and so is the next one's
        {"temperature": 1e-46},
        {"temperature": 1e-7},
        {"temperature": 1e6, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-38},
    ],
)
def test_parameters_at_the_ends_of_their_ranges_are_greedy(params):
    engine = tiny_engine()
    engine.add(request("a", PROMPT, max_tokens=6, seed=1, **params))
    assert tokens_of(drain(engine)["a"]) == solo(PROMPT, 6)


@pytest.mark.parametrize("penalty", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logit_bias", [{7: 1e6}, dict.fromkeys(OTHERS, -1e308), dict.fromkeys(OTHERS, -1e6), dict.fromkeys(OTHERS, -np.inf)]
)
def test_a_bias_at_the_end_of_its_range_leaves_one_token(logit_bias, temperature, penalty):
    engine = tiny_engine()
    params = {"temperature": temperature, "repetition_penalty": penalty, "logit_bias": logit_bias}
    engine.add(request("a", [7], max_tokens=3, seed=1, **params))
    assert tokens_of(drain(engine)["a"]) == [7] * 3


def test_min_tokens_with_one_token_that_does_not_stop():
    engine = tiny_engine()
    engine.add(request("a", PROMPT, max_tokens=10, min_tokens=5, stop_token_ids=OTHERS, logit_bias={7: -1e6}))
    events = drain(engine)["a"]
    tokens = tokens_of(events)
    assert tokens[:5] == [7] * 5 and len(tokens) == 6 and events[-1].matched_stop == tokens[5] != 7
