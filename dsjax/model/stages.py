"""Which layers each pipeline stage has.  [no jax]

All stages run one program, so they share one pattern of layers: the shortest sequence of which every stage's layers are
a part. A stage skips the places it has no layer for; their parameters and cache pages are there, and empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsjax.config import LayerKind, ModelConfig
from dsjax.errors import ConfigError

_Layer = tuple[LayerKind, bool]  # kind, and whether its experts are chosen by token id


@dataclass(frozen=True)
class Stages:
    """`layers[s][i]` is the model's layer at place i of the pattern on stage s, None where the stage has none."""

    config: ModelConfig  # of the pattern
    layers: tuple[tuple[int | None, ...], ...]

    @property
    def active(self) -> tuple[tuple[bool, ...], ...]:
        return tuple(tuple(layer is not None for layer in stage) for stage in self.layers)

    def sources(self, name: str) -> list[str | None]:
        """The model's parameter that each stage's parameter `name` is; None where the stage lacks the layer."""
        kind, _, rest = name.partition(".")
        if kind != "layers":
            return [name] * len(self.layers)
        place, _, rest = rest.partition(".")
        layers = [stage[int(place)] for stage in self.layers]
        return [None if layer is None else f"layers.{layer}.{rest}" for layer in layers]

    @classmethod
    def of(cls, config: ModelConfig, num_stages: int) -> Stages:
        """Splits the layers into runs of about equal length. Raises ConfigError for more stages than layers."""
        total = config.num_hidden_layers
        if num_stages > total:
            raise ConfigError(f"pipeline_parallel_size={num_stages} is more than the model's num_hidden_layers={total}")
        bounds = [round(total * s / num_stages) for s in range(num_stages + 1)]
        kinds = [(kind, i < config.num_hash_layers) for i, kind in enumerate(config.layer_kinds)]
        runs = [range(a, b) for a, b in itertools.pairwise(bounds)]
        pattern: list[_Layer] = []
        for run in runs:
            pattern = _shortest_common(pattern, [kinds[i] for i in run])
        num_hashed = sum(hashed for _, hashed in pattern)
        assert all(hashed == (i < num_hashed) for i, (_, hashed) in enumerate(pattern))
        layers = tuple(_places(pattern, run, kinds) for run in runs)
        pattern_kinds = tuple(kind for kind, _ in pattern)
        return cls(replace(config, layer_kinds=pattern_kinds, num_hash_layers=num_hashed), layers)


def _places(pattern: list[_Layer], run: range, kinds: list[_Layer]) -> tuple[int | None, ...]:
    places: list[int | None] = []
    todo = list(run)
    for layer in pattern:
        places.append(todo.pop(0) if todo and kinds[todo[0]] == layer else None)
    assert not todo
    return tuple(places)


def _shortest_common(a: Sequence[_Layer], b: Sequence[_Layer]) -> list[_Layer]:
    """The shortest sequence that has both in it; where either could come first, `a` does."""
    best: dict[tuple[int, int], int] = {}
    for i in range(len(a), -1, -1):
        for j in range(len(b), -1, -1):
            if i == len(a) or j == len(b):
                best[i, j] = len(a) - i + len(b) - j
            elif a[i] == b[j]:
                best[i, j] = 1 + best[i + 1, j + 1]
            else:
                best[i, j] = 1 + min(best[i + 1, j], best[i, j + 1])
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            out.append(a[i])
            i, j = i + 1, j + 1
        elif best[i + 1, j] <= best[i, j + 1]:
            out.append(a[i])
            i += 1
        else:
            out.append(b[j])
            j += 1
    return [*out, *a[i:], *b[j:]]
