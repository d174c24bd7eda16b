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
        ((S, C, H), 1, Repeat(3, 1, 0)),
        ((S, C, H), 0, Repeat(3, 1, 0)),
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


def test_places():
    config = dataclasses.replace(MODELS["tiny-mixed"](), layer_kinds=(S, C, H, C, H, S), num_hash_layers=1)
    repeat = Repeat.of(config)
    assert [repeat.place(i) for i in range(6)] == [
        ("layers.0.", None),
        ("repeated.0.", 0),
        ("repeated.1.", 0),
        ("repeated.0.", 1),
        ("repeated.1.", 1),
        ("layers.1.", None),
    ]
    assert repeat.before(config, 3) == {S: 1, C: 1, H: 1}
