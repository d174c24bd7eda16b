"""Files of a cache on disk are used by the model, layout and rounding that wrote them, and by no other."""

from __future__ import annotations

import dataclasses
import shutil
from types import SimpleNamespace

import pytest

from dsjax.config import EngineConfig, override_all
from dsjax.errors import ConfigError
from dsjax.fingerprint import cache_fingerprint
from dsjax.load import make_tiers, model_dir
from tests.cache.specs import cache_spec

TIERS = [
    ("tiers.host_cache_bytes", "1000"),
    ("tiers.disk_cache_bytes", "1000"),
]


def runner(stages: int = 1, platform: str = "cpu", **spec):
    mesh, target = SimpleNamespace(shape={"stage": stages}), SimpleNamespace(platform=platform)
    return SimpleNamespace(spec=cache_spec(**spec), mesh=mesh, target=target)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(model_dir("dsjax-nano"), tmp_path / "model")


def test_it_names_all_that_entries_depend_on(folder):
    config = EngineConfig(model=str(folder))
    plain = cache_fingerprint(folder, config, runner())
    assert plain == cache_fingerprint(folder, config, runner(num_blocks=9, num_snapshots=3, num_seqs=1))
    others = [
        cache_fingerprint(folder, dataclasses.replace(config, dtype="bfloat16"), runner()),
        cache_fingerprint(folder, override_all(config, [("tiers.host_cache_dtype", "int8")]), runner()),
        *(
            cache_fingerprint(folder, config, runner(**changes))
            for changes in (
                {"page": 16},
                {"unit": 16},
                {"dtype": "bfloat16"},
                {"kv_cache_dtype": "int8"},
                {"num_parts": 2},
                {"window": 16},
                {"hca_ratio": 16},
                {"stages": 2},
                {"platform": "gpu"},
            )
        ),
    ]
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes())  # another time
    others.append(cache_fingerprint(folder, config, runner()))
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    others.append(cache_fingerprint(folder, config, runner()))
    assert len({plain, *others}) == 1 + len(others)


def test_tiers_are_off_by_default(folder, tmp_path):
    config = EngineConfig(model=str(folder))
    assert make_tiers(config, folder, runner()) is None  # type: ignore[arg-type]
    host = make_tiers(override_all(config, TIERS[:1]), folder, runner())  # type: ignore[arg-type]
    assert host is not None and host.disk is None and host.host_bytes == 1000
    # One after the other, as flags are, in any order.
    both = override_all(config, [("tiers.disk_cache_dir", str(tmp_path / "cache")), *TIERS[::-1]])
    tiers = make_tiers(both, folder, runner())  # type: ignore[arg-type]
    assert tiers is not None and tiers.disk is not None and (tmp_path / "cache").is_dir()
    tiers.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("distributed.num_processes", "2"), ("distributed.coordinator_address", "h:1"), TIERS[0]],
            "host_cache_bytes=1000 needs num_processes=1, and not 2",
        ),
        (
            [("cache.num_snapshots", "0"), TIERS[0]],
            "host_cache_bytes=1000 needs enable_prefix_caching and num_snapshots=0",
        ),
        ([("cache.enable_prefix_caching", "false"), TIERS[0]], "host_cache_bytes=1000 needs enable_prefix_caching"),
        ([("scheduler.preemption_mode", "swap")], "preemption_mode='swap' needs host_cache_bytes"),
        ([("tiers.disk_cache_dir", "x")], "disk_cache_dir='x' needs host_cache_bytes"),
        ([TIERS[0], ("tiers.disk_cache_dir", "x"), ("tiers.disk_cache_bytes", "0")], "'x' needs disk_cache_bytes"),
    ],
)
def test_what_tiers_need(changes, message):
    with pytest.raises(ConfigError, match=message):
        override_all(EngineConfig(model="m"), changes)
