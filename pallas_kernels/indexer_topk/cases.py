"""Shapes of the indexer: 64 heads of 128, 512 entries of 32k tokens for Flash, 1,024 of 128k for Pro."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.case import Case, array
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.indexer_topk.api import indexer_topk
from pallas_kernels.pool import Pool, PoolShape
from pallas_kernels.target import Target

HEADS, WIDTH, RATIO, ENTRIES_PER_PAGE = 64, 128, 4, 64
LAYERS, ROWS = 20, 64
FORMATS = ("bfloat16", "int8", "fp8", "fp4")  # of keys, that both families have kernels for; a TPU's has float32 too
STEPS = {"decode": (ROWS, 1), "prefill": (192, 16)}  # blocks, queries of a block


@dataclass(frozen=True, kw_only=True)
class Shape:
    top_k: int
    context: int  # tokens before the step's last
    num_pages: int = 1000  # of a layer


SHAPES = {"flash": Shape(top_k=512, context=32768), "pro": Shape(top_k=1024, context=131072)}
SMALL = {"small": Shape(top_k=128, context=1024, num_pages=100)}  # for a CPU


def cases(shapes: dict[str, Shape] = SHAPES, formats: tuple[str, ...] = FORMATS) -> list[Case]:
    """With bfloat16 keys, and for the first shape with keys of the other formats."""
    first = next(iter(shapes))
    return [
        _case(model, step, shape, form)
        for form in formats
        for model, shape in shapes.items()
        for step in STEPS
        if form == "bfloat16" or model == first
    ]


def _case(model: str, step: str, shape: Shape, form: str) -> Case:
    num_blocks, block = STEPS[step]
    arrays: dict[str, Any] = {
        "q": array("float32" if form == "float32" else "bfloat16", num_blocks, block, HEADS, WIDTH),
        "weights": array(jnp.float32, num_blocks, block, HEADS),
        "blocks": (
            np.arange(num_blocks, dtype=np.int32) % ROWS,
            np.full(num_blocks, shape.context - block, np.int32),
            np.full(num_blocks, block, np.int32),
        ),
        "pool": PoolShape(EntryFormat(form, WIDTH), LAYERS * shape.num_pages, ENTRIES_PER_PAGE),
        "table": array(jnp.int32, ROWS, shape.context // (RATIO * ENTRIES_PER_PAGE)),
    }

    def call(
        target: Target,
        q: jax.Array,
        weights: jax.Array,
        blocks: tuple[jax.Array, jax.Array, jax.Array],
        pool: Pool,
        table: jax.Array,
    ) -> jax.Array:
        pages = Pages(pool, table, 2, shape.num_pages)
        return indexer_topk(q, weights, QueryBlocks(*blocks), pages, ratio=RATIO, k=shape.top_k, target=target)

    return Case(name=f"indexer_topk {model} {step} {form}", call=call, arrays=arrays)
