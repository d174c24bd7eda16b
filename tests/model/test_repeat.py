"""Which layers of a model run in a loop, and where their parameters are."""

from __future__ import annotations

import dataclasses

import pytest

from configs.models import MODELS
from dsjax.config import LayerKind
from dsjax.model.repeat import Repeat

S, C, H = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("deepseek-v4-flash", Repeat(3, 2, 20)),  # after the hash layers: HCA and CSA in turn
        ("deepseek-v4-pro", Repeat(3, 2, 29)),
        ("dsjax-nano", Repeat(2, 2, 2)),
    ],
)
def test_released_models(name, want):
    assert Repeat.of(MODELS[name]()) == want


@pytest.mark.parametrize(
    ("kinds", "hashed", "want"),
    [
        ((S, C, H), 1, Repeat(3, 0, 0)),
        ((S, C, H), 0, Repeat(3, 0, 0)),
        ((C, C, C), 0, Repeat(0, 1, 3)),
        ((C, C, C), 1, Repeat(1, 1, 2)),
        ((C, H, C, H, C), 0, Repeat(0, 2, 2)),
        ((S, C, H, C, H, H), 2, Repeat(4, 1, 2)),
        ((S, C, H, S, C, H, C), 0, Repeat(0, 3, 2)),
    ],
)
def test_small_models(kinds, hashed, want):
    config = dataclasses.replace(MODELS["tiny-mixed"](), layer_kinds=kinds, num_hash_layers=hashed)
    assert Repeat.of(config) == want


def test_parts():
    config = dataclasses.replace(MODELS["tiny-mixed"](), layer_kinds=(S, C, H, C, H, S), num_hash_layers=1)
    repeat = Repeat.of(config)
    assert repeat == Repeat(1, 2, 2) and repeat.end == 5
    assert repeat.parts("norm.scale") == ["norm.scale"]
    assert repeat.parts("layers.0.attn.sink") == ["layers.0.attn.sink"]
    assert repeat.parts("layers.1.attn.sink") == ["layers.5.attn.sink"]
    assert repeat.parts("repeated.1.attn.sink") == ["layers.2.attn.sink", "layers.4.attn.sink"]
    assert Repeat.none(config).parts("layers.4.attn.sink") == ["layers.4.attn.sink"]
