"""Thousands of random operations with tiers below the device, against a model of it: what comes back is what went."""

from __future__ import annotations

import pytest

from dsjax.cache.disk import Disk
from dsjax.cache.tiers import Tiers
from tests.cache.inline import Inline
from tests.cache.test_manager_random import SPECS, World

NAMES = (
    "tight",
    "one at a time",
    "few window pages",
    "unit shorter than an entry",
    "pages longer than units",
    "window of one",
    "wide window",
    "sliding only",
    "one snapshot",
)


@pytest.mark.parametrize("name", NAMES)
def test_random_operations(name):
    tiers = Tiers(20_000)
    world = World(SPECS[name], seed=2, tiers=tiers)
    world.run(500)
    assert tiers.num_hits > 5 and tiers.num_cached_tokens > 50 and tiers.num_bytes > 5_000
    manager = world.manager
    assert manager.num_free + manager.num_cached == manager.num_total and manager.usage == 0
    manager.reset_prefix_cache()
    tiers.clear()
    tiers.check()
    manager.check()
    assert (manager.num_free, tiers.num_bytes) == (manager.num_total, 0)


def test_random_operations_with_a_disk(tmp_path):
    """The host holds a few records, so most come from files."""
    disk = Disk(tmp_path, 300_000, "model", Inline(), Inline())
    tiers = Tiers(6_000, disk)
    world = World(SPECS["tight"], seed=2, tiers=tiers)
    world.run(800)
    assert tiers.num_hits > 10 and tiers.num_loads > 5 and tiers.num_evicted > 10
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == disk.num_bytes > 200_000
    assert (disk.num_damaged, disk.num_foreign) == (0, 0)
    tiers.clear()
    assert list(tmp_path.iterdir()) == [] and disk.num_bytes == 0


class Limited(World):
    """Salts are tenants; one has a limit."""

    def op(self) -> None:
        super().op()
        assert self.manager.prefix.num_cached_tokens("tenant") <= 40
        self.most = max(getattr(self, "most", 0), self.manager.prefix.num_cached_tokens("tenant"))


@pytest.mark.parametrize("name", ["roomy", "tight", "one snapshot"])
def test_a_tenant_stays_within_its_limit(name):
    world = Limited(SPECS[name], seed=3, tiers=Tiers(20_000), tenant_tokens={"tenant": 40})
    world.run(600)
    assert world.most == 40 and world.num_hits > 10
