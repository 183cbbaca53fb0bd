"""Multiplies rows by a bf16 weight on a CPU in float32, with norm, gate and residual in one call.

A panel is the part of the weight that gives PANEL_WIDTH columns of the product. A group is GROUP_WIDTH columns of a
panel. A tile is up to TILE_ROWS rows. A block is a range of K. Each sum runs over K in order, so that a row's result
does not depend on the other rows.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.numba_jit import (
    LANES,
    OPENMP_FUNCTIONS_PTR,
    compile_region,
    from_bf16,
    inverse_rms,
    keep_alive,
    kernel,
    kernel_without_reordering,
    pointer,
    run_region,
    thread_count,
    thread_index,
)
from nanovllm_kernels.numba_tiles import (
    GROUP_WIDTH,
    LINE_BYTES,
    NUM_GROUPS,
    PANEL_WIDTH,
    TILE_ROWS,
    UNROLL,
    convert_panel,
    gate_values,
    make_multiplier,
)

# Indices into the int64 array that `_pack_on_thread` and `_multiply_on_thread` take. _EPS holds the bits of a float64.
(
    _OPENMP_FUNCTIONS_PTR,
    _X_PTR,
    _NORM_PTR,  # 0: no norm
    _EPS,
    _PANELS_PTR,
    _BIAS_PTR,
    _OUT_PTR,
    _PACKED_PTR,  # normalized rows, float32 [block, tile, k, row]
    _NUM_ROWS,
    _DEPTH,
    _PADDED_DEPTH,  # K rounded up to a multiple of UNROLL
    _NUM_OUTPUTS,  # columns of the output: N, or N / 2 if gated
    _IS_GATED,
    _ADDS_TO_OUT,
) = range(14)
_NUM_ARGS = 14
# Maximum depth of a block (size of its range of K). One block of a float32 panel fits into the first-level cache.
MAX_BLOCK_DEPTH = 320
# Maximum number of rows whose packed copies are in memory at once.
MAX_PACKED_ROWS = 252
# With at least this many rows, each block of a bf16 panel is converted to float32 before it is multiplied.
MIN_CONVERTED_ROWS = 43
# A tile with more rows is multiplied by one group of columns at a time, instead of by a whole panel.
MAX_WHOLE_PANEL_ROWS = 3

_ZERO = np.float32(0.0)


def pack_panels(weight: Tensor) -> Tensor:
    """Copy bf16 `weight` [N, K] into bf16 panels [panels, padded K, PANEL_WIDTH]. The padding is zeros."""
    num_outputs, depth = weight.shape
    num_panels, padded_depth = -(-num_outputs // PANEL_WIDTH), -(-depth // UNROLL) * UNROLL
    padded_weight = weight.new_zeros((num_panels * PANEL_WIDTH, padded_depth))
    padded_weight[:num_outputs, :depth] = weight
    # In a panel, column i + LANES of a group follows column i, so that one 32-bit word holds both.
    lane_pairs = padded_weight.view(num_panels, PANEL_WIDTH // GROUP_WIDTH, 2, LANES, padded_depth)
    return lane_pairs.permute(0, 4, 1, 3, 2).reshape(num_panels, padded_depth, PANEL_WIDTH).contiguous()


def can_gate(num_outputs: int) -> bool:
    """Whether `project_rows` supports `gated` for a weight [num_outputs, K]."""
    return num_outputs % (2 * PANEL_WIDTH) == 0


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
    """Normalize the rows of `x`, multiply by a weight, add a bias, apply a gate, and write the results into `out`.

    x: float32 [M, K], contiguous, M >= 1.
    norm_weight: float32, at least K elements. Further elements are ignored. None: no norm.
    panels: the weight [N, K], from `pack_panels`. bias: bf16 [N], contiguous.
    out: float32 [M, N], or [M, N / 2] if gated, contiguous.
    gated: multiply silu of the first half of the columns by the second half.
    adds_to_out: add the results to `out`, instead of overwriting `out`. Must be False if gated.
    """
    num_rows, depth = x.shape
    _project(
        OPENMP_FUNCTIONS_PTR,
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
    openmp_functions_ptr,
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
    num_outputs,
    gated,
    adds_to_out,
    num_threads,
):
    """Pack and multiply rows, up to MAX_PACKED_ROWS at a time. pack_region, multiply_region: from `compile_region`."""
    max_packed_rows = min(num_rows, MAX_PACKED_ROWS)
    scratch = np.empty(max_packed_rows * padded_depth + LINE_BYTES // 4, np.float32)
    packed_ptr = (np.int64(scratch.ctypes.data) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    args = np.empty(_NUM_ARGS, np.int64)
    args[_OPENMP_FUNCTIONS_PTR], args[_NORM_PTR] = openmp_functions_ptr, norm_ptr
    args[_PANELS_PTR], args[_BIAS_PTR], args[_PACKED_PTR] = panels_ptr, bias_ptr, packed_ptr
    args[_DEPTH], args[_PADDED_DEPTH], args[_NUM_OUTPUTS] = depth, padded_depth, num_outputs
    args[_IS_GATED], args[_ADDS_TO_OUT] = gated, adds_to_out
    args_ptr = np.int64(args.ctypes.data)
    args.view(np.float64)[_EPS] = eps
    for first_row in range(0, num_rows, max_packed_rows):
        args[_X_PTR] = x_ptr + 4 * first_row * depth
        args[_OUT_PTR] = out_ptr + 4 * first_row * num_outputs
        args[_NUM_ROWS] = min(max_packed_rows, num_rows - first_row)
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
def _choose_block_depth(padded_depth):
    """Return the depth of a block. The last block may have a smaller depth."""
    num_blocks = -(-padded_depth // MAX_BLOCK_DEPTH)
    return -(-padded_depth // (num_blocks * UNROLL)) * UNROLL


@kernel_without_reordering
def _pack_tiles(args, first_tile, end_tile):
    """Normalize the rows of tiles, and write the results in the order [block, tile, k, row]."""
    num_rows, depth, padded_depth = args[_NUM_ROWS], args[_DEPTH], args[_PADDED_DEPTH]
    num_tiles, block_depth = -(-num_rows // TILE_ROWS), _choose_block_depth(padded_depth)
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
            num_unpadded = min(size, depth - first_k)
            if num_tile_rows == TILE_ROWS:
                _pack_whole_tile(x[first_row:end_row, first_k : first_k + num_unpadded], packed)
            else:
                for row in range(num_tile_rows):
                    for k in range(num_unpadded):
                        packed[k, row] = x[first_row + row, first_k + k]
            packed[num_unpadded:] = _ZERO
            if args[_NORM_PTR]:
                for k in range(num_unpadded):
                    factor = norm_weight[first_k + k]
                    for row in range(num_tile_rows):
                        packed[k, row] = packed[k, row] * row_factors[row] * factor


@kernel_without_reordering
def _pack_whole_tile(rows, packed):
    """Transpose TILE_ROWS rows [row, k] into `packed` [k, row]."""
    for k in range(rows.shape[1]):
        packed[k, 0] = rows[0, k]
        packed[k, 1] = rows[1, k]
        packed[k, 2] = rows[2, k]
        packed[k, 3] = rows[3, k]
        packed[k, 4] = rows[4, k]
        packed[k, 5] = rows[5, k]


def _multiply_on_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (_NUM_ARGS,), np.int64)
    num_rows, num_outputs, gated = args[_NUM_ROWS], args[_NUM_OUTPUTS], args[_IS_GATED] != 0
    index, num_threads, num_panels = thread_index(args_ptr), thread_count(args_ptr), -(-num_outputs // PANEL_WIDTH)
    scratch = np.empty(2 * num_rows * PANEL_WIDTH + MAX_BLOCK_DEPTH * PANEL_WIDTH + LINE_BYTES // 4, np.float32)
    converted_ptr = (np.int64(scratch.ctypes.data) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    sums_ptr = converted_ptr + 4 * MAX_BLOCK_DEPTH * PANEL_WIDTH
    for panel in range(index * num_panels // num_threads, (index + 1) * num_panels // num_threads):
        if gated:
            _multiply_panel(args, panel, panel + num_panels, converted_ptr, sums_ptr)
            _multiply_panel(args, panel + num_panels, panel + 1, converted_ptr, sums_ptr + 4 * num_rows * PANEL_WIDTH)
        else:
            _multiply_panel(args, panel, panel + 1, converted_ptr, sums_ptr)
        _finish_panel(args, panel, sums_ptr)
    keep_alive(scratch)


@kernel
def _multiply_panel(args, panel, next_panel, converted_ptr, sums_ptr):
    """Multiply all rows by `panel`, and prefetch from `next_panel`. converted_ptr: space for a float32 block."""
    num_rows, padded_depth = args[_NUM_ROWS], args[_PADDED_DEPTH]
    num_tiles, block_depth = -(-num_rows // TILE_ROWS), _choose_block_depth(padded_depth)
    panel_ptr = args[_PANELS_PTR] + 2 * panel * padded_depth * PANEL_WIDTH
    converts_panels = num_rows >= MIN_CONVERTED_ROWS
    # A pass multiplies one tile by a block, or by one group of a block. Each pass prefetches a part of the next block.
    num_passes = num_tiles if num_rows <= MAX_WHOLE_PANEL_ROWS else num_tiles * NUM_GROUPS
    step_bytes = LINE_BYTES * UNROLL // num_passes  # bytes prefetched per UNROLL values of k
    for first_k in range(0, padded_depth, block_depth):
        size = min(block_depth, padded_depth - first_k)
        prefetched_bytes = step_bytes * size // UNROLL
        block_ptr, rows_ptr = panel_ptr + 2 * first_k * PANEL_WIDTH, args[_PACKED_PTR] + 4 * first_k * num_rows
        prefetch_ptr = block_ptr + 2 * size * PANEL_WIDTH
        if first_k + size == padded_depth:
            prefetch_ptr = args[_PANELS_PTR] + 2 * next_panel * padded_depth * PANEL_WIDTH
        if converts_panels:
            convert_panel(block_ptr, size, converted_ptr)
            for group in range(NUM_GROUPS):
                group_ptr, group_sums_ptr = (
                    converted_ptr + 4 * group * size * GROUP_WIDTH,
                    sums_ptr + 4 * group * GROUP_WIDTH,
                )
                for tile in range(num_tiles):
                    first_row, end_row = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
                    tile_ptr, tile_sums_ptr = (
                        rows_ptr + 4 * first_row * size,
                        group_sums_ptr + 4 * first_row * PANEL_WIDTH,
                    )
                    _multiply_float32(
                        end_row - first_row,
                        tile_ptr,
                        group_ptr,
                        size,
                        tile_sums_ptr,
                        first_k,
                        prefetch_ptr,
                        step_bytes,
                    )
                    prefetch_ptr += prefetched_bytes
        else:
            for tile in range(num_tiles):
                first_row, end_row = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
                tile_ptr, tile_sums_ptr = rows_ptr + 4 * first_row * size, sums_ptr + 4 * first_row * PANEL_WIDTH
                _multiply_bf16(
                    end_row - first_row, tile_ptr, block_ptr, size, tile_sums_ptr, first_k, prefetch_ptr, step_bytes
                )
                prefetch_ptr += (end_row - first_row > MAX_WHOLE_PANEL_ROWS) * NUM_GROUPS * prefetched_bytes


@kernel
def _finish_panel(args, panel, sums_ptr):
    """Add the bias to a panel's sums, gate the sums, and write or add them to the output."""
    num_rows, num_outputs, gated = args[_NUM_ROWS], args[_NUM_OUTPUTS], args[_IS_GATED] != 0
    first_column = panel * PANEL_WIDTH
    size = min(PANEL_WIDTH, num_outputs - first_column)
    if args[_BIAS_PTR]:
        _add_bias(args[_BIAS_PTR] + 2 * first_column, size, sums_ptr, num_rows)
        if gated:
            _add_bias(
                args[_BIAS_PTR] + 2 * (num_outputs + first_column),
                size,
                sums_ptr + 4 * num_rows * PANEL_WIDTH,
                num_rows,
            )
    for row in range(num_rows):
        row_sums_ptr, row_out_ptr = (
            sums_ptr + 4 * row * PANEL_WIDTH,
            args[_OUT_PTR] + 4 * (row * num_outputs + first_column),
        )
        if gated:
            gate_values(row_sums_ptr, row_sums_ptr + 4 * num_rows * PANEL_WIDTH, row_out_ptr, PANEL_WIDTH)
        else:
            _finish_row(row_sums_ptr, row_out_ptr, size, args[_ADDS_TO_OUT] != 0)


