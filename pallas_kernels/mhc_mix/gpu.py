"""Hyper-connections on a GPU: three kernels make a site's reading, one its writing.

1. `_project`: the streams times `fn`, and their squares, 64 tokens and 512 columns of a stream a block, so that the
   few tokens of a decode step still keep many blocks busy. `mma` has bfloat16 operands: the streams are, and `fn` is
   split in three that add up to its float32. What the blocks of a token have summed stays apart until the next kernel
   adds it up, in an order that no other token changes.
2. `_mix`: a thread a token, which holds its mixing matrix in registers for the Sinkhorn rounds.
3. `_read` and `_write`: weighted sums of rows, a row's weights the same for all threads; bound by the streams' bytes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.target import Target

if TYPE_CHECKING:
    from pallas_kernels.mhc_mix.api import MixConfig

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

STREAMS = 4
_MIXES = (2 + STREAMS) * STREAMS  # weights of a token: of reading, of writing, of mixing
_TOKENS = 64  # of a block that projects
_COLUMNS = 512  # of a stream there
_CHUNK = 128  # of those at a time, while the next ones arrive
_DEPTH = 64  # of those in one matmul: a tile of shared memory
_STEP = 16  # of those in one `mma`
_FN_ROWS = 32  # _MIXES and some unused ones: whole tiles of the `mma`
_TOGETHER = 4  # parts of a sum whose loads are under way at once; each of the four streams has as many parts
_THREADS = 128
_SPAN = 8 * _THREADS  # columns of a row that a block reads or writes, 16 bytes a thread


def supports(streams: jax.Array, target: Target) -> bool:
    """Whether the kernels take these: four bfloat16 streams of a multiple of 1,024 columns."""
    s, _, width = streams.shape
    return target.has_gpu_kernels and s == STREAMS and streams.dtype == jnp.bfloat16 and width % _SPAN == 0


def mhc_read(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, config: MixConfig, *, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `api.mhc_read`."""
    s, num_tokens, _ = streams.shape
    mixes = _mix(*_project(streams, fn, target), base, scale, streams.shape[2], config, target)[:, :num_tokens]
    x = _read(streams, mixes[:s], target)
    return x, mixes[s : 2 * s], mixes[2 * s :].reshape(s, s, num_tokens)


def _call(name: str, body: Any, target: Target, **options: Any) -> Any:
    """A kernel of one warpgroup a block."""
    body.__name__ = name
    return plgpu.kernel(
        body,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if target.interpret else None,
        **options,
    )


