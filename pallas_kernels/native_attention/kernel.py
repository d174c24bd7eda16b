"""The code: an online softmax over entries of two pools, sixteen entries at a time, for four heads at once."""

from __future__ import annotations

from llvmlite import ir

from pallas_kernels.native import entries, numbers
from pallas_kernels.native.emit import FLOAT, INT, LANES, LONG, POINTER, VECTOR, VOID, Builder, Value, long
from pallas_kernels.native.entries import HEADS, PLACES
from pallas_kernels.native.machine_code import Operation
from pallas_kernels.native.operands import data, dim, items, result

_FLOOR = -1e30  # the maximum before any entry


def _attend(module: ir.Module, name: str, kind: ir.Type) -> None:
    """q [NB, 1, N, H], of two pools the entries [..., H] and places [NB, K] with K a multiple of 16, which of all
    entries the layer's first ones are [2], sink [N], scale [1] -> [NB, 1, N, H] float32. A unit is four heads of a row.
    """

    def num_units(b: Builder, frame: Value) -> Value:
        return b.mul(dim(b, frame, 0, 0), b.udiv(dim(b, frame, 0, 2), long(HEADS)))

    over = _over(module, f"{name}.over", kind)
    b, frame, first, stop = items(module, name, num_units, size=4, most=4)
    heads, width = dim(b, frame, 0, 2), dim(b, frame, 0, 3)
    q, firsts, sink, scale = (data(b, frame, i) for i in (0, 5, 6, 7))
    out = result(b, frame, 0)
    scaled, total, zeros = (entries.room(b, FLOAT, b.mul(width, long(n))) for n in (HEADS, HEADS, 1))
    top, denominator = (entries.room(b, VECTOR, long(HEADS)) for _ in range(2))
    entries.each_vector(b, width, lambda d: b.store(numbers.constant(0.0), b.element(zeros, d, FLOAT), align=4))
    factor = b.splat(scale)

    def unit(i: Value) -> None:
        row, head = b.udiv(b.mul(i, long(HEADS)), heads), b.urem(b.mul(i, long(HEADS)), heads)
        start = b.mul(b.mul(i, long(HEADS)), width)

        def begin(d: Value) -> None:
            x = b.vector(b.element(q, b.add(start, d), kind), kind)
            b.store(b.fmul(x, factor), b.element(scaled, d, FLOAT), align=4)
            b.store(numbers.constant(0.0), b.element(total, d, FLOAT), align=4)

        entries.each_vector(b, b.mul(width, long(HEADS)), begin)
        for h in range(HEADS):
            b.store(numbers.constant(_FLOOR), b.element(top, long(h), VECTOR))
            b.store(numbers.constant(0.0), b.element(denominator, long(h), VECTOR))
        for part in range(2):
            count = dim(b, frame, 2 * part + 2, 1)
            places = b.element(data(b, frame, 2 * part + 2), b.mul(row, count), INT)
            begins = b.sext(b.load(b.element(firsts, long(part), INT), typ=INT), LONG)
            pool = b.element(data(b, frame, 2 * part + 1), b.mul(begins, width), kind)
            b.call(over, [scaled, pool, places, count, width, zeros, top, denominator, total])
        for h in range(HEADS):
            at = b.add(head, long(h))
            here = b.splat(b.element(sink, at, FLOAT))
            most = b.load(b.element(top, long(h), VECTOR), typ=VECTOR)
            all_here = numbers.largest(b, most, here)
            decay = numbers.exp(b, b.fsub(most, all_here))
            sums = numbers.across(b, b.load(b.element(denominator, long(h), VECTOR), typ=VECTOR), (8, 4, 2, 1), b.fadd)
            weight = b.fdiv(decay, b.fadd(b.fmul(sums, decay), numbers.exp(b, b.fsub(here, all_here))))

            def end(d: Value, h: int = h, weight: Value = weight) -> None:
                d = b.add(b.mul(width, long(h)), d)
                x = b.load(b.element(total, d, FLOAT), align=4, typ=VECTOR)
                b.store(b.fmul(x, weight), b.element(out, b.add(start, d), FLOAT), align=4)

            entries.each_vector(b, width, end)

    b.loop(first, lambda i: b.icmp_signed("<", i, stop), 1, unit)
    b.ret_void()