@kernel_without_reordering
def _add_bias(bias_ptr, size, sums_ptr, num_rows):
    bias = numba.carray(pointer(bias_ptr), (size,), np.uint16)
    sums = numba.carray(pointer(sums_ptr), (num_rows, PANEL_WIDTH), np.float32)
    for row in range(num_rows):
        for j in range(size):
            sums[row, j] += from_bf16(bias[j])


@kernel_without_reordering
def _finish_row(sums_ptr, out_ptr, size, adds_to_out):
    sums = numba.carray(pointer(sums_ptr), (size,), np.float32)
    out = numba.carray(pointer(out_ptr), (size,), np.float32)
    for j in range(size):
        out[j] = out[j] + sums[j] if adds_to_out else sums[j]


_multiply_bf16_1 = make_multiplier(1, num_groups=NUM_GROUPS, has_bf16_panel=True, num_prefetches=UNROLL)
_multiply_bf16_2 = make_multiplier(2, num_groups=NUM_GROUPS, has_bf16_panel=True, num_prefetches=UNROLL)
_multiply_bf16_3 = make_multiplier(3, num_groups=NUM_GROUPS, has_bf16_panel=True, num_prefetches=UNROLL)
_multiply_bf16_4 = make_multiplier(4, has_bf16_panel=True, num_prefetches=UNROLL // NUM_GROUPS)
_multiply_bf16_5 = make_multiplier(5, has_bf16_panel=True, num_prefetches=UNROLL // NUM_GROUPS)
_multiply_bf16_6 = make_multiplier(6, has_bf16_panel=True, num_prefetches=UNROLL // NUM_GROUPS)
_multiply_float32_4 = make_multiplier(4, num_prefetches=1)
_multiply_float32_5 = make_multiplier(5, num_prefetches=1)
_multiply_float32_6 = make_multiplier(6, num_prefetches=1)


@kernel
def _multiply_bf16(num_rows, rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes):
    """Multiply one tile by a bf16 panel. continues_sums: if 0, overwrite the sums; else add to the sums."""
    if num_rows == 1:
        _multiply_bf16_1(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes)
    elif num_rows == 2:
        _multiply_bf16_2(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes)
    elif num_rows == 3:
        _multiply_bf16_3(rows_ptr, panel_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes)
    else:
        for group in range(NUM_GROUPS):
            group_panel_ptr, group_sums_ptr = panel_ptr + 2 * GROUP_WIDTH * group, sums_ptr + 4 * GROUP_WIDTH * group
            group_prefetch_ptr = prefetch_ptr + group * step_bytes * depth // UNROLL
            if num_rows == 4:
                _multiply_bf16_4(
                    rows_ptr, group_panel_ptr, depth, group_sums_ptr, continues_sums, group_prefetch_ptr, step_bytes
                )
            elif num_rows == 5:
                _multiply_bf16_5(
                    rows_ptr, group_panel_ptr, depth, group_sums_ptr, continues_sums, group_prefetch_ptr, step_bytes
                )
            else:
                _multiply_bf16_6(
                    rows_ptr, group_panel_ptr, depth, group_sums_ptr, continues_sums, group_prefetch_ptr, step_bytes
                )


@kernel
def _multiply_float32(num_rows, rows_ptr, group_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes):
    """Multiply one tile of 4 to 6 rows by one group of a float32 panel. Arguments: see `_multiply_bf16`."""
    if num_rows == 6:
        _multiply_float32_6(rows_ptr, group_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes)
    elif num_rows == 5:
        _multiply_float32_5(rows_ptr, group_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes)
    else:
        _multiply_float32_4(rows_ptr, group_ptr, depth, sums_ptr, continues_sums, prefetch_ptr, step_bytes)


_PACK_REGION = compile_region(_pack_on_thread)
_MULTIPLY_REGION = compile_region(_multiply_on_thread)
