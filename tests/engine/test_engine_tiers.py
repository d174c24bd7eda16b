"""What left the device and came back is what was there: answers through host memory and disk equal the solo run.

On a real model with NaN-filled pools; faults 6, 9 and 13 of other engines.
"""

from __future__ import annotations

import pytest

from dsjax.cache.tiers import Tiers
from tests.fakes import assert_idle, drain, request, tokens_of
from tests.tiny_model import random_prompt, solo, tiny_engine

NUM_OUTPUT = 6
FEW = {"num_snapshots": 2}


def answer(engine, prompt, num_output=NUM_OUTPUT, **params):
    """(tokens, cached tokens) of one more request."""
    engine.add(request("one", prompt, max_tokens=num_output, **params))
    events = drain(engine)["one"]
    return tokens_of(events), events[-1].num_cached_tokens


def flood(engine, seed=100):
    """Other traffic, after which no snapshot of before is on the device."""
    answer(engine, random_prompt(seed, 17), 1)


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 31, 65])
def test_through_host_memory(length):
    engine, prompt = tiny_engine(cache=FEW, tiers=Tiers(1 << 24)), random_prompt(5, length)
    want = solo(prompt, NUM_OUTPUT)
    assert answer(engine, prompt) == (want, 0)
    flood(engine)
    hits = engine.stats().num_tier_hits
    cached = (length - 1) // 8 * 8
    assert answer(engine, prompt) == (want, cached)
    turn = [*prompt, *want, 5, 6]
    flood(engine, 101)
    assert answer(engine, turn) == (solo(turn, NUM_OUTPUT), length + NUM_OUTPUT - 1)
    stats = engine.stats()
    assert stats.num_tier_hits - hits == 1 + (cached > 0)
    assert stats.num_tier_cached_tokens == cached + length + NUM_OUTPUT - 1
    assert_idle(engine)