def _over(module: ir.Module, name: str, kind: ir.Type) -> ir.Function:
    """void over(q, pool, places, K, H, zeros, top, denominator, total): adds a pool's entries to the running sums."""
    kinds = [POINTER, POINTER, POINTER, LONG, LONG, POINTER, POINTER, POINTER, POINTER]
    function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = Builder(function)
    q, pool, places, count, width, zeros, top, denominator, total = function.args
    none = ir.Constant(PLACES, [0] * LANES)
    weights = entries.room(b, VECTOR, long(HEADS))

    def sixteen(i: Value) -> None:
        place = b.load(b.element(places, i, INT), align=4, typ=PLACES)
        used = b.icmp_signed(">=", place, none)
        with b.if_then(b.icmp_signed("!=", b.bitcast(used, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0))):
            keys = entries.addresses(b, pool, place, width, zeros, kind)
            after = b.smaller(b.add(i, long(LANES)), b.sub(count, long(LANES)))
            after = b.load(b.element(places, after, INT), align=4, typ=PLACES)
            following = entries.addresses(b, pool, after, width, zeros, kind)
            fours = [slice(j, j + 4) for j in range(0, LANES, 4)]
            products = [entries.products(b, kind, q, keys[four], following[four], width) for four in fours]
            decays = []
            for h in range(HEADS):
                lanes = [*range(4 * h, 4 * h + 4), *range(LANES + 4 * h, LANES + 4 * h + 4)]
                halves = [numbers.pick(b, products[j], lanes, products[j + 1]) for j in (0, 2)]
                logits = numbers.pick(b, halves[0], range(LANES), halves[1])
                logits = b.select(used, logits, numbers.constant(_FLOOR))
                before = b.load(b.element(top, long(h), VECTOR), typ=VECTOR)
                largest = numbers.across(b, logits, (8, 4, 2, 1), lambda x, y: numbers.largest(b, x, y))
                most = numbers.largest(b, before, largest)
                decay = numbers.exp(b, b.fsub(before, most))
                weight = b.select(used, numbers.exp(b, b.fsub(logits, most)), numbers.constant(0.0))
                sums = b.load(b.element(denominator, long(h), VECTOR), typ=VECTOR)
                b.store(b.fused_multiply_add(sums, decay, weight), b.element(denominator, long(h), VECTOR))
                b.store(most, b.element(top, long(h), VECTOR))
                b.store(weight, b.element(weights, long(h), VECTOR))
                decays.append(decay)
            whole, _ = b.loop(
                long(0),
                lambda d: b.icmp_signed("<=", b.add(d, long(4 * LANES)), width),
                4 * LANES,
                lambda d: _add_values(b, kind, keys, weights, decays, total, width, d, 4),
            )
            b.loop(
                whole,
                lambda d: b.icmp_signed("<", d, width),
                LANES,
                lambda d: _add_values(b, kind, keys, weights, decays, total, width, d, 1),
            )

    b.loop(long(0), lambda i: b.icmp_signed("<", i, count), LANES, sixteen)
    b.ret_void()
    return function


def _add_values(
    b: Builder,
    kind: ir.Type,
    keys: list[Value],
    weights: Value,
    decays: list[Value],
    total: Value,
    width: Value,
    d: Value,
    vectors: int,
) -> None:
    """total = total * decay + weights times entries, of `vectors` times sixteen columns from d on."""
    places = [
        [b.element(total, b.add(b.add(b.mul(width, long(h)), d), long(v * LANES)), FLOAT) for v in range(vectors)]
        for h in range(HEADS)
    ]
    sums: list[list[Value]] = [
        [b.fmul(b.load(at, align=4, typ=VECTOR), decays[h]) for at in places[h]] for h in range(HEADS)
    ]
    for i, key in enumerate(keys):
        rows = [b.vector(b.element(key, b.add(d, long(v * LANES)), kind), kind) for v in range(vectors)]
        for h in range(HEADS):
            weight = b.splat(b.element(b.element(weights, long(h), VECTOR), long(i), FLOAT))
            sums[h] = [b.fused_multiply_add(weight, row, x) for row, x in zip(rows, sums[h], strict=True)]
    for h in range(HEADS):
        for at, x in zip(places[h], sums[h], strict=True):
            b.store(x, at, align=4)


ATTEND = Operation("attend", _attend)
