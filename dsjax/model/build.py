"""From a config and arrays to (graph, parameters): what a compiled step takes instead of module objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from dsjax.model.repeat import Repeat
from dsjax.model.stages import Stages
from dsjax.model.transformer import Transformer
from dsjax.sharding import Placement


def abstract(
    config: ModelConfig, dtype: jnp.dtype, *, with_mtp: bool, stored: bool = False, scanned: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's graph and its parameters as shapes, without allocating any."""

    def build() -> Transformer:
        return Transformer(config, nnx.Rngs(0), dtype, with_mtp=with_mtp, stored=stored, scanned=scanned)

    return nnx.split(nnx.eval_shape(build))


def assemble(
    config: ModelConfig, params: Mapping[str, np.ndarray], dtype: jnp.dtype, *, with_mtp: bool, stored: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """Puts arrays {dotted path: array} (as `checkpoint.load_params` returns them) into a model on the default device.

    Raises ConfigError if a path or shape is not the model's.
    """
    graph, state = abstract(config, dtype, with_mtp=with_mtp, stored=stored)
    leaves = _by_name(state)
    _check_names(leaves.keys(), params.keys())
    arrays = {name: jnp.asarray(_checked(name, leaf.shape, params), leaf.dtype) for name, leaf in leaves.items()}
    return graph, _filled(state, arrays)


def assemble_on_mesh(
    stages: Stages,
    params: Mapping[str, np.ndarray],
    dtype: jnp.dtype,
    placement: Placement,
    *,
    with_mtp: bool,
    stored: bool = False,
    scanned: bool = False,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The same for the model of a pipeline stage: every device gets its part of its stage's parameters.

    Raises ConfigError also where a parameter cannot be split.
    """
    graph, state = abstract(stages.config, dtype, with_mtp=with_mtp, stored=stored, scanned=scanned)
    leaves = _by_name(state)
    repeat = Repeat.of(stages.config) if scanned else Repeat.none(stages.config)
    # of each parameter, for each stage, those of the checkpoint that it is made of
    sources = {name: list(zip(*map(stages.sources, repeat.parts(name)), strict=True)) for name in leaves}
    _check_names({s for of_stages in sources.values() for parts in of_stages for s in parts if s}, params.keys())
    placed = {}
    for name, leaf in leaves.items():
        arrays = [_joined(parts, leaf, params) for parts in sources[name]]
        placed[name] = placement.put(leaf.get_metadata("logical_axes"), arrays)
    return graph, _filled(state, placed)


def abstract_on_mesh(
    stages: Stages, dtype: jnp.dtype, placement: Placement, *, with_mtp: bool, stored: bool, scanned: bool
) -> tuple[nnx.GraphDef, nnx.State]:
    """What `assemble_on_mesh` makes, as shapes that know how they are split."""
    graph, state = abstract(stages.config, dtype, with_mtp=with_mtp, stored=stored, scanned=scanned)
    shapes = {
        name: placement.abstract(leaf.get_metadata("logical_axes"), leaf.shape, leaf.dtype)
        for name, leaf in _by_name(state).items()
    }
    return graph, _filled(state, shapes)


def _by_name(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _check_names(wanted: Set[str], found: Set[str]) -> None:
    if wanted != found:
        raise ConfigError(f"parameters do not fit the model: {sorted(wanted ^ found)[:5]} are on one side only")


def _joined(parts: Sequence[str | None], leaf: nnx.Variable, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """One parameter, or those of several layers stacked; zero where the stage lacks the layer."""
    if len(parts) == 1 and parts[0] is not None:
        return np.asarray(_checked(parts[0], leaf.shape, params), leaf.dtype)
    shape = leaf.shape if len(parts) == 1 else leaf.shape[1:]
    out = np.zeros((len(parts), *shape), leaf.dtype)
    for i, name in enumerate(parts):
        if name is not None:
            out[i] = _checked(name, shape, params)
    return out.reshape(leaf.shape)


def _checked(name: str, shape: tuple[int, ...], params: Mapping[str, np.ndarray]) -> np.ndarray:
    """The parameter. Asks for it once: a checkpoint reads it."""
    array = params[name]
    if shape != array.shape:
        raise ConfigError(f"parameter {name} has shape {array.shape}, the model wants {shape}")
    return array


def _filled(state: nnx.State, arrays: Mapping[str, Any]) -> nnx.State:
    flat = {path: leaf.replace(arrays[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)}
    return nnx.from_flat_state(flat)


def flat_params(model: Any) -> dict[str, np.ndarray]:
    """The reverse: {dotted path: array} of a model's parameters, as `checkpoint.save_checkpoint` takes them."""
    state = nnx.state(model)
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
