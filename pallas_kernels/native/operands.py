"""An operation's operands, results and items, as its code finds them in the frame of a call."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.native.emit import LONG, POINTER, VOID, Builder, Value, long
from pallas_kernels.native.handler import BUFFER_DATA, BUFFER_DIMS, FRAME_ARGS, FRAME_RETS


def data(b: Builder, frame: Value, i: int) -> Value:
    """The address of the i-th operand's first number."""
    return b.field(b.field(b.field(frame, FRAME_ARGS), 8 * i), BUFFER_DATA)


def dim(b: Builder, frame: Value, i: int, axis: int) -> Value:
    return b.field(b.field(b.field(b.field(frame, FRAME_ARGS), 8 * i), BUFFER_DIMS), 8 * axis, LONG)


def result(b: Builder, frame: Value, i: int) -> Value:
    """The address of the i-th result's first number."""
    return b.field(b.field(b.field(frame, FRAME_RETS), 8 * i), BUFFER_DATA)


def result_dim(b: Builder, frame: Value, i: int, axis: int) -> Value:
    return b.field(b.field(b.field(b.field(frame, FRAME_RETS), 8 * i), BUFFER_DIMS), 8 * axis, LONG)


OfCall = Callable[[Builder, Value], Value]  # (builder, frame): what follows from a call's operands


def items(
    module: ir.Module, name: str, num_units: OfCall, *, size: int | OfCall, most: int | OfCall | None = None
) -> tuple[Builder, Value, Value, Value]:
    """Makes `size` of a call's units of work an item, or all if they are at most `most`, or else twice `size`: these
    take less time than it takes to wake another thread. -> of NAME.item the builder, the frame, and the item's first
    unit and past its last.
    """

    def number(b: Builder, frame: Value, x: int | OfCall) -> Value:
        return long(x) if isinstance(x, int) else x(b, frame)

    def size_of(b: Builder, frame: Value, units: Value) -> Value:
        many = number(b, frame, size)
        few = b.mul(many, long(2)) if most is None else number(b, frame, most)
        return b.select(b.icmp_signed("<=", units, few), few, many)

    function = ir.Function(module, ir.FunctionType(LONG, [POINTER, LONG]), f"{name}.count")
    b = Builder(function)
    units = num_units(b, function.args[0])
    of_item = size_of(b, function.args[0], units)
    b.ret(b.sdiv(b.add(units, b.sub(of_item, long(1))), of_item))
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, LONG, LONG]), f"{name}.item")
    b = Builder(function)
    frame, item, _ = function.args
    units = num_units(b, frame)
    of_item = size_of(b, frame, units)
    first = b.mul(item, of_item)
    return b, frame, first, b.smaller(b.add(first, of_item), units)
