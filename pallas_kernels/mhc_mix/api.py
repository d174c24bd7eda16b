"""Public functions of the operation."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.mhc_mix import gpu, native, reference, tpu
from pallas_kernels.mhc_mix.reference import sinkhorn
from pallas_kernels.target import CPU, Target

__all__ = ["MixConfig", "mhc_read", "mhc_write", "sinkhorn"]


class MixConfig(NamedTuple):
    """The numbers of a model that do not change from site to site."""

    sinkhorn_iters: int
    eps: float  # added to mixing weights and their sums
    norm_eps: float


def mhc_read(
    streams: jax.Array,  # [S, T, D]
    fn: jax.Array,  # [(2 + S) * S, S * D] float32
    base: jax.Array,  # [(2 + S) * S] float32
    scale: jax.Array,  # [3] float32: of reading, writing and mixing
    config: MixConfig,
    target: Target = CPU,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block input [T, D], write weights [S, T] and mixing matrix [S, S, T], the last two float32.

    Raises ValueError for shapes that do not fit.
    """
    s, _, width = streams.shape
    if fn.shape != ((2 + s) * s, s * width) or base.shape != fn.shape[:1] or scale.shape != (3,):
        raise ValueError(
            f"mhc_read: fn {fn.shape}, base {base.shape}, scale {scale.shape} do not fit streams {streams.shape}"
        )
    if target.has_tpu_kernels:
        return tpu.mhc_read(streams, fn, base, scale, config, target=target)
    if gpu.supports(streams, target):
        return gpu.mhc_read(streams, fn, base, scale, config, target=target)
    if native.supports(streams, target):
        return native.mhc_read(streams, fn, base, scale, config)
    return reference.mhc_read(streams, fn, base, scale, config)


def mhc_write(
    streams: jax.Array,  # [S, T, D]
    out: jax.Array,  # [T, D]
    post: jax.Array,  # [S, T]
    comb: jax.Array,  # [S, S, T]
    target: Target = CPU,
) -> jax.Array:
    """X'_k = post_k * out + sum_j comb[j, k] X_j [S, T, D], accumulated in float32 and cast once.

    Raises ValueError for shapes that do not fit.
    """
    s, t, width = streams.shape
    if out.shape != (t, width) or post.shape != (s, t) or comb.shape != (s, s, t):
        raise ValueError(
            f"mhc_write: out {out.shape}, post {post.shape}, comb {comb.shape} do not fit streams {streams.shape}"
        )
    if target.has_tpu_kernels:
        return tpu.mhc_write(streams, out, post, comb, target=target)
    if gpu.supports(streams, target) and out.dtype == streams.dtype:
        return gpu.mhc_write(streams, out, post, comb, target=target)
    if native.supports(streams, target):
        return native.mhc_write(streams, out, post, comb)
    return reference.mhc_write(streams, out, post, comb)
