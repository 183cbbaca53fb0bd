"""Multiplies rows by a bf16 weight on a CPU in float32, with norm, gate and residual in one call.

Each sum runs over K in order, so that a row's result does not depend on the other rows.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.numba_jit import (
    LANES,
    OPENMP,
    compile_region,
    from_bf16,
    inverse_rms,
    keep_alive,
    kernel,
    ordered_kernel,
    pointer,
    run_region,
    thread_count,
    thread_index,
)
from nanovllm_kernels.numba_tiles import (
    GROUP,
    LINE,
    NUM_GROUPS,
    PANEL,
    TILE_ROWS,
    UNROLL,
    convert_panel,
    gate_values,
    make_tile,
)

# Indices of the int64 arguments of `_pack_on_thread` and `_multiply_on_thread`. _EPS holds a float64's bits.
(
    _OPENMP,
    _X_PTR,
    _NORM_PTR,
    _EPS,
    _PANELS_PTR,
    _BIAS_PTR,
    _OUT_PTR,
    _PACKED_PTR,
    _NUM_ROWS,
    _DEPTH,
    _PADDED_DEPTH,
    _NUM_COLUMNS,
    _IS_GATED,
    _ADDS_TO_OUT,
) = range(14)
_NUM_ARGS = 14
# Maximum number of k in a block, a part of K. A block of a float32 panel fits the first-level cache.
BLOCK_DEPTH = 320
# Maximum number of rows that are packed at once.
BLOCK_ROWS = 252
# Minimum number of rows for which bf16 panels are first converted to float32.
MIN_CONVERTED_ROWS = 43
# Tiles of up to this number of rows process a whole panel at once. Larger tiles process one group of columns at once.
MAX_WHOLE_PANEL_ROWS = 3

_ZERO = np.float32(0.0)


def pack_panels(weight: Tensor) -> Tensor:
    """Copy bf16 `weight` [N, K] into bf16 panels [panels, K rounded up to UNROLL, PANEL], padded with zeros."""
    num_columns, depth = weight.shape
    num_panels, padded_depth = -(-num_columns // PANEL), -(-depth // UNROLL) * UNROLL
    padded_weight = weight.new_zeros((num_panels * PANEL, padded_depth))
    padded_weight[:num_columns, :depth] = weight
    pairs = padded_weight.view(num_panels, PANEL // GROUP, 2, LANES, padded_depth)
    return pairs.permute(0, 4, 1, 3, 2).reshape(num_panels, padded_depth, PANEL).contiguous()


def can_gate(num_columns: int) -> bool:
    """Whether `project_rows` supports `gated` for a weight with `num_columns` columns."""
    return num_columns % (2 * PANEL) == 0


def project_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    panels: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    adds_to_out: bool,
) -> None:
    """Norm `x`, multiply by a weight, add a bias, gate, and write the results into `out`.

    x: float32 [M, K], contiguous, M >= 1.
    norm_weight: float32. The first K elements are used. None: no norm.
    panels: the weight [N, K], from `pack_panels`. bias: bf16 [N], contiguous.
    out: float32 [M, N], or [M, N / 2] if gated, contiguous.
    gated: multiply silu of the first half of the columns by the second half.
    adds_to_out: add the results to `out`, instead of overwriting `out`. Not with `gated`.
    """
    num_rows, depth = x.shape
    _project(
        OPENMP,
        _PACK_REGION,
        _MULTIPLY_REGION,
        x.data_ptr(),
        0 if norm_weight is None else norm_weight.data_ptr(),
        eps,
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        depth,
        panels.shape[1],
        out.shape[1],
        gated,
        adds_to_out,
        torch.get_num_threads(),
    )


@kernel
def _project(
    openmp_table,
    pack_region,
    multiply_region,
    x_ptr,
    norm_ptr,
    eps,
    panels_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    depth,
    padded_depth,
    num_columns,
    gated,
    adds_to_out,
    num_threads,
):
    block_rows = min(num_rows, BLOCK_ROWS)
    scratch = np.empty(block_rows * padded_depth + LINE // 4, np.float32)
    packed_ptr = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
    args = np.empty(_NUM_ARGS, np.int64)
    args[_OPENMP], args[_NORM_PTR], args[_PANELS_PTR], args[_BIAS_PTR] = openmp_table, norm_ptr, panels_ptr, bias_ptr
    args[_PACKED_PTR], args[_DEPTH], args[_PADDED_DEPTH] = packed_ptr, depth, padded_depth
    args[_NUM_COLUMNS], args[_IS_GATED], args[_ADDS_TO_OUT] = num_columns, gated, adds_to_out
    args_ptr = np.int64(args.ctypes.data)
    args.view(np.float64)[_EPS] = eps
    for first_row in range(0, num_rows, block_rows):
        args[_X_PTR] = x_ptr + 4 * first_row * depth
        args[_OUT_PTR] = out_ptr + 4 * first_row * num_columns
        args[_NUM_ROWS] = min(block_rows, num_rows - first_row)
        if num_rows > 2 * TILE_ROWS:
            run_region(pack_region, args_ptr, num_threads)
        else:
            _pack_tiles(args, 0, -(-args[_NUM_ROWS] // TILE_ROWS))
        run_region(multiply_region, args_ptr, num_threads)
    keep_alive(args)
    keep_alive(scratch)


def _pack_on_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (_NUM_ARGS,), np.int64)
    index, num_threads, num_tiles = thread_index(args_ptr), thread_count(args_ptr), -(-args[_NUM_ROWS] // TILE_ROWS)
    _pack_tiles(args, index * num_tiles // num_threads, (index + 1) * num_tiles // num_threads)


@kernel
def _compute_block_depth(padded_depth):
    """Return the depth of all blocks except the last block."""
    num_blocks = -(-padded_depth // BLOCK_DEPTH)
    return -(-padded_depth // (num_blocks * UNROLL)) * UNROLL


@ordered_kernel
def _pack_tiles(args, first_tile, end_tile):
    """Norm the rows of some tiles, and write them to the packed buffer in the order [block of K, tile, k, row]."""
    num_rows, depth, padded_depth = args[_NUM_ROWS], args[_DEPTH], args[_PADDED_DEPTH]
    num_tiles, block_depth = -(-num_rows // TILE_ROWS), _compute_block_depth(padded_depth)
    eps = np.float32(args.view(np.float64)[_EPS])
    x = numba.carray(pointer(args[_X_PTR]), (num_rows, depth), np.float32)
    norm_weight = numba.carray(pointer(args[_NORM_PTR]), (depth,), np.float32)
    row_factors = np.empty(TILE_ROWS, np.float32)
    for tile in range(first_tile, end_tile):
        first_row, end_row = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
        num_tile_rows = end_row - first_row
        if args[_NORM_PTR]:
            for row in range(num_tile_rows):
                row_factors[row] = inverse_rms(x, first_row + row, 0, depth, eps)
        for first_k in range(0, padded_depth, block_depth):
            size = min(block_depth, padded_depth - first_k)
            packed_ptr = args[_PACKED_PTR] + 4 * (first_k * num_rows + first_row * size)
            packed = numba.carray(pointer(packed_ptr), (size, num_tile_rows), np.float32)
            num_filled = min(size, depth - first_k)
            if num_tile_rows == TILE_ROWS:
                _pack_whole_tile(x[first_row:end_row, first_k : first_k + num_filled], packed)
            else:
                for row in range(num_tile_rows):
                    for k in range(num_filled):
                        packed[k, row] = x[first_row + row, first_k + k]
            packed[num_filled:] = _ZERO
            if args[_NORM_PTR]:
                for k in range(num_filled):
                    factor = norm_weight[first_k + k]
                    for row in range(num_tile_rows):
                        packed[k, row] = packed[k, row] * row_factors[row] * factor


@ordered_kernel
def _pack_whole_tile(rows, packed):
    for k in range(rows.shape[1]):
        packed[k, 0] = rows[0, k]
        packed[k, 1] = rows[1, k]
        packed[k, 2] = rows[2, k]
        packed[k, 3] = rows[3, k]
        packed[k, 4] = rows[4, k]
        packed[k, 5] = rows[5, k]


def _multiply_on_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (_NUM_ARGS,), np.int64)
    num_rows, num_columns, gated = args[_NUM_ROWS], args[_NUM_COLUMNS], args[_IS_GATED] != 0
    index, num_threads, num_panels = thread_index(args_ptr), thread_count(args_ptr), -(-num_columns // PANEL)
    scratch = np.empty(2 * num_rows * PANEL + BLOCK_DEPTH * PANEL + LINE // 4, np.float32)
    copy_ptr = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
    sums_ptr = copy_ptr + 4 * BLOCK_DEPTH * PANEL
    for panel in range(index * num_panels // num_threads, (index + 1) * num_panels // num_threads):
        if gated:
            _multiply(args, panel, panel + num_panels, copy_ptr, sums_ptr)
            _multiply(args, panel + num_panels, panel + 1, copy_ptr, sums_ptr + 4 * num_rows * PANEL)
        else:
            _multiply(args, panel, panel + 1, copy_ptr, sums_ptr)
        _finish_panel(args, panel, sums_ptr)
    keep_alive(scratch)


@kernel
def _multiply(args, panel, next_panel, copy_ptr, sums_ptr):
    """Multiply all rows by the columns of `panel`, and prefetch the start of `next_panel`."""
    num_rows, padded_depth = args[_NUM_ROWS], args[_PADDED_DEPTH]
    num_tiles, block_depth = -(-num_rows // TILE_ROWS), _compute_block_depth(padded_depth)
    panel_ptr = args[_PANELS_PTR] + 2 * panel * padded_depth * PANEL
    converts_panels = num_rows >= MIN_CONVERTED_ROWS
    # Each pass over a block prefetches a part of the next block.
    num_passes = num_tiles if num_rows <= MAX_WHOLE_PANEL_ROWS else num_tiles * NUM_GROUPS
    prefetch_step = LINE * UNROLL // num_passes
    for first_k in range(0, padded_depth, block_depth):
        size = min(block_depth, padded_depth - first_k)
        pass_bytes = prefetch_step * size // UNROLL
        block_ptr, rows_ptr = panel_ptr + 2 * first_k * PANEL, args[_PACKED_PTR] + 4 * first_k * num_rows
        prefetch_ptr = block_ptr + 2 * size * PANEL
        if first_k + size == padded_depth:
            prefetch_ptr = args[_PANELS_PTR] + 2 * next_panel * padded_depth * PANEL
        if converts_panels:
            convert_panel(block_ptr, size, copy_ptr)
            for group in range(NUM_GROUPS):
                group_ptr, group_sums_ptr = copy_ptr + 4 * group * size * GROUP, sums_ptr + 4 * group * GROUP
                for tile in range(num_tiles):
                    first_row, end_row = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
                    tile_ptr, tile_sums_ptr = rows_ptr + 4 * first_row * size, group_sums_ptr + 4 * first_row * PANEL
                    _multiply_float32(
                        end_row - first_row,
                        tile_ptr,
                        group_ptr,
                        size,
                        tile_sums_ptr,
                        first_k,
                        prefetch_ptr,
                        prefetch_step,
                    )
                    prefetch_ptr += pass_bytes
        else:
            for tile in range(num_tiles):
                first_row, end_row = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
                tile_ptr, tile_sums_ptr = rows_ptr + 4 * first_row * size, sums_ptr + 4 * first_row * PANEL
                _multiply_bf16(
                    end_row - first_row, tile_ptr, block_ptr, size, tile_sums_ptr, first_k, prefetch_ptr, prefetch_step
                )
                prefetch_ptr += (end_row - first_row > MAX_WHOLE_PANEL_ROWS) * NUM_GROUPS * pass_bytes


@kernel
def _finish_panel(args, panel, sums_ptr):
    """Add the bias to a panel's sums, gate the sums, and write or add them to the output."""
    num_rows, num_columns, gated = args[_NUM_ROWS], args[_NUM_COLUMNS], args[_IS_GATED] != 0
    first = panel * PANEL
    size = min(PANEL, num_columns - first)
    if args[_BIAS_PTR]:
        _add_bias(args[_BIAS_PTR] + 2 * first, size, sums_ptr, num_rows)
        if gated:
            _add_bias(args[_BIAS_PTR] + 2 * (num_columns + first), size, sums_ptr + 4 * num_rows * PANEL, num_rows)
    for row in range(num_rows):
        row_sums_ptr, row_out_ptr = sums_ptr + 4 * row * PANEL, args[_OUT_PTR] + 4 * (row * num_columns + first)
        if gated:
            gate_values(row_sums_ptr, row_sums_ptr + 4 * num_rows * PANEL, row_out_ptr, PANEL)
        else:
            _finish_row(row_sums_ptr, row_out_ptr, size, args[_ADDS_TO_OUT] != 0)


