"""Shapes of compression: CSA and the indexer (four tokens an entry, overlapping) and HCA (128), a decode step's 64 rows
and a prompt's 2,048 tokens of up to 64 rows. Flash and Pro have the same entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case, array
from pallas_kernels.compress.api import Finish, Pieces, compress
from pallas_kernels.target import Target

ROWS, TOKENS = 64, 2048
KINDS = {"csa": (512, 4, True), "index_key": (128, 4, True), "hca": (512, 128, False)}  # width, ratio, overlap
ROPE, SLOTS = 64, 20 * 128


def cases() -> list[Case]:
    return [_case(kind, step) for kind in KINDS for step in ("decode", "prefill")]


def _case(kind: str, step: str) -> Case:
    width, ratio, overlap = KINDS[kind]
    channels = 2 * width if overlap else width
    tokens, num = (ROWS, ROWS) if step == "decode" else (TOKENS, TOKENS // ratio + 2 * ROWS)
    arrays = {
        "values": array(jnp.float32, tokens, channels),
        "logits": array(jnp.float32, tokens, channels),
        "of_token": None if step == "decode" else array(jnp.int32, tokens),
        "of_piece": [array(dtype, num) for dtype in (jnp.int32, jnp.int32, bool, bool, jnp.int32, jnp.int32)],
        "of_row": [array(jnp.int32, ROWS) for _ in ("last_of_row", "slot", "position")],
        "states": array(jnp.float32, SLOTS, 3 * channels),
        "scale": array(jnp.float32, width),
        "angles": [array(jnp.float32, num, ROPE // 2) for _ in ("cos", "sin")],
    }

    def call(
        target: Target,
        values: jax.Array,
        logits: jax.Array,
        of_token: jax.Array | None,
        of_piece: list[jax.Array],
        of_row: list[jax.Array],
        states: jax.Array,
        scale: jax.Array,
        angles: list[jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        last_of_row, slot, position = of_row
        return compress(
            values,
            logits,
            Pieces._make([of_token, *of_piece, last_of_row]),
            states,
            slot,
            position,
            Finish(scale, 1e-6, *angles),
            ratio=ratio,
            overlap=overlap,
            dtype=jnp.bfloat16,
            target=target,
        )

    return Case(name=f"compress flash {kind} {step}", call=call, arrays=arrays, updated="states")
