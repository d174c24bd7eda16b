"""Prefix hits through host memory against a golden set: the logits are those of the recorded run."""

from __future__ import annotations

import dataclasses

import pytest

from dsjax.cache.tiers import Tiers
from dsjax.config import EngineConfig, ModelConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.verify import Golden, read_golden, recording_runner
from tests.fakes import assert_idle, request
from tests.golden_sets import sets
from tests.model.test_golden_full import ATOL

FOLDER = next(f for f in sets() if f.name == "g4_mixed")


@pytest.mark.slow
def test_hits_through_host_memory_give_the_same_logits():
    """Every prompt twice, and the next turn of each; a device that keeps two snapshots brings the others up."""
    config, golden = ModelConfig.from_dir(FOLDER), read_golden(FOLDER)[-4:]
    longest = max(len(p.ids) + len(p.greedy_ids) for p in golden)
    recording, max_model_len = recording_runner(
        FOLDER,
        config,
        longest,
        cache={"enable_prefix_caching": True, "prefix_unit_tokens": 8, "num_snapshots": 2},
        host_cache_dtype="auto",
    )
    runner = recording.runner
    recording.move, recording.host_bytes_per_s = runner.move, 0.0  # type: ignore[attr-defined]
    recording.downloaded = lambda wait=False: runner.downloaded(wait=True)  # type: ignore[attr-defined]
    engine = Engine(
        config=EngineConfig(model="golden", scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)),
        model_config=config,
        runner=recording,  # type: ignore[arg-type]
        tokenizer=None,
        max_model_len=max_model_len,
        tiers=Tiers(1 << 30),
    )
    for turn in ("first", "again"):
        prompts = {f"{turn}-{p.index}": dataclasses.replace(p, greedy=[], difference=0.0) for p in golden}
        recording.prompts = prompts
        for name, prompt in prompts.items():
            cached = _run(engine, name, prompt)
            assert cached == (0 if turn == "first" else (len(prompt.ids) - 1) // 8 * 8), name
    assert engine.stats().num_tier_hits >= len(golden)
    assert_idle(engine)


def _run(engine: Engine, name: str, prompt: Golden) -> int:
    """Returns the cached tokens."""
    engine.add(request(name, prompt.ids.tolist(), max_tokens=12))
    cached = 0
    while engine.has_work():
        for event in engine.step():
            prompt.greedy += event.token_ids
            cached = event.num_cached_tokens
    assert prompt.greedy == prompt.greedy_ids[:12].tolist(), name
    assert prompt.difference <= ATOL, name
    return cached
