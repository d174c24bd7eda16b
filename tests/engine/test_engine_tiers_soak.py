"""Random requests with tiers below the device, swapped and recomputed: nothing leaks, no answer is another's."""

from __future__ import annotations

import pytest

from dsjax.cache.disk import Disk
from dsjax.cache.spec import EntryKind
from dsjax.cache.tiers import Tiers
from tests.cache.inline import Inline
from tests.engine.test_engine_soak import Traffic
from tests.fakes import ByteTokenizer, assert_idle, fake_engine

FEW = {"num_pages": {EntryKind.CSA: 5, EntryKind.HCA: 12}, "cache": {"num_snapshots": 3}}
SETTINGS = {
    "swap": {**FEW, "preemption_mode": "swap"},
    "auto": {**FEW, "preemption_mode": "auto"},
    "two shards": {**FEW, "preemption_mode": "swap", "num_shards": 2},
    "recompute": {**FEW, "preemption_mode": "recompute"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_random_traffic(name, tmp_path):
    tiers = Tiers(7_000, Disk(tmp_path, 300_000, "model", Inline(), Inline()))
    engine = fake_engine(tokenizer=ByteTokenizer(), tiers=tiers, **SETTINGS[name])
    traffic = Traffic(engine, seed=8, num_requests=120)
    traffic.run(per_step=0.5 if name == "two shards" else 0.3)
    stats = engine.stats()
    assert stats.num_tier_hits > 10 and stats.num_tier_loads > 5 and stats.num_preemptions > 5
    assert (stats.num_swaps > 5) == (name != "recompute")
    assert stats.num_tier_cached_tokens >= 8 * stats.num_tier_hits
    assert_idle(engine)
    engine.reset_prefix_cache()
    assert engine.stats().host_cache_bytes_used == 0 and list(tmp_path.iterdir()) == []
