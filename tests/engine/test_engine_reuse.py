"""A prompt sent again and again to a real model, each time with another answer."""

import pytest

from dsjax.cache.spec import EntryKind
from tests.engine.test_engine_equal import answer
from tests.tiny_model import random_prompt, solo, tiny_engine


@pytest.mark.parametrize(("length", "num_pages"), [(37, {EntryKind.CSA: 4}), (29, {EntryKind.HCA: 2})])
def test_random_answers_do_not_drive_out_the_prompt_that_they_share(length, num_pages):
    engine, prompt = tiny_engine(num_pages=num_pages, max_num_seqs=2), random_prompt(0, length)
    hits = [answer(engine, prompt, 6, temperature=1.0, seed=seed)[1] for seed in range(20)]
    assert hits == [0, *[(length - 1) // 8 * 8] * 19]
    assert answer(engine, prompt, 6) == (solo(prompt, 6), (length - 1) // 8 * 8)
