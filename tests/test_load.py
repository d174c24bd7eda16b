"""What loading says, and which kernels a device gets."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from configs.models import MODELS
from dsjax.config import CacheConfig, SchedulerConfig
from dsjax.load import _kernels_in_words, make_runner
from pallas_kernels.target import CPU, HOST, Target


def test_a_device_without_kernels_is_told_once(caplog):
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    with caplog.at_level(logging.INFO, logger="dsjax"):
        runner, _ = make_runner(MODELS["tiny-mixed"](), None, cache=CacheConfig(), scheduler=scheduler)
    assert runner.target == Target("cpu", HOST)
    said = [r.getMessage() for r in caplog.records if "kernels" in r.getMessage()]
    assert said == ["kernels: machine code made for this CPU, and plain JAX"]


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "want"),
    [
        ("gpu", "NVIDIA A100-SXM4-80GB", "8.0", "there are none for NVIDIA A100-SXM4-80GB (platform gpu)"),
        ("gpu", "Tesla T4", "7.5", "there are none for Tesla T4 (platform gpu)"),
        ("tpu", "TPU v4", "", "there are none for TPU v4 (platform tpu)"),
        ("tpu", "TPU v6 lite", "", "Pallas, for v6e"),
        ("gpu", "NVIDIA H100", "9.0", "Pallas, for sm_90a" if jax.__version_info__ >= (0, 12) else "need JAX 0.12"),
    ],
)
def test_kernels_by_device(platform, kind, capability, want):
    device: Any = SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    assert want in _kernels_in_words("auto", device, Target.of(device))
    assert _kernels_in_words("jnp", device, CPU) == "plain JAX, as kernels=jnp asks"
