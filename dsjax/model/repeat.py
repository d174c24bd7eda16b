"""Which layers are the same ones over and over, so that one program of them can run in a loop.  [no jax]

Compiled one by one, the 43 layers of Flash take minutes; as a loop over 20 pairs of layers, seconds. A model built so
holds the looped layers' parameters stacked: those of the k-th layer of a round have all rounds' arrays, `[count, ...]`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsjax.config import ModelConfig


@dataclass(frozen=True)
class Repeat:
    """Layers first .. first + period * count - 1 are `count` rounds of the same `period` layers."""

    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """The first layer after them."""
        return self.first + self.period * self.count

    @classmethod
    def of(cls, config: ModelConfig) -> Repeat:
        """The most layers that a loop can have, in the shortest rounds; `count` is 0 where nothing repeats.

        Layers are the same if they are of one kind and route alike, by token id or by score.
        """
        layers = [(kind, i < config.num_hash_layers) for i, kind in enumerate(config.layer_kinds)]
        total, best = len(layers), cls.none(config)
        for period in range(1, total // 2 + 1):
            for first in range(total - 2 * period + 1):
                end = first + period
                while end < total and layers[end] == layers[end - period]:
                    end += 1
                count = (end - first) // period
                if count > 1 and count * period > best.count * best.period:
                    best = cls(first, period, count)
        return best

    @classmethod
    def none(cls, config: ModelConfig) -> Repeat:
        """No loop: every layer by itself."""
        return cls(config.num_hidden_layers, 0, 0)

    def parts(self, name: str) -> list[str]:
        """The parameters, named by layer, that a model's parameter `name` is made of: one of every round if stacked."""
        kind, _, rest = name.partition(".")
        if kind not in ("layers", "repeated"):
            return [name]
        index, _, rest = rest.partition(".")
        first = int(index)
        if kind == "repeated":
            return [f"layers.{self.first + first + i * self.period}.{rest}" for i in range(self.count)]
        return [f"layers.{first if first < self.first else first + self.period * self.count}.{rest}"]
