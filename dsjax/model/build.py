"""From a config and arrays to (graph, parameters): what a compiled step takes instead of module objects."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from dsjax.model.stages import Stages
from dsjax.model.transformer import Transformer
from dsjax.sharding import Placement


def abstract(
    config: ModelConfig, dtype: jnp.dtype, *, with_mtp: bool, stored: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's graph and its parameters as shapes, without allocating any."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dtype, with_mtp=with_mtp, stored=stored)))


def assemble(
    config: ModelConfig, params: Mapping[str, np.ndarray], dtype: jnp.dtype, *, with_mtp: bool, stored: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """Puts arrays {dotted path: array} (as `checkpoint.load_params` returns them) into a model on the default device.

    Raises ConfigError if a path or shape is not the model's.
    """
    graph, state = abstract(config, dtype, with_mtp=with_mtp, stored=stored)
    leaves = _by_name(state)
    _check_names(leaves.keys(), params.keys())
    return graph, _filled(state, {name: jnp.asarray(_checked(name, leaf, params)) for name, leaf in leaves.items()})


def assemble_on_mesh(
    stages: Stages,
    params: Mapping[str, np.ndarray],
    dtype: jnp.dtype,
    placement: Placement,
    *,
    with_mtp: bool,
    stored: bool = False,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The same for the model of a pipeline stage: every device gets its part of its stage's parameters.

    Raises ConfigError also where a parameter cannot be split.
    """
    graph, state = abstract(stages.config, dtype, with_mtp=with_mtp, stored=stored)
    leaves = _by_name(state)
    sources = {name: stages.sources(name) for name in leaves}
    _check_names({source for of_stages in sources.values() for source in of_stages if source}, params.keys())
    placed = {}
    for name, leaf in leaves.items():
        arrays = [
            np.zeros(leaf.shape, leaf.dtype) if source is None else _checked(source, leaf, params)
            for source in sources[name]
        ]
        placed[name] = placement.put(leaf.get_metadata("logical_axes"), arrays)
    return graph, _filled(state, placed)


def _by_name(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _check_names(wanted: Set[str], found: Set[str]) -> None:
    if wanted != found:
        raise ConfigError(f"parameters do not fit the model: {sorted(wanted ^ found)[:5]} are on one side only")


def _checked(name: str, leaf: nnx.Variable, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """The parameter in the model's dtype. Asks for it once: a checkpoint reads it."""
    array = params[name]
    if leaf.shape != array.shape:
        raise ConfigError(f"parameter {name} has shape {array.shape}, the model wants {leaf.shape}")
    return np.asarray(array, leaf.dtype)


def _filled(state: nnx.State, arrays: Mapping[str, jax.Array]) -> nnx.State:
    flat = {path: leaf.replace(arrays[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)}
    return nnx.from_flat_state(flat)


def flat_params(model: Any) -> dict[str, np.ndarray]:
    """The reverse: {dotted path: array} of a model's parameters, as `checkpoint.save_checkpoint` takes them."""
    state = nnx.state(model)
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
