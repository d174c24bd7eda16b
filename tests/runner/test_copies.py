"""Copies of pages that a plan wants, as they are sent to the device."""

from __future__ import annotations

import numpy as np
import pytest

from dsjax.cache.spec import Copy, EntryKind
from dsjax.config import CacheConfig, SchedulerConfig
from dsjax.load import make_runner
from dsjax.scheduler.plan import ShardPlan, StepPlan
from pallas_kernels.cache_write import NOWHERE
from tests.fakes import SMALL_CACHE
from tests.tiny_model import tiny_config, tiny_params


@pytest.mark.parametrize(("copies", "size"), [(1, 4), (4, 4), (5, 16), (17, 64), (200, 256), (768, 768)])
def test_a_call_has_about_as_many_places_as_copies_are_wanted(copies, size, monkeypatch):
    """It moves a page of every layer for each of its places: with 768 for five, it took as long as a large step."""
    scheduler = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=256, max_model_len=64)
    runner, _ = make_runner(
        tiny_config(), lambda *_: tiny_params(), cache=CacheConfig(**SMALL_CACHE), scheduler=scheduler
    )
    sent = []
    monkeypatch.setattr(runner, "launch", lambda key, arrays: sent.append((key, arrays[0])))
    some = [Copy(EntryKind.WINDOW, src, src + 1000) for src in range(copies)]
    runner.move(StepPlan(shards=(ShardPlan(copies=some),)))
    ((key, pairs),) = sent
    assert key == pairs.shape[-1] == size
    window = pairs[0, runner.copy_kinds.index(EntryKind.WINDOW)]
    np.testing.assert_array_equal(window[:, :copies].T, [(copy.src, copy.dst) for copy in some])
    assert (window[:, copies:] == NOWHERE).all()
