"""From a config and arrays to (graph, parameters): what a compiled step takes instead of module objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from dsjax.model.transformer import Transformer


def abstract(
    config: ModelConfig, dtype: jnp.dtype, *, with_mtp: bool, stored: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's graph and its parameters as shapes, without allocating any."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dtype, with_mtp=with_mtp, stored=stored)))


def assemble(
    config: ModelConfig, params: Mapping[str, np.ndarray], dtype: jnp.dtype, *, with_mtp: bool, stored: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """Puts arrays {dotted path: array} (as `checkpoint.load_params` returns them) into the model.

    Raises ConfigError if a path or shape is not the model's.
    """
    graph, state = abstract(config, dtype, with_mtp=with_mtp, stored=stored)
    flat = dict(nnx.to_flat_state(state))
    names = {".".join(map(str, path)): path for path in flat}
    if names.keys() != params.keys():
        raise ConfigError(
            f"parameters do not fit the model: {sorted(names.keys() ^ params.keys())[:5]} are on one side only"
        )
    for name, path in names.items():
        want = flat[path]
        array = params[name]  # once: a checkpoint reads it
        if want.shape != array.shape:
            raise ConfigError(f"parameter {name} has shape {array.shape}, the model wants {want.shape}")
        flat[path] = want.replace(jnp.asarray(array, want.dtype))
    return graph, nnx.from_flat_state(flat)


def flat_params(model: Any) -> dict[str, np.ndarray]:
    """The reverse: {dotted path: array} of a model's parameters, as `checkpoint.save_checkpoint` takes them."""
    state = nnx.state(model)
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
