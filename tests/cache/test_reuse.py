"""Prompts sent again and again while little else is cached, in the smallest pools: what they hit stays."""

from __future__ import annotations

import random

import pytest

from dsjax.cache.spec import EntryKind
from tests.cache.device_model import prefix_names
from tests.cache.test_manager import Runner

CSA, HCA, WINDOW, STATE = EntryKind.CSA, EntryKind.HCA, EntryKind.WINDOW, EntryKind.STATE
FLASH = {"window": 128, "hca_ratio": 128, "page": 64, "unit": 128, "interval": 2048, "num_snapshots": 64}
TWO_SHORT = {**FLASH, "num_seqs": 2, "budget": 16, "max_model_len": 512}  # 4 CSA pages of 256 tokens, 2 HCA pages
ONE_HCA_PAGE = {**FLASH, "num_seqs": 8, "budget": 64, "max_model_len": 1100, "num_blocks": 24}  # and 6 CSA pages


class Chat(Runner):
    """Answers of random tokens, another one each time."""

    def __init__(self, **changes):
        super().__init__(**changes)
        self.rng, self.num_started = random.Random(0), 0

    def answer(self, prompt: list[int], num_output: int) -> int:
        """Serves one request to its end; returns the tokens that came from the cache."""
        self.num_started += 1
        request_id, tokens = str(self.num_started), prompt + [self.rng.randrange(64) for _ in range(num_output)]
        num_cached = self.start(request_id, prompt).num_cached
        self.go_on(request_id, prompt, len(prompt))
        self.names = prefix_names("", tokens)
        self.go_on(request_id, tokens, len(tokens))
        self.manager.release(request_id, tokens, len(tokens), snapshot=True)
        self.manager.check()
        return num_cached


@pytest.mark.parametrize(("changes", "length"), [(TWO_SHORT, 400), (ONE_HCA_PAGE, 1022)])
@pytest.mark.parametrize("num_output", [1, 2, 10])
def test_a_prompt_sent_again_always_hits_whatever_was_answered(changes, length, num_output):
    """Each answer leaves an end of its own on the last node of the prompt, and the pages of their tails run out."""
    chat, prompt = Chat(**changes), list(range(length))
    hits = [chat.answer(prompt, num_output) for _ in range(20)]
    assert hits == [0, *[(length - 1) // 128 * 128] * 19]


def test_two_prompts_in_turn_both_hit_where_a_kind_has_two_pages():
    chat, prompts = Chat(**TWO_SHORT), [list(range(first, first + 200)) for first in (0, 500)]
    hits = [chat.answer(prompt, 2) for _ in range(6) for prompt in prompts]
    assert hits == [0, 0, *[128] * 10]


def test_an_answer_nobody_went_on_from_goes_before_the_prompt_that_all_share():
    chat, prompt = Chat(**TWO_SHORT), list(range(400))
    for _ in range(6):
        chat.answer(prompt, 1)
    tails = sorted(len(snapshot.tail) for snapshot in chat.manager.prefix.coldest(64))
    assert tails[:4] == [0, 0, 0, 16]  # all of the prompt's own: on each unit and at its end
    assert 0 < tails.count(17) < 6


def test_a_page_that_only_the_hit_lists_is_written_on_in_place():
    runner, tokens = Runner(num_seqs=2), list(range(37))
    runner.complete("a", tokens)
    runner.manager.take_moves()
    found = runner.manager.match(list(range(50)), "")
    assert found.snapshot is not None
    assert runner.start("b", list(range(50))).num_cached == 37
    assert [copy.kind for copy in runner.manager.take_moves().copies] == [STATE]
    b = runner.manager.request("b")
    assert (b.pages, dict(found.snapshot.pages[WINDOW])) == (found.pages, b.window)
    # Another at the same place may not write where b does.
    assert runner.start("c", [*tokens, *range(50)]).num_cached == 37
    assert {copy.kind for copy in runner.manager.take_moves().copies} == {CSA, WINDOW, STATE}
    runner.manager.check()
