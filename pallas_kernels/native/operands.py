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


def items(
    module: ir.Module, name: str, num_units: Callable[[Builder, Value], Value], *, size: int, most: int
) -> tuple[Builder, Value, Value, Value]:
    """Makes `size` of a call's units of work an item, or all if they are at most `most`: these take less time than it
    takes to wake another thread. -> of NAME.item the builder, the frame, and the item's first unit and past its last.
    """

    def size_of(b: Builder, units: Value) -> Value:
        return b.select(b.icmp_signed("<=", units, long(most)), long(most), long(size))

    function = ir.Function(module, ir.FunctionType(LONG, [POINTER, LONG]), f"{name}.count")
    b = Builder(function)
    units = num_units(b, function.args[0])
    b.ret(b.sdiv(b.add(units, b.sub(size_of(b, units), long(1))), size_of(b, units)))
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, LONG, LONG]), f"{name}.item")
    b = Builder(function)
    frame, item, _ = function.args
    units = num_units(b, frame)
    first = b.mul(item, size_of(b, units))
    return b, frame, first, b.smaller(b.add(first, size_of(b, units)), units)
