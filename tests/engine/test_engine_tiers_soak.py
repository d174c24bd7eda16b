"""Random requests with tiers below the device, swapped and recomputed: nothing leaks, no answer is another's."""

from __future__ import annotations

import pytest

from dsjax.cache.disk import Disk
from dsjax.cache.spec import EntryKind
from dsjax.cache.tiers import Tiers
from dsjax.serving_config import TenantConfig
from tests.cache.inline import Inline
from tests.engine.test_engine_soak import Traffic
from tests.fakes import ByteTokenizer, assert_idle, drain, fake_engine, request

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


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_tenant_keeps_no_more_than_its_cached_tokens(num_shards):
    """The limit is of the whole engine: each data shard has its part of it."""
    tenants = (TenantConfig(name="small", max_cached_tokens=32),)
    engine = fake_engine(tenants=tenants, num_shards=num_shards, max_model_len=128)
    for i in range(6):
        for tenant in ("small", "large"):
            name = f"{tenant}-{i}"
            engine.add(request(name, [i + 1] * 40, tenant=tenant, salt=tenant, max_tokens=1))
        drain(engine)
        cached = {name: sum(c.prefix.num_cached_tokens(name) for c in engine.caches) for name in ("small", "large")}
        assert cached["small"] <= 32 and cached["large"] == 40 * (i + 1)
    assert cached["small"] > 0
    assert_idle(engine)
