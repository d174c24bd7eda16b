"""Workload files, random requests and arrival times."""

import itertools
import json
import math

import pytest

from benchmarks.metrics import Record
from benchmarks.workloads import Sessions, WorkItem, arrival_times, load, make_mix, make_random, save


def test_file_round_trip(tmp_path):
    items = [WorkItem(id=7, prompt=(3, 4, 5), max_tokens=2), WorkItem(id=0, prompt=(9,), max_tokens=64)]
    save(tmp_path / "w.json", items)
    assert json.loads((tmp_path / "w.json").read_text())[0] == {"id": 7, "prompt": [3, 4, 5], "max_tokens": 2}
    assert load(tmp_path / "w.json") == items


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"id": 0, "prompt": [1]}], "entry 0 lacks 'max_tokens'"),
        ([{"id": 0, "prompt": [], "max_tokens": 1}], "entry 0 needs a prompt of at least 1 token"),
        ([{"id": 0, "prompt": [1], "max_tokens": 0}], "max_tokens of at least 1"),
        ([{"id": 0, "prompt": [1], "max_tokens": 1}] * 2, "ids are not unique"),
        ([], "must be a list of at least one entry"),
        ({}, "must be a list of at least one entry"),
        ([3], "entry 0 lacks 'id'"),
        ([{"id": 0, "prompt": "hi", "max_tokens": 1}], "entry 0 needs a list of ids as prompt"),
        ([{"id": 0, "prompt": [1], "max_tokens": "x"}], "entry 0 needs .*, and numbers as id and max_tokens"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, entries, message):
    path = tmp_path / "w.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_random_lengths_and_ids():
    items = make_random(num_prompts=50, input_len=10, output_len=4, vocab_size=20, range_ratio=0.5, seed=1)
    assert [item.id for item in items] == list(range(50))
    assert {len(item.prompt) for item in items} == set(range(5, 16))
    assert {item.max_tokens for item in items} == set(range(2, 7))
    assert {token for item in items for token in item.prompt} == set(range(3, 20))


def test_random_is_a_function_of_the_seed():
    def make(seed):
        return make_random(num_prompts=4, input_len=8, output_len=2, vocab_size=100, seed=seed)

    assert make(5) == make(5)
    assert make(5) != make(6)
    assert [(len(item.prompt), item.max_tokens) for item in make(5)] == [(8, 2)] * 4


def test_random_prefix_is_shared():
    items = make_random(num_prompts=3, input_len=4, output_len=1, vocab_size=100, prefix_len=6, seed=0)
    assert {len(item.prompt) for item in items} == {10}
    assert len({item.prompt[:6] for item in items}) == 1
    assert len({item.prompt[6:] for item in items}) == 3


def test_arrivals_at_an_infinite_rate_are_all_at_once():
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]


def test_arrivals_are_poisson():
    times = arrival_times(20_001, 4.0, seed=2)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) > 0
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.03)  # 20,000 gaps: 4 standard errors
    assert times == arrival_times(20_001, 4.0, seed=2)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ValueError, match="request_rate"):
        arrival_times(3, rate)


def test_a_mix_has_its_classes_in_random_order():
    items = make_mix([(3, 4, 2), (2, 9, 5)], vocab_size=50, seed=1)
    assert sorted(item.id for item in items) == [0, 1, 2, 3, 4] and [item.id for item in items] != [0, 1, 2, 3, 4]
    assert {item.id: (len(item.prompt), item.max_tokens) for item in items} == {
        0: (4, 2),
        1: (4, 2),
        2: (4, 2),
        3: (9, 5),
        4: (9, 5),
    }
    assert make_mix([(3, 4, 2), (2, 9, 5)], vocab_size=50, seed=1) == items


def test_a_turn_continues_the_conversation():
    sessions = Sessions(
        num_users=2, num_turns=2, first_len=5, turn_len=3, output_len=2, vocab_size=50, think_s=1.0, start_s=10.0
    )
    items, arrivals = sessions.begin()
    assert [item.id for item in items] == [0, 2] and arrivals == [0.0, 5.0]
    record = Record(id=2, prompt_len=5, start_s=5.0, token_times_s=[6.0, 7.0], token_ids=[8, 9])
    think_s, turn = sessions.follow(items[1], record)
    assert think_s > 0 and turn.id == 3 and turn.prompt[:7] == (*items[1].prompt, 8, 9) and len(turn.prompt) == 10
    assert sessions.follow(turn, record) is None
    assert sessions.follow(items[1], Record(id=2, prompt_len=5, start_s=5.0, error="INTERNAL: gone")) is None
