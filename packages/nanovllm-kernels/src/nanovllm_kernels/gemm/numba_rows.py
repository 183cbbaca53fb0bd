"""A few rows times a bf16 weight on a CPU, with the norm before it and the gate or the residual after it in one kernel.

Up to MOST_STREAMED rows memory is the bound: each weight is read once, as one stream a thread, which reaches 45 GB/s on
two cores where four rows of the weight at a time reach 37. For more rows it is loads of x, so that two rows of the
weight share them. Activations are float32 throughout. This room must not know which layer a weight belongs to.
"""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from nanovllm_kernels.jit import (
    OPENMP,
    exp,
    from_bf16,
    inverse_rms,
    keep,
    kernel,
    pointer,
    prefetch,
    prefetch_line,
    region,
    run_region,
    thread_count,
    thread_index,
)
from nanovllm_kernels.platform import FEW_ROWS

MOST_STREAMED = 4
# What is multiplied at once beyond that: of x as many rows, if need be zeros.
TILE_ROWS = FEW_ROWS
TILE_COLUMNS = 2
LANES = 16
LINE = 64
# Bytes of the weight asked for ahead of those in use; half as many, or twice, gain less.
AHEAD = 4608

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def project_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    add: bool,
) -> None:
    """Write into `out`, contiguous float32 [M, N], or add to it, contiguous x [M, K], float32, normed if there is a
    float32 weight for it, times the transpose of contiguous bf16 `weight` [N, K], plus bf16 `bias`. gated: the weight
    has 2 N rows, and silu of the first half's results times the others is what is wanted.
    """
    num_rows, width = x.shape
    _project(
        OPENMP,
        _COLUMNS_OF_THREAD,
        x.data_ptr(),
        0 if norm_weight is None else norm_weight.data_ptr(),
        eps,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        width,
        out.shape[1],
        gated,
        add,
        torch.get_num_threads(),
    )


