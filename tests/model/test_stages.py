"""Layers over pipeline stages: each exactly once and in order, under a common pattern no longer than needed."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from configs.models import MODELS
from dsjax.config import LayerKind, ModelConfig
from dsjax.errors import ConfigError
from dsjax.model.stages import Stages

S, C, H = LayerKind.SLIDING, LayerKind.CSA, LayerKind.HCA
FLASH = MODELS["deepseek-v4-flash"]()


def model(kinds: tuple[LayerKind, ...], num_hashed: int) -> ModelConfig:
    return dataclasses.replace(MODELS["tiny-mixed"](), layer_kinds=kinds, num_hash_layers=num_hashed)


def check(config: ModelConfig, stages: Stages) -> None:
    """Every layer once, in order, at a place of its kind and its way of choosing experts."""
    pattern = stages.config
    assert [layer for run in stages.layers for layer in run if layer is not None] == list(
        range(config.num_hidden_layers)
    )
    for run in stages.layers:
        assert len(run) == pattern.num_hidden_layers
        for place, layer in enumerate(run):
            if layer is not None:
                assert config.layer_kinds[layer] is pattern.layer_kinds[place]
                assert (layer < config.num_hash_layers) == (place < pattern.num_hash_layers)
    # a place that no stage has a layer for would be memory for nothing
    assert all(any(places) for places in zip(*stages.active, strict=True))
    assert stages.active == tuple(tuple(layer is not None for layer in run) for run in stages.layers)


@pytest.mark.parametrize(
    ("num_stages", "sizes", "length"),
    [(1, [43], 43), (2, [22, 21], 24), (3, [14, 15, 14], 18), (4, [11, 11, 10, 11], 15), (43, [1] * 43, 4)],
)
def test_flash(num_stages, sizes, length):
    stages = Stages.of(FLASH, num_stages)
    check(FLASH, stages)
    assert [sum(run) for run in stages.active] == sizes
    assert stages.config.num_hidden_layers == length
    # Its three hashed layers (two sliding, one CSA) are all on the first of up to 4 stages, which begins with them.
    assert (stages.config.layer_kinds[:3], stages.config.num_hash_layers) == ((S, S, C), 3) or num_stages == 43
    if num_stages in (2, 3, 4):
        assert stages.layers[0][:3] == (0, 1, 2)
        assert all(run[:3] == (None, None, None) for run in stages.layers[1:])


def test_flash_over_two_stages_in_full():
    stages = Stages.of(FLASH, 2)
    assert stages.config.layer_kinds == (S, S, C, C, *(H, C) * 10)
    assert stages.layers == (
        (0, 1, 2, None, *range(3, 22), None),
        (None, None, None, *range(22, 43)),
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8, 61])
def test_pro(num_stages):
    config = MODELS["deepseek-v4-pro"]()
    check(config, Stages.of(config, num_stages))


def test_one_stage_is_the_model_itself():
    stages = Stages.of(FLASH, 1)
    assert stages.config == FLASH and stages.layers == (tuple(range(43)),)
    name = "layers.42.attn.wkv.kernel"
    assert stages.sources(name) == [name]


def test_hashed_layers_that_several_stages_have():
    """A hashed layer and a scored one of the same kind are two places; hashed ones come first."""
    stages = Stages.of(model((C, C, C, C, C, C), 3), 3)
    assert stages.config.layer_kinds == (C, C, C, C) and stages.config.num_hash_layers == 2
    assert stages.layers == ((0, 1, None, None), (2, None, 3, None), (None, None, 4, 5))


def test_any_layers_on_any_number_of_stages():
    rng = random.Random(0)
    for num_layers, num_stages in itertools.product(range(1, 13), range(1, 6)):
        config = model(tuple(rng.choices((S, C, H), k=num_layers)), rng.randint(0, num_layers))
        if num_stages <= num_layers:
            stages = Stages.of(config, num_stages)
            check(config, stages)
            sizes = [sum(run) for run in stages.active]
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= stages.config.num_hidden_layers <= num_layers


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4 is more than the model's num_hidden_layers=3"):
        Stages.of(model((S, C, H), 0), 4)


def test_where_a_stages_parameters_come_from():
    stages = Stages.of(model((S, C, H, C), 1), 2)
    assert stages.config.layer_kinds == (S, H, C)
    assert stages.layers == ((0, None, 1), (None, 2, 3))
    assert stages.sources("layers.0.attn.wkv.kernel") == ["layers.0.attn.wkv.kernel", None]
    assert stages.sources("layers.1.attn.wkv.kernel") == [None, "layers.2.attn.wkv.kernel"]
    assert stages.sources("layers.2.attn.wkv.kernel") == ["layers.1.attn.wkv.kernel", "layers.3.attn.wkv.kernel"]
    assert stages.sources("embed.embedding") == ["embed.embedding"] * 2
