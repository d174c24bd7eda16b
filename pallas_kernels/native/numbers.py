"""Vectors of 16 floats: what kernels compute with them beyond LLVM's own operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from pallas_kernels.native.emit import FLOAT, HALF, INT, LANES, VECTOR, Builder, Value

_INTS, _HALVES = ir.VectorType(INT, LANES), ir.VectorType(HALF, LANES)
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_LEAST, _MOST = -87.0, 88.0  # whose exponentials are normal floats
# Of exp(x) / x**2 - 1 / x**2 - 1 / x on [-ln 2 / 2, ln 2 / 2], highest power first (Cephes).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


_LOG1P = 15  # the last power: u is at most 1/3, and 3**-16 / 17 of the sum is below a bit


def constant(value: float) -> ir.Constant:
    return ir.Constant(VECTOR, [value] * LANES)


def gathered(b: Builder, values: Sequence[Value]) -> Value:
    """Floats as a vector; zeros behind them."""
    vector = constant(0.0)
    for i, value in enumerate(values):
        vector = b.insert_element(vector, value, ir.Constant(INT, i))
    return vector


def lane(b: Builder, vector: Value, i: int) -> Value:
    return b.extract_element(vector, ir.Constant(INT, i))


def pick(b: Builder, vector: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
    """Lanes of a vector, or from 16 on of another, as a vector."""
    other = ir.Constant(vector.type, ir.Undefined) if other is None else other
    return b.shuffle_vector(vector, other, ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes)))


def largest(b: Builder, x: Value, y: Value) -> Value:
    """Of each lane; where y is NaN, NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def across(b: Builder, vector: Value, distances: Sequence[int], join: Callable[[Value, Value], Value]) -> Value:
    """Joins every lane with those that are `distances`, powers of two, away: (8, 4, 2, 1) puts all 16 in each lane."""
    for distance in distances:
        vector = join(vector, pick(b, vector, [i ^ distance for i in range(LANES)]))
    return vector


def totals(b: Builder, vectors: Sequence[Value]) -> Value:
    """The sum of each of 16 vectors, as a vector."""
    for half in (8, 4, 2, 1):
        # Lane i of the joined one is of x where i & half is 0, else of y.
        first = [i if not i & half else i ^ half | LANES for i in range(LANES)]
        second = [i | half if not i & half else i | LANES for i in range(LANES)]
        vectors = [
            b.fadd(pick(b, x, first, y), pick(b, x, second, y))
            for x, y in zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        ]
    return vectors[0]


def interleaved(b: Builder, x: Value, y: Value, first: int) -> Value:
    """Of two vectors of bfloat16 numbers (`HALF`), 16 pairs of x and y from number `first` on, as a vector of words."""
    other = x.type.count
    return b.bitcast(pick(b, x, [of + i for i in range(first, first + LANES) for of in (0, other)], y), VECTOR)


def transposed(b: Builder, vectors: Sequence[Value]) -> list[Value]:
    """Of 16 vectors, the i-th numbers as the i-th vector."""
    found = list(vectors)
    for half in (8, 4, 2, 1):
        # Blocks of `half` x `half` numbers change places across the diagonal.
        first = [i if not i & half else i ^ half | LANES for i in range(LANES)]
        second = [i | half if not i & half else i | LANES for i in range(LANES)]
        for i in range(LANES):
            if not i & half:
                x, y = found[i], found[i | half]
                found[i], found[i | half] = pick(b, x, first, y), pick(b, x, second, y)
    return found


def exp(b: Builder, x: Value) -> Value:
    """To the last bit or two; what is below -87 is taken as -87, what is above 88 as 88."""
    x = largest(b, constant(_LEAST), x)
    x = b.select(b.fcmp_ordered("<", constant(_MOST), x), constant(_MOST), x)
    power = b.call(b.intrinsic("llvm.nearbyint.v16f32", VECTOR, [VECTOR]), [b.fmul(x, constant(_LOG2_E))])
    rest = b.fused_multiply_add(power, constant(-_LN_2_HIGH), x)
    rest = b.fused_multiply_add(power, constant(-_LN_2_LOW), rest)
    value = constant(_EXP[0])
    for coefficient in _EXP[1:]:
        value = b.fused_multiply_add(value, rest, constant(coefficient))
    value = b.fadd(b.fused_multiply_add(value, b.fmul(rest, rest), rest), constant(1.0))
    exponent = b.shl(b.fptosi(power, _INTS), ir.Constant(_INTS, [23] * LANES))
    return b.bitcast(b.add(b.bitcast(value, _INTS), exponent), VECTOR)


def log1p(b: Builder, x: Value) -> Value:
    """log(1 + x) of x in [0, 1], to the last bit or two: 2 (u + u**3 / 3 + u**5 / 5 + ...) with u = x / (2 + x)."""
    u = b.fdiv(x, b.fadd(x, constant(2.0)))
    square = b.fmul(u, u)
    rest = constant(1 / _LOG1P)
    for odd in range(_LOG1P - 2, 0, -2):
        rest = b.fused_multiply_add(rest, square, constant(1 / odd))
    return b.fmul(b.fadd(u, u), rest)


def sigmoid(b: Builder, x: Value) -> Value:
    one = constant(1.0)
    return b.fdiv(one, b.fadd(one, exp(b, b.fsub(constant(0.0), x))))


def store(b: Builder, x: Value, address: Value, kind: ir.Type) -> None:
    """As floats, or rounded to bfloat16 (`HALF`)."""
    if kind is FLOAT:
        b.store(x, address, align=4)
        return
    bits = b.bitcast(x, _INTS)
    sixteen = ir.Constant(_INTS, [16] * LANES)
    odd = b.and_(b.lshr(bits, sixteen), ir.Constant(_INTS, [1] * LANES))
    rounded = b.add(bits, b.add(odd, ir.Constant(_INTS, [0x7FFF] * LANES)))
    b.store(b.trunc(b.lshr(rounded, sixteen), _HALVES), address, align=2)
