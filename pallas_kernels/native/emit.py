"""What LLVM's builder lacks for writing kernels: counted loops with values carried along, fields of structs, vectors.

Vectors have 16 floats on every machine; LLVM splits them where registers are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

Value = Any  # of the program that is written; the builder's own types say that most methods return None
POINTER, VOID = ir.PointerType(), ir.VoidType()
BYTE, HALF, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = 16
VECTOR = ir.VectorType(FLOAT, LANES)
_HALVES, _INTS = ir.VectorType(HALF, LANES), ir.VectorType(INT, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which its builder lacks. Only what an intrinsic takes is of it: in memory it is a `HALF`."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


LINE = 64  # bytes of a cache line


def size_of(kind: ir.Type) -> int:
    """Bytes of a number."""
    return {FLOAT: 4, HALF: 2}[kind]


def internal(module: ir.Module, name: str, arguments: Sequence[ir.Type]) -> ir.Function:
    """A function without a result that an operation calls: it stays one, so that it has all registers."""
    function = ir.Function(module, ir.FunctionType(VOID, arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function


def long(value: int) -> ir.Constant:
    return ir.Constant(LONG, value)


class Builder(ir.IRBuilder):
    """Of one function, from its first block on."""

    def __init__(self, function: ir.Function):
        super().__init__(function.append_basic_block("entry"))

    def field(self, struct: Value, offset: int, kind: ir.Type = POINTER) -> Value:
        """What is `offset` bytes into a struct."""
        return self.load(self.gep(struct, [long(offset)], source_etype=BYTE), typ=kind)

    def element(self, array: Value, index: Value, kind: ir.Type) -> Value:
        """The address of an element."""
        return self.gep(array, [index], source_etype=kind)

    def integer(self, array: Value, index: Value) -> Value:
        """An element of an array of int32 numbers, widened."""
        return self.sext(self.load(self.element(array, index, INT), typ=INT), LONG)

    def smaller(self, a: Value, b: Value) -> Value:
        return self.select(self.icmp_signed("<", a, b), a, b)

    def loop(
        self,
        start: Value,
        goes_on: Callable[[Value], Value],
        step: Value | int,
        body: Callable[..., Sequence[Value] | None],
        carried: Sequence[Value] = (),
    ) -> tuple[Value, list[Value]]:
        """for (i = start; goes_on(i); i += step) carried = body(i, *carried); the last i and what is carried."""
        before = self.block
        head, inside, after = (self.append_basic_block(f"loop.{part}") for part in ("head", "body", "end"))
        self.branch(head)
        self.position_at_end(head)
        i = self.phi(LONG)
        i.add_incoming(start, before)
        values = [self.phi(value.type) for value in carried]
        for value, first in zip(values, carried, strict=True):
            value.add_incoming(first, before)
        self.cbranch(goes_on(i), inside, after)
        self.position_at_end(inside)
        new = body(i, *values) or ()
        i.add_incoming(self.add(i, long(step) if isinstance(step, int) else step), self.block)
        for value, next_value in zip(values, new, strict=True):
            value.add_incoming(next_value, self.block)
        self.branch(head)
        self.position_at_end(after)
        return i, values

    def vector(self, address: Value, kind: ir.Type) -> Value:
        """16 floats, or 16 bfloat16 numbers (`HALF`) widened: their bits are the upper half of a float's."""
        if kind is FLOAT:
            return self.load(address, align=4, typ=VECTOR)
        wide = self.zext(self.load(address, align=2, typ=_HALVES), _INTS)
        return self.bitcast(self.shl(wide, ir.Constant(_INTS, [16] * LANES)), VECTOR)

    def splat(self, address: Value) -> Value:
        """The float at an address, 16 times."""
        return self.spread(self.load(address, align=4, typ=FLOAT))

    def spread(self, value: Value) -> Value:
        """A float, 16 times."""
        undefined = ir.Constant(VECTOR, ir.Undefined)
        one = self.insert_element(undefined, value, ir.Constant(INT, 0))
        return self.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * LANES))

    def fused_multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        return self.call(self.intrinsic("llvm.fma.v16f32", VECTOR, [VECTOR] * 3), [a, b, c])

    def add_products_of_pairs(self, x: Value, y: Value, sums: Value) -> Value:
        """x and y, of 64 bytes, are 16 pairs of bfloat16 numbers each: sums + x[0] * y[0] + x[1] * y[1] of each pair.

        Of CPUs with `avx512bf16` (`machine_code.has_feature`). Numbers below the normal ones count as zeros.
        """
        name, pairs = "llvm.x86.avx512bf16.dpbf16ps.512", [self.bitcast(of, _PAIRS) for of in (x, y)]
        return self.call(self.intrinsic(name, VECTOR, [VECTOR, _PAIRS, _PAIRS]), [sums, *pairs])

    def copy(self, to: Value, source: Value, size: Value) -> None:
        """So many bytes."""
        function = self.intrinsic("llvm.memcpy.p0.p0.i64", VOID, [POINTER, POINTER, LONG, ir.IntType(1)])
        self.call(function, [to, source, size, ir.Constant(ir.IntType(1), 0)])

    def prefetch(self, address: Value) -> None:
        """Asks for the cache line at an address, which may be anywhere: no fault comes of it."""
        function = self.intrinsic("llvm.prefetch.p0", VOID, [POINTER, INT, INT, INT])
        self.call(function, [address, *(ir.Constant(INT, hint) for hint in (0, 3, 1))])  # to read, to keep, data

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, arguments), name)
