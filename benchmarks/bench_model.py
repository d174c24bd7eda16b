"""The model that benchmarks of a step or an engine run: a checkpoint's, or random weights of `bench-60m`."""

from __future__ import annotations

from typing import Any

import numpy as np
from absl import flags
from flax import nnx

from configs.models import MODELS
from dsjax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from dsjax.engine import Engine
from dsjax.load import load_runner, make_runner, model_dir
from dsjax.model.build import flat_params
from dsjax.model.transformer import Transformer
from dsjax.runner.runner import Runner

MODEL = "bench-60m"


def define_flags(values: flags.FlagValues) -> None:
    """Which model, in which type, and where its programs are kept."""
    flags.DEFINE_string("model", "", f"checkpoint folder; without it random weights of {MODEL}", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "weights and activations", flag_values=values)
    flags.DEFINE_string("compilation_cache_dir", "", "where compiled programs are kept", flag_values=values)


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters of a model, drawn anew."""
    return flat_params(Transformer(config, nnx.Rngs(0), np.dtype("float32")))


def runner_of(model: str, **options: Any) -> tuple[Runner, int]:
    """A runner and its max_model_len, of the checkpoint `model` or of random weights for "". `options` are those of
    `load.make_runner`. Nothing is compiled yet. Raises ConfigError."""
    if model:
        path = model_dir(model)
        return load_runner(path, ModelConfig.from_dir(path), **options)
    config = MODELS[MODEL]()
    weights = random_weights(config)
    return make_runner(config, lambda *_: weights, **options)


def engine_of(model: str, *, dtype: str, scheduler: SchedulerConfig, cache: CacheConfig | None = None) -> Engine:
    """An engine without a tokenizer, of `runner_of`."""
    cache = cache or CacheConfig()
    runner, max_model_len = runner_of(model, dtype=dtype, scheduler=scheduler, cache=cache)
    return Engine(
        config=EngineConfig(model=model or MODEL, dtype=dtype, scheduler=scheduler, cache=cache),
        model_config=runner.config,
        runner=runner,
        tokenizer=None,
        max_model_len=max_model_len,
    )
