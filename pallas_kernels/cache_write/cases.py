"""Shapes of cache writes, for every kind of entry and format: a decode step's 64 rows, and what a prompt's 2,048 tokens
of up to 64 rows store. Pro has Flash's entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write.api import cache_write
from pallas_kernels.case import Case, array
from pallas_kernels.entry_format import KEY_FORMATS, LATENT_FORMATS, EntryFormat
from pallas_kernels.pool import Pool, PoolShape
from pallas_kernels.target import Target

LAYERS, NUM_PAGES = 20, 1000
SMALL_PAGES = 20  # for a CPU
# kind: entries a page, entries of a prompt's step (parts of windows among them, which are stored nowhere)
KINDS = {"window": (64, 2048), "csa": (64, 2048 // 4 + 2 * 64), "index_key": (64, 2048 // 4 + 2 * 64), "hca": (16, 144)}
ROWS = 64


def cases(num_pages: int = NUM_PAGES) -> list[Case]:
    """With so many pages a layer."""
    return [
        _case(kind, step, EntryFormat(name, 128) if kind == "index_key" else EntryFormat(name, 512, 64), num_pages)
        for kind in KINDS
        for name in (KEY_FORMATS if kind == "index_key" else LATENT_FORMATS)
        for step in ("decode", "prefill")
    ]


def _case(kind: str, step: str, form: EntryFormat, num_pages: int) -> Case:
    entries, stored = KINDS[kind]
    num = ROWS if step == "decode" else stored
    model = "flash" if num_pages == NUM_PAGES else "small"

    def call(target: Target, pool: Pool, slots: jax.Array, entries: jax.Array, layer: jax.Array) -> Pool:
        return cache_write(pool, slots, entries, layer=layer, num_pages=num_pages, target=target)

    arrays = {
        "pool": PoolShape(form, LAYERS * num_pages, entries, gathered=kind == "csa"),
        "slots": array(jnp.int32, num),
        "entries": array(jnp.bfloat16, num, form.width),
        "layer": array(jnp.int32),
    }
    return Case(name=f"cache_write {model} {kind} {step} {form.name}", call=call, arrays=arrays, updated="pool")
