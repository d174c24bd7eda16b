"""The grouped matmul on a GPU: each tile of rows times its group's matrix, FP8 and FP4 widened in registers.

A block of threads multiplies one tile of rows by 256 columns of its group's matrix, 128 a warpgroup. Weights and rows
arrive by TMA in a ring of shared-memory buffers, a chunk along K at a time, so at decode, where reading the weights
bounds the speed, only stored bytes are read, and each once; blocks of the same tile run side by side, so at prefill a
group's weights come from the second-level cache for all its tiles but the first. The matmuls are `mma` (warp level),
which Hopper and Blackwell both have; each warp has all rows and its own columns, so no weight is widened twice.

`ldmatrix`, which brings a weight to the thread whose `mma` needs it, moves 16 bits: codes of a byte are read as pairs
of neighbouring columns, and the even and the odd columns of 128 are multiplied apart; they are put back in order
outside, in whatever reads the result. Likewise FP4's two nibbles (even and odd rows of K) are multiplied by the even
and the odd columns of x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.dequantize import FP4_BLOCK, FP8_BLOCK
from pallas_kernels.target import Target

plgpu: Any = mosaic_gpu  # JAX 0.10 has another version of it, for which there is no kernel

_COLUMNS = 256  # of a block
_OWN = 128  # of those, a warpgroup's; one FP8 scale holds for all
_DEPTH = 64  # of K in one matmul: a tile of shared memory
_ROWS = 16  # of a tile in one `mma`
_SHARED_BYTES = 216 << 10  # for buffers, of the 227 KiB a block can have


class _Form(NamedTuple):
    """How weights are stored. A chunk is what one buffer holds."""

    codes: int  # of 16 bits: columns that lie side by side in one
    rows: int  # of the stored weights in a chunk; of K, FP4 has twice as many
    depth: int  # of K in a chunk


_FORMS = {
    "dense": _Form(codes=1, rows=64, depth=64),
    "fp8": _Form(codes=2, rows=128, depth=128),
    "fp4": _Form(codes=2, rows=64, depth=128),
}


def _form_of(weights: jax.Array) -> str:
    return {"int8": "fp4", "float8_e4m3fn": "fp8"}.get(weights.dtype.name, "dense")


def supports(x: jax.Array, weights: jax.Array, tile_rows: int, target: Target) -> bool:
    """Whether the kernel takes these: bfloat16 rows, tiles of 16 to 128, K and N of whole chunks.

    Float32 too where it is interpreted, for exact comparisons.
    """
    form = _form_of(weights)
    dtypes = (jnp.bfloat16, jnp.float32) if target.interpret else (jnp.bfloat16,)
    return (
        target.has_gpu_kernels
        and x.dtype in dtypes
        and (form != "dense" or weights.dtype == x.dtype)
        and tile_rows % _ROWS == 0
        and tile_rows <= 128
        and x.shape[1] % _FORMS[form].depth == 0
        and weights.shape[2] % _COLUMNS == 0
    )


def grouped_matmul(
    x: jax.Array,  # [P, K]
    weights: jax.Array,  # [G, K, N], or packed FP4 [G, K / 2, N]
    group: jax.Array,  # [P / tile_rows]
    num_tiles: jax.Array,  # []
    scale: jax.Array | None,
    *,
    target: Target,
) -> jax.Array:
    """[P, N] float32; rows of unused tiles are zero."""
    num_rows, k = x.shape
    n = weights.shape[2]
    tile_rows = num_rows // group.shape[0]
    name = _form_of(weights)
    form = _FORMS[name]
    inputs = [_even_then_odd(x) if name == "fp4" else x, _in_pairs(weights) if form.codes == 2 else weights]
    if scale is not None:
        inputs.append(_in_pairs(scale) if name == "fp4" else scale)

    def buffers(shape: tuple[int, ...], dtype: Any) -> Any:
        swizzled = (plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((slots, *shape), dtype, transforms=swizzled)

    width = _COLUMNS // form.codes
    slot_bytes = tile_rows * form.depth * x.dtype.itemsize + form.rows * width * inputs[1].dtype.itemsize
    slots = max(2, min(4, k // form.depth, _SHARED_BYTES // slot_bytes))
    parts = form.depth // _DEPTH
    scratch = {
        "x": buffers((parts, tile_rows, _DEPTH), x.dtype),
        "weights": buffers((form.rows, width), inputs[1].dtype),
        "scale": plgpu.SMEM((slots, form.depth // FP4_BLOCK, width), jnp.int16) if name == "fp4" else None,
        "here": plgpu.Barrier(num_arrivals=parts + (2 if name == "fp4" else 1), num_barriers=slots),
        "read": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
    }

    def grouped(groups, used, *refs):
        *arrays, out, scratch = refs
        _kernel(groups, used, _Operands(name, *arrays), out, scratch, interpret=target.interpret)

    out = plgpu.kernel(
        grouped,
        out_type=jax.ShapeDtypeStruct((num_rows, n), jnp.float32),
        scratch_types=[scratch],
        grid=(group.shape[0], n // _COLUMNS),
        grid_names=("tile", "slice"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=_cost(x, weights, scale, group.shape[0]),
        interpret=plgpu.InterpretGPUParams() if target.interpret else None,
    )(group, num_tiles.reshape(1), *inputs)
    if form.codes == 1:
        return out
    return out.reshape(num_rows, n // _OWN, 2, _OWN // 2).swapaxes(2, 3).reshape(num_rows, n)


def _in_pairs(codes: jax.Array) -> jax.Array:
    """Bytes [..., N] -> int16 [..., N / 2], the even column in the low byte. The same memory: nothing is copied."""
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.int16)


def _even_then_odd(x: jax.Array) -> jax.Array:
    """[P, K], the even columns first."""
    return x.reshape(x.shape[0], -1, 2).swapaxes(1, 2).reshape(x.shape)


class _Operands(NamedTuple):
    """In the device's memory."""

    form: str
    x: Any  # [P, K]
    weights: Any  # [G, K, N], or pairs of codes [G, K or K / 2, N / 2]
    scale: Any = None  # FP8: [G, K / 128, N / 128]; FP4: pairs of bytes [G, K / 32, N / 2]


