"""Numba intrinsics that multiply rows by a weight on a CPU, in float32. A panel is PANEL_WIDTH columns of the weight.

Sums over the inner dimension (`depth`) run in order, so that a row's result does not depend on the other rows.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_kernels.numba_jit import EXP_RANGE, EXP_TERMS, LANES, LN2_PARTS, LOG2_E, prefetch_line

# Number of columns in a panel. A row of a bf16 panel fills a cache line.
PANEL_WIDTH = 32
LINE_BYTES = 64
# Number of columns in a group. A row of a group fills two vectors. Within a group, a bf16 panel stores the columns in
# the order 0, LANES, 1, LANES + 1, ..., so that each 32-bit word holds one value of each vector.
GROUP_WIDTH = 2 * LANES
NUM_GROUPS = PANEL_WIDTH // GROUP_WIDTH  # per panel
# Maximum number of rows that an intrinsic of `make_multiplier` takes at once. The sums fill 12 of AVX2's 16 registers.
TILE_ROWS = 6
# Number of products per sum in an iteration of the unrolled inner loop.
UNROLL = 4
# Number of rows and number of columns of the square that `transpose_keys` transposes.
TRANSPOSED_SIZE = 8

_INT64 = ir.IntType(64)
_FLOAT_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_INT_VECTOR = ir.VectorType(ir.IntType(32), LANES)


def make_multiplier(
    num_rows: int,
    *,
    num_groups: int = 1,
    has_bf16_panel: bool = False,
    num_prefetches: int = 0,
    row_stride: int | None = None,
    sums_stride: int = PANEL_WIDTH,
) -> Any:
    """Return an intrinsic that multiplies `num_rows` rows by the first `num_groups` groups of a panel's columns.

    The intrinsic has these parameters:

    rows_ptr: float32 [depth, num_rows], or [num_rows, row_stride] if `row_stride` is given.
    panel_ptr: bf16 [depth, PANEL_WIDTH] if `has_bf16_panel`. Otherwise float32 [depth, GROUP_WIDTH], which is a single
        group: `num_groups` must be 1.
    depth: a multiple of UNROLL.
    sums_ptr: float32 [num_rows, sums_stride].
    continues_sums: 0 to overwrite the sums; nonzero to add the products to the sums.
    prefetch_ptr: first address to prefetch. Each iteration of the inner loop, which adds UNROLL products to each sum,
        prefetches `num_prefetches` cache lines.
    step_bytes: number of bytes by which the address to prefetch grows per iteration.
    """

    @intrinsic
    def multiply(
        _typing: Any,
        rows_ptr: Any,
        panel_ptr: Any,
        depth: Any,
        sums_ptr: Any,
        continues_sums: Any,
        prefetch_ptr: Any,
        step_bytes: Any,
    ) -> Any:
        def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            strides = (1, row_stride) if row_stride else (num_rows, 1)
            _emit_multiplier(
                builder, values, num_rows, num_groups, has_bf16_panel, num_prefetches, strides, sums_stride
            )
            return context.get_dummy_value()

        return types.void(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes), lower

    return multiply


def _typed_pointer(builder: Any, address: Any, element_type: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(address, _INT64(offset)), element_type.as_pointer())


def _convert_pairs(builder: Any, words: Any) -> list[Any]:
    """Emit code that converts words of two bf16 values to float32. Returns two vectors: the low and the high halves."""
    low = builder.shl(words, ir.Constant(_INT_VECTOR, [16] * LANES))
    high = builder.and_(words, ir.Constant(_INT_VECTOR, [0xFFFF0000] * LANES))
    return [builder.bitcast(low, _FLOAT_VECTOR), builder.bitcast(high, _FLOAT_VECTOR)]


def _emit_multiplier(
    builder: Any,
    values: Any,
    num_rows: int,
    num_groups: int,
    has_bf16_panel: bool,
    num_prefetches: int,
    strides: tuple[int, int],
    sums_stride: int,
) -> None:
    """Emit the code of `make_multiplier`.

    strides: distances in `rows_ptr` along depth and between rows, in elements.
    """
    rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes = values
    num_vectors = 2 * num_groups
    panel_row_bytes = 2 * PANEL_WIDTH if has_bf16_panel else 4 * GROUP_WIDTH
    zero = ir.Constant(_FLOAT_VECTOR, [0.0] * LANES)
    result_ptrs = [
        _typed_pointer(builder, sums_ptr, _FLOAT_VECTOR, 4 * (row * sums_stride + vector * LANES))
        for row in range(num_rows)
        for vector in range(num_vectors)
    ]
    accumulator_ptrs = [cgutils.alloca_once_value(builder, zero) for _ in result_ptrs]
    with builder.if_then(builder.icmp_signed("!=", continues_sums, _INT64(0))):
        for accumulator_ptr, result_ptr in zip(accumulator_ptrs, result_ptrs, strict=True):
            builder.store(builder.load(result_ptr, align=4), accumulator_ptr)
    function_type = ir.FunctionType(_FLOAT_VECTOR, [_FLOAT_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fmuladd.v{LANES}f32")
    with cgutils.for_range(builder, builder.udiv(depth, _INT64(UNROLL))) as loop:
        rows_address = builder.add(rows_ptr, builder.mul(loop.index, _INT64(4 * UNROLL * strides[0])))
        panel_address = builder.add(panel_ptr, builder.mul(loop.index, _INT64(UNROLL * panel_row_bytes)))
        prefetch_address = builder.add(prefetch_ptr, builder.mul(loop.index, step_bytes))
        for line in range(num_prefetches):
            prefetch_line(builder, builder.add(prefetch_address, _INT64(line * LINE_BYTES)))
        for k in range(UNROLL):
            column_vectors: list[Any] = []
            if has_bf16_panel:
                for group in range(num_groups):
                    element_ptr = _typed_pointer(
                        builder, panel_address, _INT_VECTOR, k * panel_row_bytes + group * 2 * GROUP_WIDTH
                    )
                    column_vectors += _convert_pairs(builder, builder.load(element_ptr, align=4))
            else:
                for vector in range(num_vectors):
                    element_ptr = _typed_pointer(
                        builder, panel_address, _FLOAT_VECTOR, k * panel_row_bytes + 4 * vector * LANES
                    )
                    column_vectors.append(builder.load(element_ptr, align=4))
            for row in range(num_rows):
                element_ptr = _typed_pointer(
                    builder, rows_address, ir.FloatType(), 4 * (k * strides[0] + row * strides[1])
                )
                x = _broadcast(builder, builder.load(element_ptr))
                for vector in range(num_vectors):
                    accumulator_ptr = accumulator_ptrs[row * num_vectors + vector]
                    sums = builder.call(fma, [x, column_vectors[vector], builder.load(accumulator_ptr)])
                    builder.store(sums, accumulator_ptr)
    for accumulator_ptr, result_ptr in zip(accumulator_ptrs, result_ptrs, strict=True):
        builder.store(builder.load(accumulator_ptr), result_ptr, align=4)


@intrinsic
def convert_panel(_typing: Any, panel_ptr: Any, depth: Any, out_ptr: Any) -> Any:
    """Convert a bf16 panel [depth, PANEL_WIDTH] to float32 [NUM_GROUPS, depth, GROUP_WIDTH]."""

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        panel, depth, out = values
        for group in range(PANEL_WIDTH // GROUP_WIDTH):
            target = builder.add(out, builder.mul(depth, _INT64(4 * GROUP_WIDTH * group)))
            with cgutils.for_range(builder, depth) as loop:
                line = builder.add(panel, builder.mul(loop.index, _INT64(2 * PANEL_WIDTH)))
                words = builder.load(_typed_pointer(builder, line, _INT_VECTOR, 2 * GROUP_WIDTH * group), align=4)
                target_address = builder.add(target, builder.mul(loop.index, _INT64(4 * GROUP_WIDTH)))
                for half, half_values in enumerate(_convert_pairs(builder, words)):
                    builder.store(
                        half_values, _typed_pointer(builder, target_address, _FLOAT_VECTOR, 4 * LANES * half), align=4
                    )
        return context.get_dummy_value()

    return types.void(panel_ptr, depth, out_ptr), lower


@intrinsic
def transpose_keys(_typing: Any, keys_ptr: Any, key_stride_bytes: Any, out_ptr: Any) -> Any:
    """Transpose TRANSPOSED_SIZE bf16 elements of each of TRANSPOSED_SIZE keys, and convert the elements to float32.

    out_ptr: address of the result. Its rows are 4 * GROUP_WIDTH bytes apart.
    """

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        keys, key_stride_bytes, out = values
        scalars = (ir.FloatType(), ir.IntType(32), ir.IntType(16))
        float_vector, int_vector, int16_vector = (ir.VectorType(scalar, TRANSPOSED_SIZE) for scalar in scalars)
        rows: list[Any] = []
        for i in range(TRANSPOSED_SIZE):
            element_ptr = _typed_pointer(
                builder, builder.add(keys, builder.mul(key_stride_bytes, _INT64(i))), int16_vector
            )
            bits = builder.zext(builder.load(element_ptr, align=2), int_vector)
            rows.append(
                builder.bitcast(builder.shl(bits, ir.Constant(int_vector, [16] * TRANSPOSED_SIZE)), float_vector)
            )
        # Each iteration swaps elements of rows i and i + distance.
        distance = 1
        while distance < TRANSPOSED_SIZE:
            first_mask = [i if i & distance == 0 else TRANSPOSED_SIZE + i - distance for i in range(TRANSPOSED_SIZE)]
            second_mask = [i + distance if i & distance == 0 else TRANSPOSED_SIZE + i for i in range(TRANSPOSED_SIZE)]
            swapped = list(rows)
            for i in range(TRANSPOSED_SIZE):
                if i & distance == 0:
                    other = i + distance
                    swapped[i] = builder.shuffle_vector(rows[i], rows[other], ir.Constant(int_vector, first_mask))
                    swapped[other] = builder.shuffle_vector(rows[i], rows[other], ir.Constant(int_vector, second_mask))
            rows = swapped
            distance *= 2
        for i, row in enumerate(rows):
            builder.store(row, _typed_pointer(builder, out, float_vector, 4 * GROUP_WIDTH * i), align=4)
        return context.get_dummy_value()

    return types.void(keys_ptr, key_stride_bytes, out_ptr), lower


@intrinsic
def convert_group(_typing: Any, values_ptr: Any, out_ptr: Any) -> Any:
    """Convert GROUP_WIDTH bf16 values to float32."""

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        int16_vector = ir.VectorType(ir.IntType(16), LANES)
        for i in range(2):
            bits = builder.zext(
                builder.load(_typed_pointer(builder, values[0], int16_vector, 2 * LANES * i), align=2), _INT_VECTOR
            )
            numbers = builder.bitcast(builder.shl(bits, ir.Constant(_INT_VECTOR, [16] * LANES)), _FLOAT_VECTOR)
            builder.store(numbers, _typed_pointer(builder, values[1], _FLOAT_VECTOR, 4 * LANES * i), align=4)
        return context.get_dummy_value()

    return types.void(values_ptr, out_ptr), lower


@intrinsic
def find_max(_typing: Any, values_ptr: Any, count: Any) -> Any:
    """Return the largest of `count` float32 values. count: a multiple of LANES."""

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        values_ptr, size = values
        accumulator = cgutils.alloca_once_value(
            builder, builder.load(_typed_pointer(builder, values_ptr, _FLOAT_VECTOR), align=4)
        )
        with cgutils.for_range(builder, builder.udiv(size, _INT64(LANES)), start=_INT64(1)) as loop:
            numbers = _load_lanes(builder, values_ptr, loop.index)
            previous = builder.load(accumulator)
            builder.store(builder.select(builder.fcmp_ordered(">", previous, numbers), previous, numbers), accumulator)
        function_type = ir.FunctionType(ir.FloatType(), [_FLOAT_VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(reduce, [builder.load(accumulator)], fastmath=("nnan",))

    return types.float32(values_ptr, count), lower


@intrinsic
def exp_and_sum(_typing: Any, values_ptr: Any, count: Any, max_value: Any) -> Any:
    """Replace `count` float32 values by exp(value - max_value), and return their sum. count: a multiple of LANES."""

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        values_ptr, size, max_number = values
        accumulator = cgutils.alloca_once_value(builder, ir.Constant(_FLOAT_VECTOR, [0.0] * LANES))
        shift = _broadcast(builder, max_number)
        with cgutils.for_range(builder, builder.udiv(size, _INT64(LANES))) as loop:
            weight = _emit_exp(builder, builder.fsub(_load_lanes(builder, values_ptr, loop.index), shift))
            _store_lanes(builder, weight, values_ptr, loop.index)
            builder.store(builder.fadd(builder.load(accumulator), weight), accumulator)
        function_type = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _FLOAT_VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.vector.reduce.fadd.v{LANES}f32")
        return builder.call(reduce, [ir.FloatType()(-0.0), builder.load(accumulator)], fastmath=("reassoc",))

    return types.float32(values_ptr, count, max_value), lower


@intrinsic
def gate_values(_typing: Any, gates_ptr: Any, up_ptr: Any, out_ptr: Any, count: Any) -> Any:
    """Write silu(gate) * up for `count` pairs of float32 values. count: a multiple of LANES."""

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        gates, ups, out, size = values
        one = ir.Constant(_FLOAT_VECTOR, [1.0] * LANES)
        with cgutils.for_range(builder, builder.udiv(size, _INT64(LANES))) as loop:
            gate, up = (_load_lanes(builder, values_ptr, loop.index) for values_ptr in (gates, ups))
            divisor = builder.fadd(one, _emit_exp(builder, builder.fneg(gate)))
            _store_lanes(builder, builder.fdiv(builder.fmul(up, gate), divisor), out, loop.index)
        return context.get_dummy_value()

    return types.void(gates_ptr, up_ptr, out_ptr, count), lower


def _load_lanes(builder: Any, values_ptr: Any, index: Any) -> Any:
    vector_address = builder.add(values_ptr, builder.mul(index, _INT64(4 * LANES)))
    return builder.load(_typed_pointer(builder, vector_address, _FLOAT_VECTOR), align=4)


def _store_lanes(builder: Any, vector: Any, values_ptr: Any, index: Any) -> None:
    vector_address = builder.add(values_ptr, builder.mul(index, _INT64(4 * LANES)))
    builder.store(vector, _typed_pointer(builder, vector_address, _FLOAT_VECTOR), align=4)


def _broadcast(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_FLOAT_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _emit_exp(builder: Any, x: Any) -> Any:
    """Emit code that computes exp of each element of a vector, like `numba_jit.exp`."""

    def constant(number: Any) -> Any:
        return ir.Constant(_FLOAT_VECTOR, [float(number)] * LANES)

    function_type = ir.FunctionType(_FLOAT_VECTOR, [_FLOAT_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fmuladd.v{LANES}f32")
    floor_type = ir.FunctionType(_FLOAT_VECTOR, [_FLOAT_VECTOR])
    floor = cgutils.get_or_insert_function(builder.module, floor_type, f"llvm.floor.v{LANES}f32")
    min_input, max_input = constant(EXP_RANGE[0]), constant(EXP_RANGE[1])
    x = builder.select(builder.fcmp_ordered(">", x, min_input), x, min_input)
    x = builder.select(builder.fcmp_ordered("<", x, max_input), x, max_input)
    n = builder.call(floor, [builder.call(fma, [x, constant(LOG2_E), constant(0.5)])])
    r = builder.call(fma, [n, constant(-LN2_PARTS[0]), x])
    r = builder.call(fma, [n, constant(-LN2_PARTS[1]), r])
    p = constant(EXP_TERMS[0])
    for term in (*EXP_TERMS[1:], 0.5, 1.0, 1.0):
        p = builder.call(fma, [p, r, constant(term)])
    exponent = builder.add(builder.fptosi(n, _INT_VECTOR), ir.Constant(_INT_VECTOR, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_INT_VECTOR, [23] * LANES)), _FLOAT_VECTOR)
    return builder.fmul(p, power)