@ordered_kernel
def _add_bias(bias_ptr, size, sums_ptr, num_rows):
    bias = numba.carray(pointer(bias_ptr), (size,), np.uint16)
    sums = numba.carray(pointer(sums_ptr), (num_rows, PANEL), np.float32)
    for row in range(num_rows):
        for j in range(size):
            sums[row, j] += from_bf16(bias[j])


@ordered_kernel
def _finish_row(sums_ptr, out_ptr, size, adds_to_out):
    sums = numba.carray(pointer(sums_ptr), (size,), np.float32)
    out = numba.carray(pointer(out_ptr), (size,), np.float32)
    for j in range(size):
        out[j] = out[j] + sums[j] if adds_to_out else sums[j]


_bf16_1 = make_tile(1, num_groups=NUM_GROUPS, has_bf16_panel=True, num_prefetches=UNROLL)
_bf16_2 = make_tile(2, num_groups=NUM_GROUPS, has_bf16_panel=True, num_prefetches=UNROLL)
_bf16_3 = make_tile(3, num_groups=NUM_GROUPS, has_bf16_panel=True, num_prefetches=UNROLL)
_bf16_4 = make_tile(4, has_bf16_panel=True, num_prefetches=UNROLL // NUM_GROUPS)
_bf16_5 = make_tile(5, has_bf16_panel=True, num_prefetches=UNROLL // NUM_GROUPS)
_bf16_6 = make_tile(6, has_bf16_panel=True, num_prefetches=UNROLL // NUM_GROUPS)
_float32_4 = make_tile(4, num_prefetches=1)
_float32_5 = make_tile(5, num_prefetches=1)
_float32_6 = make_tile(6, num_prefetches=1)


@kernel
def _multiply_bf16(num_rows, rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step):
    if num_rows == 1:
        _bf16_1(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step)
    elif num_rows == 2:
        _bf16_2(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step)
    elif num_rows == 3:
        _bf16_3(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step)
    else:
        for group in range(NUM_GROUPS):
            group_panel_ptr, tile_sums_ptr = panel_ptr + 2 * GROUP * group, sums_ptr + 4 * GROUP * group
            group_prefetch_ptr = prefetch_ptr + group * prefetch_step * depth // UNROLL
            if num_rows == 4:
                _bf16_4(
                    rows_ptr, group_panel_ptr, depth, tile_sums_ptr, continues_sums, group_prefetch_ptr, prefetch_step
                )
            elif num_rows == 5:
                _bf16_5(
                    rows_ptr, group_panel_ptr, depth, tile_sums_ptr, continues_sums, group_prefetch_ptr, prefetch_step
                )
            else:
                _bf16_6(
                    rows_ptr, group_panel_ptr, depth, tile_sums_ptr, continues_sums, group_prefetch_ptr, prefetch_step
                )


@kernel
def _multiply_float32(num_rows, rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step):
    if num_rows == 6:
        _float32_6(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step)
    elif num_rows == 5:
        _float32_5(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step)
    else:
        _float32_4(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, prefetch_step)


_PACK_REGION = compile_region(_pack_on_thread)
_MULTIPLY_REGION = compile_region(_multiply_on_thread)
