"""Shapes of the attention operations: Flash (64 heads, and 8 of them as one of eight devices has) and Pro (128)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
KINDS = {"swa": (1, 64), "hca": (128, 16), "csa": (4, 64)}  # tokens an entry, entries a page
BLOCK = 16  # queries of a block in prefill


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A step of `rows` rows: one token each, or 32 each in the first two of three blocks of 16."""

    heads: int
    top_k: int
    rows: int = 64
    context: int = 32768  # tokens of each row, the step's included
    num_pages: int = 1000  # of a layer
    layers: int = 20
    dtype: Any = jnp.bfloat16  # of queries


SHAPES = {
    "flash": Shape(heads=64, top_k=512),
    "flash/8": Shape(heads=8, top_k=512),
    "pro": Shape(heads=128, top_k=1024),
}
SMALL = {  # for a CPU
    "small": Shape(heads=8, top_k=128, rows=16, context=4096, num_pages=100, layers=4, dtype=jnp.float32)
}


def cases(kind: str, form: str = "bfloat16", shapes: dict[str, Shape] = SHAPES) -> list[Case]:
    """Of swa, hca or csa, with pages of one format."""
    return [_case(kind, model, shape, step, form) for model, shape in shapes.items() for step in ("decode", "prefill")]


def _case(kind: str, model: str, shape: Shape, step: str, form: str) -> Case:
    rows, num_pages, block = shape.rows, shape.num_pages, 1 if step == "decode" else BLOCK
    ratio, epp = KINDS[kind]
    places = shape.context // (ratio * epp)
    entries = EntryFormat(form, WIDTH, ROPE)
    blocks = _blocks(shape, block)
    num_blocks = len(blocks[0])
    arrays: dict[str, Any] = {
        "q": array(shape.dtype, num_blocks, block, shape.heads, WIDTH),
        "blocks": blocks,
        "window_pool": PoolShape(entries, shape.layers * num_pages, 64),
        "window_table": _table(rows, 36, num_pages),
        "sink": array(jnp.float32, shape.heads),
    }
    if kind != "swa":
        pool = PoolShape(entries, shape.layers * num_pages, epp, gathered=kind == "csa")
        arrays |= {"entry_pool": pool, "entry_table": _table(rows, places, num_pages)}
    if kind == "csa":
        mask = MaskShape(num_blocks, block, places * epp)
        arrays["chosen"] = _chosen(shape, num_blocks, places * epp) if block == 1 else mask

    def call(
        target: Target,
        q: jax.Array,
        blocks: tuple[jax.Array, jax.Array, jax.Array],
        window_pool: Pool,
        window_table: jax.Array,
        sink: jax.Array,
        entry_pool: Pool | None = None,
        entry_table: jax.Array | None = None,
        chosen: jax.Array | None = None,
    ) -> jax.Array:
        row, position, length = blocks
        of_rows = QueryBlocks(row, position, length)
        window_pages = Pages(window_pool, window_table, 3, num_pages)
        common = {"window": WINDOW, "scale": WIDTH**-0.5, "target": target}
        if entry_pool is None or entry_table is None:
            return swa_attention(q, of_rows, window_pages, sink, **common)
        pages = Pages(entry_pool, entry_table, 2, num_pages)
        if chosen is None:
            return hca_attention(q, of_rows, window_pages, pages, sink, ratio=ratio, **common)
        return csa_attention(q, of_rows, window_pages, pages, chosen, sink, ratio=ratio, **common)

    return Case(name=f"{kind}_attention {model} {step} {form}", call=call, arrays=arrays)


def _blocks(shape: Shape, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, positions and lengths. The step is at the end of each row's context."""
    used = 1 if block == 1 else 2  # blocks of a row; in prefill there is a third that is empty
    num_blocks = shape.rows if block == 1 else 3 * shape.rows
    number = np.arange(num_blocks, dtype=np.int32) // shape.rows  # of its row's blocks
    position = shape.context - block * (used - number)
    length = np.where(number < used, block, 0).astype(np.int32)
    return np.arange(num_blocks, dtype=np.int32) % shape.rows, position.astype(np.int32), length


def _chosen(shape: Shape, num_blocks: int, entries: int) -> np.ndarray:
    """Every n-th entry."""
    index = np.arange(shape.top_k, dtype=np.int32) * (entries // shape.top_k)
    return np.broadcast_to(index, (num_blocks, shape.top_k))


def _table(rows: int, places: int, num_pages: int) -> np.ndarray:
    """Pages one after another; rows share some where there are not enough."""
    return np.arange(rows * places, dtype=np.int32).reshape(rows, places) % num_pages
