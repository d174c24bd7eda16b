"""Shapes of the attention operations: Flash (64 heads, and 8 of them as one of eight devices has) and Pro (128)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.case import Case, array
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import Target

WIDTH, WINDOW = 512, 128
NUM_PAGES, LAYERS = 1000, 20  # of a pool
ROWS, CONTEXT = 64, 32768
HEADS = {"flash": 64, "flash/8": 8, "pro": 128}
# (blocks, queries of a block): a decode step of 64 rows, and a step of 2,048 tokens in chunks of up to 64 rows
STEPS = {"decode": (ROWS, 1), "prefill": (192, 16)}
TOP_K = {"flash": 512, "flash/8": 512, "pro": 1024}


def cases(kind: str, dtype: Any = jnp.bfloat16) -> list[Case]:
    """Of swa, hca or csa."""
    return [_case(kind, model, step, dtype) for model in HEADS for step in STEPS]


def _case(kind: str, model: str, step: str, dtype: Any) -> Case:
    heads, (num_blocks, block) = HEADS[model], STEPS[step]
    ratio, epp = {"swa": (1, 64), "hca": (128, 16), "csa": (4, 64)}[kind]
    places = CONTEXT // (ratio * epp)
    entry = (WIDTH // 128, 128) if kind == "csa" else (WIDTH,)
    pool = (LAYERS * NUM_PAGES, epp, *entry)
    arrays: dict[str, Any] = {
        "q": array(jnp.bfloat16, num_blocks, block, heads, WIDTH),
        "blocks": tuple(array(jnp.int32, num_blocks) for _ in QueryBlocks._fields),
        "window_pool": array(dtype, LAYERS * NUM_PAGES, 64, WIDTH),
        "window_table": array(jnp.int32, ROWS, 36),
        "sink": array(jnp.float32, heads),
    }
    if kind != "swa":
        arrays |= {"entry_pool": array(dtype, *pool), "entry_table": array(jnp.int32, ROWS, places)}
    if kind == "csa":
        shape = (num_blocks, TOP_K[model]) if block == 1 else (num_blocks, block, places * epp)
        arrays["chosen"] = array(jnp.int32 if block == 1 else jnp.bool_, *shape)

    def call(
        target: Target,
        q: jax.Array,
        blocks: tuple[jax.Array, ...],
        window_pool: jax.Array,
        window_table: jax.Array,
        sink: jax.Array,
        entry_pool: jax.Array | None = None,
        entry_table: jax.Array | None = None,
        chosen: jax.Array | None = None,
    ) -> jax.Array:
        of_rows = QueryBlocks(*blocks)
        window_pages = Pages(window_pool, window_table, 3, NUM_PAGES)
        common = {"window": WINDOW, "scale": WIDTH**-0.5, "target": target}
        if entry_pool is None or entry_table is None:
            return swa_attention(q, of_rows, window_pages, sink, **common)
        pages = Pages(entry_pool, entry_table, 2, NUM_PAGES)
        if chosen is None:
            return hca_attention(q, of_rows, window_pages, pages, sink, ratio=ratio, **common)
        return csa_attention(q, of_rows, window_pages, pages, chosen, sink, ratio=ratio, **common)

    name = f"{kind}_attention {model} {step} {jnp.dtype(dtype).name}"
    return Case(name=name, call=call, arrays=arrays)
