"""Register tiles of a float32 product on a CPU, as Numba intrinsics: a few rows times the columns of one panel.

Each sum runs over K in order, so that a row's result does not depend on the other rows.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_kernels.numba_jit import EXP_RANGE, EXP_TERMS, LANES, LN2_PARTS, LOG2_E, prefetch_line

# Columns of a panel: their bf16 values for one k fill a cache line.
PANEL = 32
LINE = 64
# Columns whose sums fit two vectors. Their bf16 values are stored in pairs: column i with column i + LANES.
GROUP = 2 * LANES
NUM_GROUPS = PANEL // GROUP
# Rows multiplied at once: their sums fill 12 of AVX2's 16 registers.
TILE_ROWS = 6
# Steps of K that are unrolled.
UNROLL = 4
# Rows and columns that `transpose_keys` transposes at once.
TURNED = 8

_WIDE = ir.IntType(64)
_NUMBER = ir.VectorType(ir.FloatType(), LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)


def make_tile(
    num_rows: int,
    *,
    num_groups: int = 1,
    from_bf16: bool = False,
    num_prefetches: int = 0,
    row_stride: int | None = None,
    sums_stride: int = PANEL,
) -> Any:
    """Make an intrinsic tile(rows_ptr, panel_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step) that multiplies.

    rows_ptr: float32 [depth, num_rows], or [num_rows, row_stride] if `row_stride` is given.
    panel_ptr: a bf16 panel [depth, PANEL], or float32 [depth, GROUP]. depth: a multiple of UNROLL.
    sums_ptr: float32 [num_rows, sums_stride]. more: 0 to start the sums at zero, else they continue.
    ahead_ptr: address from which `num_prefetches` lines are prefetched per UNROLL steps of `depth`.
    ahead_step: bytes that this address then advances.
    """

    @intrinsic
    def tile(
        _typing: Any,
        rows_ptr: Any,
        panel_ptr: Any,
        depth: Any,
        sums_ptr: Any,
        more: Any,
        ahead_ptr: Any,
        ahead_step: Any,
    ) -> Any:
        def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            strides = (1, row_stride) if row_stride else (num_rows, 1)
            _lower_tile(builder, values, num_rows, num_groups, from_bf16, num_prefetches, strides, sums_stride)
            return context.get_dummy_value()

        return types.void(rows_ptr, panel_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step), lower

    return tile


def _at(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(address, _WIDE(offset)), kind.as_pointer())


def _lower_halves(builder: Any, words: Any) -> list[Any]:
    """Convert pairs of bf16 to float32: first the lower halves, then the upper halves."""
    low = builder.shl(words, ir.Constant(_BITS, [16] * LANES))
    high = builder.and_(words, ir.Constant(_BITS, [0xFFFF0000] * LANES))
    return [builder.bitcast(low, _NUMBER), builder.bitcast(high, _NUMBER)]


def _lower_tile(
    builder: Any,
    values: Any,
    num_rows: int,
    num_groups: int,
    from_bf16: bool,
    num_prefetches: int,
    strides: tuple[int, int],
    sums_stride: int,
) -> None:
    """strides: from a row's element to its next one along K, and to the next row's element."""
    rows_ptr, panel_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step = values
    num_vectors = 2 * num_groups
    step = 2 * PANEL if from_bf16 else 4 * GROUP
    zero = ir.Constant(_NUMBER, [0.0] * LANES)
    places = [
        _at(builder, sums_ptr, _NUMBER, 4 * (row * sums_stride + vector * LANES))
        for row in range(num_rows)
        for vector in range(num_vectors)
    ]
    sums = [cgutils.alloca_once_value(builder, zero) for _ in places]
    with builder.if_then(builder.icmp_signed("!=", more, _WIDE(0))):
        for total, place in zip(sums, places, strict=True):
            builder.store(builder.load(place, align=4), total)
    kind = ir.FunctionType(_NUMBER, [_NUMBER] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    with cgutils.for_range(builder, builder.udiv(depth, _WIDE(UNROLL))) as loop:
        rows_at = builder.add(rows_ptr, builder.mul(loop.index, _WIDE(4 * UNROLL * strides[0])))
        panel_at = builder.add(panel_ptr, builder.mul(loop.index, _WIDE(UNROLL * step)))
        ahead_at = builder.add(ahead_ptr, builder.mul(loop.index, ahead_step))
        for line in range(num_prefetches):
            prefetch_line(builder, builder.add(ahead_at, _WIDE(line * LINE)))
        for k in range(UNROLL):
            columns: list[Any] = []
            if from_bf16:
                for group in range(num_groups):
                    place = _at(builder, panel_at, _BITS, k * step + group * 2 * GROUP)
                    columns += _lower_halves(builder, builder.load(place, align=4))
            else:
                for vector in range(num_vectors):
                    place = _at(builder, panel_at, _NUMBER, k * step + 4 * vector * LANES)
                    columns.append(builder.load(place, align=4))
            for row in range(num_rows):
                place = _at(builder, rows_at, ir.FloatType(), 4 * (k * strides[0] + row * strides[1]))
                x = _splat(builder, builder.load(place))
                for vector in range(num_vectors):
                    total = sums[row * num_vectors + vector]
                    builder.store(builder.call(fma, [x, columns[vector], builder.load(total)]), total)
    for total, place in zip(sums, places, strict=True):
        builder.store(builder.load(total), place, align=4)


@intrinsic
def convert_panel(_typing: Any, panel_ptr: Any, depth: Any, copy_ptr: Any) -> Any:
    """Write `depth` lines of a bf16 panel as float32, one group of columns after another, each [depth, GROUP]."""

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        panel, depth, copy = values
        for group in range(PANEL // GROUP):
            target = builder.add(copy, builder.mul(depth, _WIDE(4 * GROUP * group)))
            with cgutils.for_range(builder, depth) as loop:
                line = builder.add(panel, builder.mul(loop.index, _WIDE(2 * PANEL)))
                words = builder.load(_at(builder, line, _BITS, 2 * GROUP * group), align=4)
                at = builder.add(target, builder.mul(loop.index, _WIDE(4 * GROUP)))
                for half, numbers in enumerate(_lower_halves(builder, words)):
                    builder.store(numbers, _at(builder, at, _NUMBER, 4 * LANES * half), align=4)
        return context.get_dummy_value()

    return types.void(panel_ptr, depth, copy_ptr), lower


@intrinsic
def transpose_keys(_typing: Any, keys_ptr: Any, step: Any, out_ptr: Any) -> Any:
    """Transpose TURNED bf16 rows of TURNED elements, `step` bytes apart, to float32 lines 4 * GROUP bytes apart."""

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        keys, step, out = values
        number = ir.VectorType(ir.FloatType(), TURNED)
        bits, halves = ir.VectorType(ir.IntType(32), TURNED), ir.VectorType(ir.IntType(16), TURNED)
        rows: list[Any] = []
        for i in range(TURNED):
            place = _at(builder, builder.add(keys, builder.mul(step, _WIDE(i))), halves)
            wide = builder.zext(builder.load(place, align=2), bits)
            rows.append(builder.bitcast(builder.shl(wide, ir.Constant(bits, [16] * TURNED)), number))
        # Three rounds: each swaps elements between rows i and i + distance.
        distance = 1
        while distance < TURNED:
            first = [i if i & distance == 0 else TURNED + i - distance for i in range(TURNED)]
            second = [i + distance if i & distance == 0 else TURNED + i for i in range(TURNED)]
            turned = list(rows)
            for i in range(TURNED):
                if i & distance == 0:
                    masks = [ir.Constant(bits, mask) for mask in (first, second)]
                    turned[i] = builder.shuffle_vector(rows[i], rows[i + distance], masks[0])
                    turned[i + distance] = builder.shuffle_vector(rows[i], rows[i + distance], masks[1])
            rows = turned
            distance *= 2
        for i, row in enumerate(rows):
            builder.store(row, _at(builder, out, number, 4 * GROUP * i), align=4)
        return context.get_dummy_value()

    return types.void(keys_ptr, step, out_ptr), lower


@intrinsic
def widen_group(_typing: Any, numbers_ptr: Any, out_ptr: Any) -> Any:
    """Write GROUP bf16 values as float32."""

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        halves = ir.VectorType(ir.IntType(16), LANES)
        for i in range(2):
            bits = builder.zext(builder.load(_at(builder, values[0], halves, 2 * LANES * i), align=2), _BITS)
            number = builder.bitcast(builder.shl(bits, ir.Constant(_BITS, [16] * LANES)), _NUMBER)
            builder.store(number, _at(builder, values[1], _NUMBER, 4 * LANES * i), align=4)
        return context.get_dummy_value()

    return types.void(numbers_ptr, out_ptr), lower


@intrinsic
def largest(_typing: Any, numbers_ptr: Any, count: Any) -> Any:
    """Return the largest of `count` float32 values; `count` is a multiple of LANES."""

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        numbers, size = values
        found = cgutils.alloca_once_value(builder, builder.load(_at(builder, numbers, _NUMBER), align=4))
        with cgutils.for_range(builder, builder.udiv(size, _WIDE(LANES)), start=_WIDE(1)) as loop:
            number = _load_lanes(builder, numbers, loop.index)
            before = builder.load(found)
            builder.store(builder.select(builder.fcmp_ordered(">", before, number), before, number), found)
        kind = ir.FunctionType(ir.FloatType(), [_NUMBER])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(reduce, [builder.load(found)], fastmath=("nnan",))

    return types.float32(numbers_ptr, count), lower


@intrinsic
def exp_and_sum(_typing: Any, numbers_ptr: Any, count: Any, most: Any) -> Any:
    """Replace `count` float32 values, a multiple of LANES, by exp(value - most), and return their sum.

    The sum is taken per lane, and then over the lanes, in a fixed order.
    """

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        numbers, size, largest_number = values
        found = cgutils.alloca_once_value(builder, ir.Constant(_NUMBER, [0.0] * LANES))
        shift = _splat(builder, largest_number)
        with cgutils.for_range(builder, builder.udiv(size, _WIDE(LANES))) as loop:
            weight = _lower_exp(builder, builder.fsub(_load_lanes(builder, numbers, loop.index), shift))
            _store_lanes(builder, weight, numbers, loop.index)
            builder.store(builder.fadd(builder.load(found), weight), found)
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _NUMBER])
        reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return builder.call(reduce, [ir.FloatType()(-0.0), builder.load(found)], fastmath=("reassoc",))

    return types.float32(numbers_ptr, count, most), lower


@intrinsic
def gate_numbers(_typing: Any, gates_ptr: Any, others_ptr: Any, out_ptr: Any, count: Any) -> Any:
    """Write silu(gate) * other for `count` float32 values, a multiple of LANES."""

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        gates, others, out, size = values
        one = ir.Constant(_NUMBER, [1.0] * LANES)
        with cgutils.for_range(builder, builder.udiv(size, _WIDE(LANES))) as loop:
            gate, other = (_load_lanes(builder, place, loop.index) for place in (gates, others))
            divisor = builder.fadd(one, _lower_exp(builder, builder.fneg(gate)))
            _store_lanes(builder, builder.fdiv(builder.fmul(other, gate), divisor), out, loop.index)
        return context.get_dummy_value()

    return types.void(gates_ptr, others_ptr, out_ptr, count), lower


def _load_lanes(builder: Any, place: Any, index: Any) -> Any:
    at = builder.add(place, builder.mul(index, _WIDE(4 * LANES)))
    return builder.load(_at(builder, at, _NUMBER), align=4)


def _store_lanes(builder: Any, number: Any, place: Any, index: Any) -> None:
    at = builder.add(place, builder.mul(index, _WIDE(4 * LANES)))
    builder.store(number, _at(builder, at, _NUMBER), align=4)


def _splat(builder: Any, number: Any) -> Any:
    nothing = ir.Constant(_NUMBER, ir.Undefined)
    first = builder.insert_element(nothing, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _lower_exp(builder: Any, x: Any) -> Any:
    """Like `jit.exp`, for a vector: 2^n times a polynomial of the remainder."""

    def constant(number: Any) -> Any:
        return ir.Constant(_NUMBER, [float(number)] * LANES)

    kind = ir.FunctionType(_NUMBER, [_NUMBER] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
    floor_kind = ir.FunctionType(_NUMBER, [_NUMBER])
    floor = cgutils.get_or_insert_function(builder.module, floor_kind, f"llvm.floor.v{LANES}f32")
    least, most = constant(EXP_RANGE[0]), constant(EXP_RANGE[1])
    x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
    x = builder.select(builder.fcmp_ordered("<", x, most), x, most)
    n = builder.call(floor, [builder.call(fma, [x, constant(LOG2_E), constant(0.5)])])
    r = builder.call(fma, [n, constant(-LN2_PARTS[0]), x])
    r = builder.call(fma, [n, constant(-LN2_PARTS[1]), r])
    p = constant(EXP_TERMS[0])
    for term in (*EXP_TERMS[1:], 0.5, 1.0, 1.0):
        p = builder.call(fma, [p, r, constant(term)])
    exponent = builder.add(builder.fptosi(n, _BITS), ir.Constant(_BITS, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_BITS, [23] * LANES)), _NUMBER)
    return builder.fmul(p, power)