def _kernel(groups, num_tiles, operands: _Operands, out, scratch, *, interpret):
    tile, part = lax.axis_index("tile"), lax.axis_index("slice")
    thread = lax.axis_index("warpgroup")
    tile_rows = scratch["x"].shape[2]
    own = pl.ds(part * _COLUMNS + thread * _OWN, _OWN)
    rows = pl.ds(tile * tile_rows, tile_rows)
    used = tile < num_tiles[0]

    @pl.when(used)
    def _() -> None:
        group = groups[tile]
        sums = _multiply(operands, scratch, tile, group, part, thread, interpret)
        _write(out.at[rows, own], sums)

    @pl.when(jnp.logical_not(used))
    def _() -> None:
        _write(out.at[rows, own], _zeros(tile_rows, _FORMS[operands.form].codes))


def _multiply(operands: _Operands, scratch, tile, group, part, thread, interpret):
    form = _FORMS[operands.form]
    slots, _, tile_rows, _ = scratch["x"].shape
    chunks = operands.x.shape[1] // form.depth

    def bring(chunk) -> None:
        @pl.when((thread == 0) & (chunk < chunks))
        def _() -> None:
            _copy(operands, scratch, lax.rem(chunk, slots), chunk, tile, group, part)

    def step(chunk, sums):
        slot = lax.rem(chunk, slots)

        @pl.when((thread == 0) & (chunk > 0))
        def _() -> None:
            _wait_until_read(scratch["read"].at[lax.rem(chunk - 1, slots)])

        bring(chunk + slots - 1)
        factor = None
        if operands.form == "fp8":  # read before the wait, which hides it
            factor = operands.scale[group, chunk, part * (_COLUMNS // FP8_BLOCK) + thread]
        plgpu.barrier_wait(scratch["here"].at[slot])
        width = _OWN // form.codes
        weights = scratch["weights"].at[slot, :, pl.ds(thread * width, width)]
        if operands.form == "fp4":
            scale = scratch["scale"].at[slot, :, pl.ds(thread * width, width)]
            products = _fp4(weights, scale, scratch["x"].dtype)
        elif operands.form == "fp8":
            products = _fp8(weights, factor, scratch["x"].dtype)
        else:
            products = _dense(weights)
        for i, matrices in enumerate(products):
            sums = _add(sums, scratch["x"].at[slot, i], matrices, interpret)
        plgpu.commit_smem()  # a copy may follow what was read here
        plgpu.barrier_arrive(scratch["read"].at[slot])
        return sums

    for i in range(slots - 1):
        bring(i)
    return lax.fori_loop(0, chunks, step, _zeros(tile_rows, form.codes))


def _wait_until_read(barrier) -> None:
    """Both warpgroups have read a buffer: the next chunk may go there."""
    plgpu.barrier_wait(barrier)


def _copy(operands: _Operands, scratch, slot, chunk, tile, group, part) -> None:
    """Starts the copies of a chunk into its buffers."""
    form = _FORMS[operands.form]
    width = _COLUMNS // form.codes
    here, columns = scratch["here"].at[slot], pl.ds(part * width, width)
    weights = operands.weights.at[group, pl.ds(chunk * form.rows, form.rows), columns]
    plgpu.copy_gmem_to_smem(weights, scratch["weights"].at[slot], here)
    _, parts, tile_rows, _ = scratch["x"].shape
    rows = pl.ds(tile * tile_rows, tile_rows)
    for i in range(parts):
        if operands.form == "fp4":  # even, odd
            first = i * (operands.x.shape[1] // 2) + chunk * _DEPTH
        else:
            first = chunk * form.depth + i * _DEPTH
        plgpu.copy_gmem_to_smem(operands.x.at[rows, pl.ds(first, _DEPTH)], scratch["x"].at[slot, i], here)
    if operands.form == "fp4":
        count = form.depth // FP4_BLOCK
        scale = operands.scale.at[group, pl.ds(chunk * count, count), columns]
        plgpu.copy_gmem_to_smem(scale, scratch["scale"].at[slot], here)


# What the parts of x [rows, _DEPTH] in a buffer are multiplied by: matrices [_DEPTH, columns], one a sum.


def _dense(weights):
    yield [plgpu.load(weights, layout=_layout("MMA_RHS"), optimized=False)]


def _fp8(weights, factor, dtype):
    for depth in range(0, weights.shape[0], _DEPTH):
        pairs = plgpu.load(weights.at[pl.ds(depth, _DEPTH)], layout=_layout("MMA_RHS"), optimized=False)
        codes = [(pairs & 255).astype(jnp.uint8), lax.shift_right_logical(pairs, jnp.int16(8)).astype(jnp.uint8)]
        values = [lax.bitcast_convert_type(c, jnp.float8_e4m3fn).astype(jnp.float32) for c in codes]
        yield [(v * factor).astype(dtype) for v in values]


def _fp4(weights, scale, dtype):
    layout = _layout("MMA_RHS")
    half = FP4_BLOCK // 2  # rows of bytes that share a scale
    scales = []
    for i in range(_DEPTH // half):
        pair = plgpu.load(scale.at[i], layout=layout.reduce(0), optimized=False).astype(jnp.int32)
        scales.append([_power_of_two(pair & 255), _power_of_two((pair >> 8) & 255)])
    for odd_row in range(2):
        matrices: list[list[jax.Array]] = [[], []]
        for i in range(_DEPTH // half):
            pairs = plgpu.load(weights.at[pl.ds(i * half, half)], layout=layout, optimized=False)
            for odd_column in range(2):
                values = _e2m1(pairs, 2 * odd_column + odd_row)
                factor = lax.broadcast_in_dim(scales[i][odd_column], values.shape, [1])
                matrices[odd_column].append((values * plgpu.layout_cast(factor, layout)).astype(dtype))
        yield [lax.concatenate(parts, 0) for parts in matrices]


_E2M1_BIAS = 14  # of its exponent in float16: read as one, a value is 2 ** -14 times as large


def _e2m1(codes: jax.Array, nibble: int) -> jax.Array:
    """A nibble of int16 -> float32, 2 ** -14 of the value: its bits are put where float16 has sign, exponent, fraction.

    Shifting right copies the sign over what is then masked out. 0.5, a subnormal in both, is none in float32.
    """
    top = codes << (12 - 4 * nibble) if nibble < 3 else codes
    bits = lax.shift_right_arithmetic(top, jnp.full_like(top, 3)) & jnp.int16(-0x7200)  # 0x8e00
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _power_of_two(byte: jax.Array) -> jax.Array:
    """E8M0 in int32, up to 240 -> float32, 2 ** 14 times as large, which makes up for `_e2m1`."""
    return lax.bitcast_convert_type((byte + _E2M1_BIAS) << 23, jnp.float32)


# Sums are lists of rows, _ROWS each, of lists of matrices [_ROWS, columns]: all columns, or the even and the odd ones.


def _zeros(tile_rows: int, codes: int):
    zero = plgpu.layout_cast(jnp.zeros((_ROWS, _OWN // codes), jnp.float32), _layout("MMA_ACC"))
    return [[zero] * codes for _ in range(tile_rows // _ROWS)]


def _add(sums, x, matrices, interpret: bool):
    """The sums plus x [rows, _DEPTH] times each matrix."""
    result = []
    for i, parts in enumerate(sums):
        rows = plgpu.load(x.at[pl.ds(i * _ROWS, _ROWS)], layout=_layout("MMA_LHS"), optimized=False)
        result.append([_matmul(part, rows, matrix, interpret) for part, matrix in zip(parts, matrices, strict=True)])
    return result


def _matmul(total: jax.Array, a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    if interpret:  # which has no mma
        return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(total, a, b)


def _write(out, sums) -> None:
    for i, parts in enumerate(sums):
        for j, part in enumerate(parts):
            width = part.shape[1]
            place = out.at[pl.ds(i * _ROWS, _ROWS), pl.ds(j * width, width)]
            plgpu.store(place, part, optimized=False)


def _layout(name: str) -> Any:
    return getattr(plgpu.Layout, name)(jnp.bfloat16, m_warps=1)


def _cost(x: jax.Array, weights: jax.Array, scale: jax.Array | None, max_tiles: int) -> pl.CostEstimate:
    """Upper bounds from the shapes: all tiles in use, each of another group while there are groups."""
    groups = min(weights.shape[0], max_tiles)
    stored = sum(groups * a[0].size * a.dtype.itemsize for a in (weights, scale) if a is not None)
    n = weights.shape[2]
    return pl.CostEstimate(
        flops=2 * x.size * n,
        bytes_accessed=stored + x.size * x.dtype.itemsize + x.shape[0] * n * 4,
        transcendentals=0,
    )