def _project(streams: jax.Array, fn: jax.Array, target: Target) -> tuple[jax.Array, jax.Array]:
    """Parts of fn times the streams [parts, _FN_ROWS, T'], and of their squares [parts, T'].

    T' is whole blocks of `_mix`; what is past T, and past the rows of fn, may be anything.
    """
    s, num_tokens, width = streams.shape
    padded = -(-num_tokens // _THREADS) * _THREADS
    parts, chunks = s * width // _COLUMNS, _COLUMNS // _CHUNK

    def body(streams, fn, sums, squares, scratch):
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        stream, first = lax.div(part, width // _COLUMNS), lax.rem(part, width // _COLUMNS) * _COLUMNS
        tokens = pl.ds(tile * _TOKENS, _TOKENS)  # those past the last one are zeros

        def bring(c, carry):
            here = scratch["here"].at[c]
            x = streams.at[stream, tokens, pl.ds(first + c * _CHUNK, _CHUNK)]
            plgpu.copy_gmem_to_smem(x, scratch["x"].at[c], here)
            columns = pl.ds(part * _COLUMNS + c * _CHUNK, _CHUNK)
            plgpu.copy_gmem_to_smem(fn.at[:, columns], scratch["fn"].at[c, pl.ds(0, _MIXES)], here)
            return carry

        def multiply(c, state):
            plgpu.barrier_wait(scratch["here"].at[c])
            for d in range(0, _CHUNK, _DEPTH):
                columns = pl.ds(d, _DEPTH)
                state = _add(state, scratch["fn"].at[c, :, columns], scratch["x"].at[c, :, columns], target)
            return state

        lax.fori_loop(0, chunks, bring, 0)
        total = plgpu.layout_cast(jnp.zeros((_FN_ROWS, _TOKENS), jnp.float32), _layout("MMA_ACC"))
        square = plgpu.layout_cast(jnp.zeros((_STEP, _TOKENS), jnp.float32), _layout("MMA_RHS"))
        total, square = lax.fori_loop(0, chunks, multiply, (total, square))
        plgpu.store(sums.at[part, :, tokens], total, optimized=False)
        plgpu.store(squares.at[part, tokens], jnp.sum(square, axis=0), optimized=False)

    def tiles(rows: int, dtype: Any) -> Any:
        swizzled = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((chunks, rows, _CHUNK), dtype, transforms=swizzled)

    return _call(
        "mhc_project",
        body,
        target,
        out_type=[
            jax.ShapeDtypeStruct((parts, _FN_ROWS, padded), jnp.float32),
            jax.ShapeDtypeStruct((parts, padded), jnp.float32),
        ],
        scratch_types=[
            {
                "x": tiles(_TOKENS, streams.dtype),
                "fn": tiles(_FN_ROWS, fn.dtype),
                "here": plgpu.Barrier(num_arrivals=2, num_barriers=chunks),
            }
        ],
        grid=(-(-num_tokens // _TOKENS), parts),
        grid_names=("tile", "part"),
        cost_estimate=pl.CostEstimate(
            flops=2 * 3 * fn.size * num_tokens + 2 * streams.size,
            bytes_accessed=streams.size * 2 + fn.size * 4 + parts * (_FN_ROWS + 1) * num_tokens * 4,
            transcendentals=0,
        ),
    )(streams, fn)


def _add(
    state: tuple[jax.Array, jax.Array],
    fn: Any,  # [_FN_ROWS, _DEPTH]
    streams: Any,  # [_TOKENS, _DEPTH]
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """(sums plus fn times the streams, sums plus the streams' squares)."""
    total, square = state
    x = plgpu.load(streams.transpose((1, 0)), layout=_layout("MMA_RHS"), optimized=False)
    rest = plgpu.load(fn, layout=_layout("MMA_LHS"), optimized=False)
    for _ in range(3):
        rounded = rest.astype(jnp.bfloat16)
        rest -= rounded.astype(jnp.float32)
        if target.interpret:  # which has no mma
            total += jnp.dot(rounded, x, preferred_element_type=jnp.float32)
        else:
            total = plgpu.mma(total, rounded, x)
    for i in range(0, _DEPTH, _STEP):
        part = x[i : i + _STEP].astype(jnp.float32)
        square += part * part
    return total, square


def _layout(name: str) -> Any:
    return getattr(plgpu.Layout, name)(jnp.bfloat16, m_warps=_FN_ROWS // 16)


def _mix(
    sums: jax.Array,
    squares: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    width: int,
    config: MixConfig,
    target: Target,
) -> jax.Array:
    """[_MIXES, T'] weights of reading, of writing, and the mixing matrix by rows."""
    s, parts, padded = STREAMS, *squares.shape

    def body(sums, squares, base, scale, out):
        tokens = pl.ds(lax.axis_index("tile") * _THREADS, _THREADS)
        by_token = plgpu.Layout.WG_STRIDED((_THREADS,), vec_size=1)
        load = functools.partial(plgpu.load, layout=by_token, optimized=False)
        zero = plgpu.layout_cast(jnp.zeros((_THREADS,), jnp.float32), by_token)

        def add(i, totals):
            for part in range(_TOGETHER):
                place = i * _TOGETHER + part
                values = [load(sums.at[place, n, tokens]) for n in range(_MIXES)] + [load(squares.at[place, tokens])]
                totals = [total + value for total, value in zip(totals, values, strict=True)]
            return totals

        *z, square = lax.fori_loop(0, parts // _TOGETHER, add, [zero] * (_MIXES + 1))
        norm = lax.rsqrt(square / (s * width) + config.norm_eps)
        z = [x * norm * scale[min(n // s, 2)] + base[n] for n, x in enumerate(z)]
        for n in range(s):
            plgpu.store(out.at[n, tokens], _sigmoid(z[n]) + config.eps, optimized=False)
            plgpu.store(out.at[s + n, tokens], 2 * _sigmoid(z[s + n]), optimized=False)
        rows = [[x + config.eps for x in _softmax(z[s * i : s * (i + 1)])] for i in range(2, 2 + s)]

        def columns(rows):
            return _transpose([_normalised(column, config.eps) for column in _transpose(rows)])

        def one_round(_, rows):
            return columns([_normalised(row, config.eps) for row in rows])

        rows = lax.fori_loop(0, config.sinkhorn_iters - 1, one_round, columns(rows))
        for n, x in enumerate(x for row in rows for x in row):
            plgpu.store(out.at[2 * s + n, tokens], x, optimized=False)

    return _call(
        "mhc_mix",
        body,
        target,
        out_type=jax.ShapeDtypeStruct((_MIXES, padded), jnp.float32),
        grid=(padded // _THREADS,),
        grid_names=("tile",),
        cost_estimate=pl.CostEstimate(
            flops=padded * (parts * (_MIXES + 1) + 2 * config.sinkhorn_iters * s * (2 * s + 1)),
            bytes_accessed=padded * 4 * (parts * (_MIXES + 1) + _MIXES),
            transcendentals=padded * (_MIXES + 1),
        ),
    )(sums, squares, base, scale)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def _softmax(row: list[jax.Array]) -> list[jax.Array]:
    top = functools.reduce(jnp.maximum, row)
    return _normalised([jnp.exp(x - top) for x in row], 0)


def _normalised(row: list[jax.Array], eps: float) -> list[jax.Array]:
    share = 1 / (sum(row[1:], row[0]) + eps)
    return [x * share for x in row]


def _transpose(rows: list[list[jax.Array]]) -> list[list[jax.Array]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _read(streams: jax.Array, weights: jax.Array, target: Target) -> jax.Array:
    """sum_s weights [S, T] * streams [S, T, D], in float32, cast once."""

    def body(streams, weights, out):
        for token, place in _rows(streams.shape):
            out[token, place] = _sum(
                [weights[s, token] for s in range(STREAMS)],
                [_row(streams.at[s, token, place]) for s in range(STREAMS)],
            ).astype(out.dtype)

    return _call(
        "mhc_read",
        body,
        target,
        out_type=jax.ShapeDtypeStruct(streams.shape[1:], streams.dtype),
        **_grid(streams.shape),
        cost_estimate=pl.CostEstimate(
            flops=2 * streams.size,
            bytes_accessed=streams.size * 2 * (STREAMS + 1) // STREAMS + weights.size * 4,
            transcendentals=0,
        ),
    )(streams, weights)


def mhc_write(streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array, *, target: Target) -> jax.Array:
    """As `api.mhc_write`."""

    def body(streams, added, post, comb, mixed):
        for token, place in _rows(streams.shape):
            rows = [_row(added.at[token, place]), *(_row(streams.at[j, token, place]) for j in range(STREAMS))]
            for k in range(STREAMS):
                weights = [post[k, token], *(comb[j, k, token] for j in range(STREAMS))]
                mixed[k, token, place] = _sum(weights, rows).astype(mixed.dtype)

    return _call(
        "mhc_write",
        body,
        target,
        out_type=jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        **_grid(streams.shape),
        cost_estimate=pl.CostEstimate(
            flops=2 * (STREAMS + 1) * streams.size,
            bytes_accessed=streams.size * 2 * (2 * STREAMS + 1) // STREAMS + (post.size + comb.size) * 4,
            transcendentals=0,
        ),
    )(streams, out, post, comb)


def _grid(shape: tuple[int, ...]) -> dict[str, Any]:
    _, num_tokens, width = shape
    return {"grid": (num_tokens // _tokens(num_tokens), width // _SPAN), "grid_names": ("tile", "span")}


def _tokens(num_tokens: int) -> int:
    """Rows that a block reads or writes."""
    return 4 if num_tokens % 4 == 0 else 1


def _rows(shape: tuple[int, ...]) -> list[tuple[jax.Array, Any]]:
    """This block's: token, columns."""
    count = _tokens(shape[1])
    place = pl.ds(lax.axis_index("span") * _SPAN, _SPAN)
    return [(lax.axis_index("tile") * count + i, place) for i in range(count)]


def _row(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WG_STRIDED((_SPAN,), vec_size=8), optimized=False)


def _sum(weights: list[jax.Array], rows: list[jax.Array]) -> jax.Array:
    products = [weight * row.astype(jnp.float32) for weight, row in zip(weights, rows, strict=True)]
    return sum(products[1:], products[0])