@kernel
def _project(
    openmp,
    region,
    x_ptr,
    norm_ptr,
    eps,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    width,
    num_columns,
    gated,
    add,
    num_threads,
):
    padded = num_rows if num_rows <= MOST_STREAMED else TILE_ROWS
    scratch = np.empty(padded * width + LINE // 4, np.float32)
    ready_ptr = x_ptr
    if norm_ptr or num_rows > MOST_STREAMED:
        ready_ptr = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
        _prepare(x_ptr, norm_ptr, np.float32(eps), ready_ptr, num_rows, padded, width)
    args = np.empty(11, np.int64)
    args[0], args[1], args[2], args[3], args[4] = openmp, ready_ptr, weight_ptr, bias_ptr, out_ptr
    args[5], args[6], args[7], args[8], args[9], args[10] = num_rows, padded, width, num_columns, gated, add
    run_region(region, np.int64(args.ctypes.data), num_threads)
    keep(args)
    keep(scratch)


def _columns_of_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (11,), np.int64)
    num_columns, gated, add = args[8], args[9] != 0, args[10] != 0
    index, count, tiles = thread_index(args_ptr), thread_count(args_ptr), -(-num_columns // TILE_COLUMNS)
    begin = index * tiles // count * TILE_COLUMNS
    end = min((index + 1) * tiles // count * TILE_COLUMNS, num_columns)
    _columns(args, 0, begin, end, add, False)
    if gated:
        _columns(args, num_columns, begin, end, False, True)


@kernel
def _prepare(x_ptr, norm_ptr, eps, out_ptr, num_rows, padded, width):
    x = numba.carray(pointer(x_ptr), (num_rows, width), np.float32)
    weight = numba.carray(pointer(norm_ptr), (width,), np.float32)
    out = numba.carray(pointer(out_ptr), (padded, width), np.float32)
    for row in range(num_rows):
        if norm_ptr:
            scale = inverse_rms(x, row, 0, width, eps)
            for k in range(width):
                out[row, k] = x[row, k] * scale * weight[k]
        else:
            out[row] = x[row]
    out[num_rows:] = _ZERO


@kernel
def _columns(args, shift, begin, end, add, gate):
    """Columns begin..end of the result, by the rows of the weight that lie `shift` behind them."""
    weight_ptr, bias_ptr, num_rows, padded, width, num_columns = args[2], args[3], args[5], args[6], args[7], args[8]
    x = numba.carray(pointer(args[1]), (padded, width), np.float32)
    weight = numba.carray(pointer(weight_ptr), (shift + num_columns, width), np.uint16)
    bias = numba.carray(pointer(bias_ptr), (shift + num_columns,), np.uint16)
    out = numba.carray(pointer(args[4]), (num_rows, num_columns), np.float32)
    n = begin
    if num_rows > MOST_STREAMED:
        sums = np.empty((TILE_COLUMNS, TILE_ROWS), np.float32)
        while n + TILE_COLUMNS <= end:
            _tile(args[1], weight_ptr + 2 * (shift + n) * width, width, np.int64(sums.ctypes.data))
            for j in range(TILE_COLUMNS):
                base = from_bf16(bias[shift + n + j]) if bias_ptr else _ZERO
                for row in range(num_rows):
                    total = sums[j, row] + base
                    for k in range(width // LANES * LANES, width):
                        total += x[row, k] * from_bf16(weight[shift + n + j, k])
                    out[row, n + j] = _finish(total, out[row, n + j], add, gate)
            n += TILE_COLUMNS
    while n < end:
        for at in range(0, 2 * width, LINE):
            prefetch(weight_ptr + 2 * width * (shift + n) + AHEAD + at)
        column = weight[shift + n]
        base = from_bf16(bias[shift + n]) if bias_ptr else _ZERO
        if num_rows == 4:
            found = _dot4(x, column)
            for row in range(4):
                out[row, n] = _finish(found[row] + base, out[row, n], add, gate)
        else:
            for row in range(num_rows):
                out[row, n] = _finish(_dot(x, row, column) + base, out[row, n], add, gate)
        n += 1


@kernel
def _finish(number, before, add, gate):
    if gate:
        return number * before / (_ONE + exp(-before))
    return number + before if add else number


@kernel
def _dot(x, row, column):
    total = _ZERO
    for k in range(column.shape[0]):
        total += x[row, k] * from_bf16(column[k])
    return total


@kernel
def _dot4(x, column):
    a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
    for k in range(column.shape[0]):
        number = from_bf16(column[k])
        a += x[0, k] * number
        b += x[1, k] * number
        c += x[2, k] * number
        d += x[3, k] * number
    return a, b, c, d


@intrinsic
def _tile(_typing: Any, x_ptr: Any, weight_ptr: Any, width: Any, sums_ptr: Any) -> Any:
    """Of TILE_ROWS rows of x, `width` numbers behind one another, with TILE_COLUMNS of the weight: the sums over the
    first multiple of LANES, one column after another. What will be needed of the weight is asked for line by line.

    By hand, since no compiler vectorises a loop that prefetches: as one burst before it, the requests fill the queue,
    and loads wait for memory after all.
    """
    given = (x_ptr, weight_ptr, width, sums_ptr)
    return (types.void(*given), _lower_tile) if given == (types.int64,) * 4 else None


def _lower_tile(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
    x_ptr, weight_ptr, width, sums_ptr = values
    wide, number = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
    halves, bits = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(32), LANES)
    zero = ir.Constant(number, [0.0] * LANES)
    sixteen = ir.Constant(bits, [16] * LANES)

    def at(address: Any, kind: Any) -> Any:
        return builder.inttoptr(address, kind.as_pointer())

    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(TILE_ROWS * TILE_COLUMNS)]
    with cgutils.for_range(builder, builder.udiv(width, wide(LANES))) as loop:
        weight_at = builder.add(weight_ptr, builder.mul(loop.index, wide(2 * LANES)))
        line = builder.add(weight_ptr, builder.mul(loop.index, wide(2 * LANES * TILE_COLUMNS)))
        prefetch_line(builder, builder.add(line, wide(AHEAD)))
        columns = []
        for column in range(TILE_COLUMNS):
            place = builder.add(weight_at, builder.mul(width, wide(2 * column)))
            shifted = builder.shl(builder.zext(builder.load(at(place, halves), align=2), bits), sixteen)
            columns.append(builder.bitcast(shifted, number))
        x_at = builder.add(x_ptr, builder.mul(loop.index, wide(4 * LANES)))
        for row in range(TILE_ROWS):
            place = builder.add(x_at, builder.mul(width, wide(4 * row)))
            x = builder.load(at(place, number), align=4)
            for column in range(TILE_COLUMNS):
                total = sums[column * TILE_ROWS + row]
                product = builder.fmul(x, columns[column], flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), number])
    add_up = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    for index, total in enumerate(sums):
        found = builder.call(add_up, [ir.FloatType()(0.0), builder.load(total)], fastmath=("reassoc",))
        builder.store(found, at(builder.add(sums_ptr, wide(4 * index)), ir.FloatType()))
    return context.get_dummy_value()


_COLUMNS_OF_THREAD = region(_columns_of_thread)
