"""Presets: each loads, alone and combined, and differs from the others as its docstring says."""

import dataclasses
import importlib

import pytest

from configs import serving
from configs.models import MODELS
from dsjax.cache.spec import CacheSpec
from dsjax.config import EngineConfig
from dsjax.config_fields import field_paths
from dsjax.errors import ConfigError

PROMISES = ("conservative", "balanced", "aggressive")
# GiB of a device's memory, and of the weights on it: README, "Ahead of time"; v5e, a100 and b200 by the same split.
HARDWARE = {
    "v5e": (16, 7.2), "v6e": (32, 11.5), "v5p": (95, 20.1), "tpu7x": (96, 20.1), "a100": (74, 20.1),
    "h100": (79, 20.1), "b200": (178, 20.1),
}  # fmt: skip
TEMPORARIES_GIB = 2.5  # the most of any compiled target's steps
DEVICES = {"v5e": 32, "v6e": 16, "v5p": 8, "tpu7x": 8, "a100": 8, "h100": 8, "b200": 8}


def changed(name: str) -> set[str]:
    """Paths in which a preset's config differs from the default's."""
    default, config = field_paths(serving.DEFAULT), field_paths(serving.load(name))
    return {path for path, value in config.items() if value != default[path]}


def test_every_preset_is_described():
    assert serving.names() == sorted([*PROMISES, *HARDWARE, "nano", "cpu", "development", "production"])
    for name in serving.names():
        module = importlib.import_module(f"configs.serving.{name}")
        assert module.__doc__ and f" {name}" in (serving.__doc__ or "").replace("|", " ")
        if name in HARDWARE:
            assert "othing has run there" in module.__doc__


def test_no_name_is_the_default():
    assert serving.load("") == serving.DEFAULT == EngineConfig(model="dsjax-nano")


def test_the_promises_are_ordered():
    conservative, balanced, aggressive = (serving.load(name) for name in PROMISES)

    def of(config: EngineConfig) -> tuple[float, ...]:
        s = config.scheduler
        return (
            s.max_num_waiting, s.preemption_threshold, s.warm.share, s.warm.budget_share, s.cold.share,
            s.cold.budget_share, config.overload.max_predicted_wait_s, config.feedback.target_itl_ms,
            -config.feedback.headroom,
        )  # fmt: skip

    assert all(a < b < c for a, b, c in zip(of(conservative), of(balanced), of(aggressive), strict=True))
    assert 0 < conservative.feedback.target_ttft_ms < balanced.feedback.target_ttft_ms
    assert aggressive.feedback.target_ttft_ms == 0  # throughput has none
    assert [c.overload.enable_degradation for c in (conservative, balanced, aggressive)] == [True, True, False]


def test_development_starts_soon_and_production_looks_after_itself():
    development, production = serving.load("development"), serving.load("production")
    assert development.fail_on_recompile and not production.fail_on_recompile
    assert development.scheduler.max_num_batched_tokens < serving.DEFAULT.scheduler.max_num_batched_tokens
    assert (development.overload.breaker_error_rate, development.overload.step_stall_s) == (1.0, 0.0)
    assert not development.overload.enable_shedding
    assert production.tiers.host_cache_bytes == 16 << 30
    assert production.overload.enable_degradation and production.overload.max_predicted_wait_s > 0
    assert min(production.feedback.target_ttft_ms, production.feedback.target_itl_ms) > 0
    assert production.scheduler.max_num_waiting < serving.DEFAULT.scheduler.max_num_waiting


@pytest.mark.parametrize("machine", [*HARDWARE, "cpu"])
@pytest.mark.parametrize("promise", PROMISES)
def test_hardware_and_promise_combine(machine, promise):
    assert not changed(machine) & changed(promise)
    both = serving.load(f"{machine},{promise}")
    assert both == serving.load(f"{promise},{machine}")
    assert field_paths(both).items() >= {(p, field_paths(serving.load(machine))[p]) for p in changed(machine)}


def test_the_later_wins(tmp_path):
    (tmp_path / "own.yaml").write_text("scheduler: {max_num_waiting: 3}")
    assert serving.load("conservative,aggressive").scheduler.max_num_waiting == 4096
    assert serving.load("aggressive,conservative").scheduler.max_num_waiting == 64
    config = serving.load(f"v6e,conservative,{tmp_path}/own.yaml")
    assert (config.scheduler.max_num_waiting, config.scheduler.max_num_seqs) == (3, 64)
    with pytest.raises(ConfigError, match=r"config='v7' is unknown: configs/serving has a100, .*a file ends in \.yaml"):
        serving.load("v6e,v7")


@pytest.mark.parametrize("name", HARDWARE)
def test_flash_fits_its_hardware(name):
    """The pools hold max_num_seqs requests of max_model_len, and all bytes allowed to them fit beside the weights."""
    config = serving.load(name)
    assert config.parallel.num_devices == DEVICES[name]

    def spec(cache_memory_bytes: int) -> CacheSpec:
        return CacheSpec.of(
            MODELS["deepseek-v4-flash"](),
            dataclasses.replace(config.cache, cache_memory_bytes=cache_memory_bytes),
            config.scheduler,
            config.scheduler.max_model_len,
            "bfloat16",
            num_parts=config.parallel.kv_parallel,
        )

    assert spec(config.cache.cache_memory_bytes) == spec(1 << 50)
    memory, weights = HARDWARE[name]
    assert config.cache.cache_memory_bytes / 2**30 + weights + TEMPORARIES_GIB <= memory
