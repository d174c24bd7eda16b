"""Public function of the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import gpu_attention, native_attention, tpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.online_softmax import Running
from pallas_kernels.swa_attention import reference
from pallas_kernels.target import CPU, Target


def swa_attention(
    q: jax.Array,  # [NB, B, N, H], or [T, N, H] where blocks have a packing
    blocks: QueryBlocks,
    window_pages: Pages,  # ring table: position p is at table place (p // entries_per_page) % P
    sink: jax.Array,  # [N], or this device's part of it where several share the pages
    *,
    window: int,
    scale: float,
    target: Target = CPU,
) -> jax.Array:  # q's shape, of N those that have sinks; float32, or what is rounded from it to q's type
    """Each query attends to the last `window` positions of its row, itself included. Raises ValueError on shapes.

    On a GPU with kernels it is one for what `gpu_attention.supports`, on a CPU for what `native_attention.supports`,
    else the jnp path.
    """
    check_shapes("swa_attention", q, blocks, window_pages, sink)
    block = blocks.tokens(q).shape[1]
    if native_attention.supports(q, blocks, [window_pages], target):
        entries = native_attention.window_entries(blocks, block, window_pages, window)
        return native_attention.attend(q, blocks, entries, None, sink, scale)
    if blocks.packing is not None:
        sizes: Any = {"window": window, "scale": scale, "target": target}
        return of_packed(lambda q, blocks: swa_attention(q, blocks, window_pages, sink, **sizes), q, blocks)
    kernel: Any = {"scale": scale, "target": target, "partial": window_pages.count > 1}
    if tpu_attention.supports([window_pages], target):
        run = tpu_attention.attend(q, blocks, window_pages, None, None, sink, window=window, ratio=1, **kernel)
    elif gpu_attention.supports(q, [window_pages], target):
        keys = [gpu_attention.window_keys(blocks, window_pages, window, q.shape[1])]
        run = gpu_attention.attend(q, keys, sink, **kernel)
    else:
        run = reference.swa_attention(q, blocks, window_pages, window=window, scale=scale)
    return finish(run, q, sink, window_pages)


def of_packed(attend: Callable[..., jax.Array], q: jax.Array, blocks: QueryBlocks) -> jax.Array:
    """attend(queries, blocks) of packed queries, for what takes them in blocks."""
    assert blocks.packing is not None
    return blocks.packing.packed(attend(blocks.packing.blocked(q), blocks.unpacked()))


def finish(run: Running | jax.Array, q: jax.Array, sink: jax.Array, pages: Pages) -> jax.Array:
    """Merges the devices' parts and adds the sinks, where a kernel has not done it: [NB, B, sinks, H]."""
    return reference.finish(run, q, sink, pages) if isinstance(run, Running) else run


def check_shapes(name: str, q: jax.Array, blocks: QueryBlocks, pages: Pages, sink: jax.Array) -> None:
    if blocks.packing is not None:
        if q.ndim != 3:
            raise ValueError(f"{name}: q {q.shape} must be [T, N, H], as the blocks have a packing")
    elif q.ndim != 4 or q.shape[0] != blocks.row.shape[0]:
        raise ValueError(f"{name}: q {q.shape} must be [NB, B, N, H] with NB={blocks.row.shape[0]}")
    if sink.ndim != 1 or q.shape[-2] not in (sink.shape[0], sink.shape[0] * pages.count):
        raise ValueError(f"{name}: sink {sink.shape} must be [{q.shape[-2]}], or a {pages.count}th of it")
    if pages.pool.format.width != q.shape[-1]:
        raise ValueError(f"{name}: entries of {pages.pool.format.width} channels do not fit q {q.shape}")
