"""Shapes of the attention operations: Flash (64 heads, and 8 of them as one of eight devices has) and Pro (128)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.case import Case, array
from pallas_kernels.chosen import MaskShape
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.pool import Pool, PoolShape
from pallas_kernels.swa_attention import swa_attention
from pallas_kernels.target import Target

WIDTH, ROPE, WINDOW = 512, 64, 128
NUM_PAGES, LAYERS = 1000, 20  # of a pool
ROWS, CONTEXT = 64, 32768
HEADS = {"flash": 64, "flash/8": 8, "pro": 128}
# (blocks, queries of a block): a decode step of 64 rows, and a step of 2,048 tokens in chunks of up to 64 rows
STEPS = {"decode": (ROWS, 1), "prefill": (192, 16)}
TOP_K = {"flash": 512, "flash/8": 512, "pro": 1024}


def cases(kind: str, form: str = "bfloat16") -> list[Case]:
    """Of swa, hca or csa, with pages of one format."""
    return [_case(kind, model, step, form) for model in HEADS for step in STEPS]


def _case(kind: str, model: str, step: str, form: str) -> Case:
    heads, (num_blocks, block) = HEADS[model], STEPS[step]
    ratio, epp = {"swa": (1, 64), "hca": (128, 16), "csa": (4, 64)}[kind]
    places = CONTEXT // (ratio * epp)
    entries = EntryFormat(form, WIDTH, ROPE)
    arrays: dict[str, Any] = {
        "q": array(jnp.bfloat16, num_blocks, block, heads, WIDTH),
        "blocks": tuple(array(jnp.int32, num_blocks) for _ in QueryBlocks._fields),
        "window_pool": PoolShape(entries, LAYERS * NUM_PAGES, 64),
        "window_table": array(jnp.int32, ROWS, 36),
        "sink": array(jnp.float32, heads),
    }
    if kind != "swa":
        pool = PoolShape(entries, LAYERS * NUM_PAGES, epp, gathered=kind == "csa")
        arrays |= {"entry_pool": pool, "entry_table": array(jnp.int32, ROWS, places)}
    if kind == "csa":
        indices, mask = array(jnp.int32, num_blocks, TOP_K[model]), MaskShape(num_blocks, block, places * epp)
        arrays["chosen"] = indices if block == 1 else mask

    def call(
        target: Target,
        q: jax.Array,
        blocks: tuple[jax.Array, ...],
        window_pool: Pool,
        window_table: jax.Array,
        sink: jax.Array,
        entry_pool: Pool | None = None,
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

    return Case(name=f"{kind}_attention {model} {step} {form}", call=call, arrays=arrays)
