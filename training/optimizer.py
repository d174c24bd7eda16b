"""Muon for matrices, Adam for the rest, and the starting values that suit training from scratch."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = dict[str, jax.Array]  # dotted path -> value; what the optimizer sees

# Learning rates at their peak; the schedule's factor multiplies all of them.
_MUON, _EMBED, _HEAD, _OTHER = 0.01, 0.015, 0.002, 0.002
# Matrices that decide who talks to whom see hundreds of inputs: Adam's equal steps on all of them add up to noise.
_STEERING = re.compile(r"\.hc_(attn|ffn)\.fn$|hc_head\.fn$|\.gate\.kernel$|\.weights_proj\.kernel$")
_STEERING_SCALE = 0.2
_MATRIX = re.compile(r"\.(wq_a|wq_b|wkv|wgate|wo_b|e_proj|h_proj|w13|w2)\.kernel$|\.wo_a\.kernel$|\.experts\.(w13|w2)$")


def label(path: str) -> str:
    """Which rule a parameter follows."""
    if _MATRIX.search(path):
        return "muon"
    return {"embed.embedding": "embed", "head.kernel": "head"}.get(path, "other")


def scale(path: str) -> float:
    """What a parameter's update is multiplied with besides the schedule's factor."""
    return _STEERING_SCALE if _STEERING.search(path) else 1.0


def make() -> optax.GradientTransformation:
    """For flat `Params`; updates are to be multiplied by `scale` and the schedule's factor."""

    def dimensions(params: Any) -> Any:
        return jax.tree.map(
            lambda p: optax.contrib.MuonDimensionNumbers(reduction_axis=p.ndim - 2, output_axis=p.ndim - 1), params
        )

    rules: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.contrib.muon(_MUON, muon_weight_dimension_numbers=dimensions),
        "embed": optax.adam(_EMBED, b1=0.9, b2=0.99),
        "head": optax.adam(_HEAD, b1=0.9, b2=0.99),
        "other": optax.adam(_OTHER, b1=0.9, b2=0.99),
    }
    return optax.partition(rules, lambda params: {path: label(path) for path in params})


def schedule(progress: float, step: int, *, warm_up_steps: int = 60) -> float:
    """The factor on every learning rate at `progress` in [0, 1]: linear warm-up, then linear to 0."""
    return min(1.0, (step + 1) / warm_up_steps) * max(0.0, 1.0 - progress)


def starting_values(params: Params, hc_mult: int) -> Params:
    """Residual streams that start as plain residual connections, block outputs and logits that start at 0.

    Layer l reads mostly stream l mod S, writes to all, and leaves the streams unmixed.
    """
    s = hc_mult
    out = dict(params)
    sites = sorted({path.rsplit(".", 1)[0] for path in params if ".hc_attn." in path or ".hc_ffn." in path})
    for path, value in params.items():
        if re.search(r"hc_(attn|ffn|head)\.scale$", path):
            out[path] = jnp.full_like(value, 0.1)  # small input dependence at first
        elif path == "head.kernel" or re.search(r"(\.wo_b\.kernel|\.w2(\.kernel)?)$", path):
            out[path] = jnp.zeros_like(value)
    for i, site in enumerate(sites):
        pre = jnp.where(jnp.arange(s) == i % s, 1.0, -2.0)
        comb = jnp.where(jnp.eye(s, dtype=bool), 2.0, -2.0)
        out[f"{site}.base"] = jnp.concatenate([pre, jnp.zeros(s), comb.reshape(-1)])
    return out
