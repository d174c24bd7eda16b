"""Rows of index keys on pages, with whatever is not theirs NaN, for tests of the indexer's kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import chosen
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.pool import Pool, PoolShape
from pallas_kernels.target import CPU, Target


class World:
    """Each row's last block asks, an entry is a token; in layer 1 of 2. Row 0's block is one query short, the last is
    unused. Where there are to be `ties`, keys, queries and weights are small integers, which formats hold exactly.
    """

    def __init__(
        self,
        block: int,
        contexts: list[int],
        *,
        places: int,  # of the tables
        form: str = "float32",
        seed: int = 0,
        heads: int = 2,
        width: int = 8,
        epp: int = 8,
        tiled: bool = False,
        ties: bool = True,
    ):
        rng = np.random.default_rng(seed)
        rows = len(contexts)
        num_pages = places * rows
        table = np.full((rows, places), num_pages, np.int32)
        free = list(rng.permutation(num_pages))
        slots = []
        for r, n in enumerate(contexts):
            for page in range(-(-n // epp)):
                table[r, page] = free.pop()
            slots += [(num_pages + table[r, e // epp]) * epp + e % epp for e in range(n)]

        def numbers(*shape: int) -> np.ndarray:
            return rng.integers(-2, 3, shape) if ties else rng.normal(size=shape)

        keys = numbers(len(slots), width).astype(np.float32)
        if form == "int8":
            keys[:, 0] = 127  # a scale of 1
        shape = PoolShape(EntryFormat(form, width), 2 * num_pages, epp).abstract(tiled)
        pool = jax.tree.map(_poison, shape).write(jnp.array(slots), jnp.asarray(keys))
        self.pages = Pages(pool, jnp.asarray(table), 1, num_pages)
        length = np.array([block - (r == 0 and block > 1) for r in range(rows)] + [0])
        self.blocks = QueryBlocks(
            jnp.array([*range(rows), 0]), jnp.asarray(np.array([*contexts, 0]) - length), jnp.asarray(length)
        )
        dtype = form if form == "bfloat16" else "float32"
        self.q = jnp.asarray(numbers(rows + 1, block, heads, width), dtype)
        self.weights = jnp.asarray(numbers(rows + 1, block, heads), jnp.float32)

    def choose(self, k: int, target: Target) -> np.ndarray:
        pages = self.pages
        result = _choose(self.q, self.weights, self.blocks, pages.pool, pages.table, pages.num_pages, k, target)
        return np.asarray(result)

    def check(self, k: int, target: Target) -> None:
        """The kernel chooses what the jnp path does; indices are in ascending order."""
        self.check_is(self.choose(k, target), k)

    def check_is(self, got: np.ndarray, k: int) -> None:
        want = self.choose(k, CPU)
        if want.ndim == 3 and got.dtype != bool:
            got = np.asarray(chosen.unpack(jnp.asarray(got), *want.shape[1:]))
        np.testing.assert_array_equal(got, want if want.ndim == 3 else np.sort(want, axis=1))


def _poison(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.full(shape.shape, jnp.nan, shape.dtype)
    return jnp.full(shape.shape, 0x7F if shape.dtype == jnp.uint8 else 0x7FFFFFFF, shape.dtype)  # NaN as fp8, float32


@functools.partial(jax.jit, static_argnames=("num_pages", "k", "target"))
def _choose(
    q: jax.Array,
    weights: jax.Array,
    blocks: QueryBlocks,
    pool: Pool,
    table: jax.Array,
    num_pages: int,
    k: int,
    target: Target,
) -> jax.Array:
    return indexer_topk(q, weights, blocks, Pages(pool, table, 1, num_pages), ratio=1, k=k, target=target)
