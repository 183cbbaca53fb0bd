"""Rows times a bf16 weight on a CPU in float32, with the norm before and the gate or residual after, in one call.

Each sum runs over K in order, so that a row's result does not depend on the other rows.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.numba_jit import (
    LANES,
    OPENMP,
    from_bf16,
    inverse_rms,
    keep_alive,
    kernel,
    ordered_kernel,
    pointer,
    region,
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
    gate_numbers,
    make_tile,
)

# Depth of a block: its float32 panel fits the first-level cache.
DEPTH = 320
# Most rows packed at once. Fewer than CONVERTED_ROWS rows multiply bf16 panels without a float32 copy.
BLOCK_ROWS = 252
CONVERTED_ROWS = 43
# Up to this many rows process a whole panel at once, larger tiles one group of columns at a time.
STREAMED_ROWS = 3

_ZERO = np.float32(0.0)


def pack_panels(weight: Tensor) -> Tensor:
    """Copy bf16 `weight` [N, K] into panels: bf16 [panels, K rounded up to UNROLL, PANEL], zeros beyond N and K."""
    num_columns, depth = weight.shape
    num_panels, padded = -(-num_columns // PANEL), -(-depth // UNROLL) * UNROLL
    whole = weight.new_zeros((num_panels * PANEL, padded))
    whole[:num_columns, :depth] = weight
    pairs = whole.view(num_panels, PANEL // GROUP, 2, LANES, padded)
    return pairs.permute(0, 4, 1, 3, 2).reshape(num_panels, padded, PANEL).contiguous()


def can_gate(num_columns: int) -> bool:
    """Whether a weight with `num_columns` columns, the gate's and the up projection's, may be passed as `gated`."""
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
    add: bool,
) -> None:
    """Write normed rows `x` times a weight plus a bias into `out`.

    x: contiguous float32 [M, K], M >= 1.
    norm_weight: float32, at least K elements; None for no norm.
    panels: the weight [N, K], from `pack_panels`.
    bias: contiguous bf16 [N].
    out: contiguous float32 [M, N].
    gated: `out` is [M, N / 2]: silu of the first half's results times the second half's, see `can_gate`.
    add: add to `out` instead of overwriting it.
    """
    num_rows, width = x.shape
    _project(
        OPENMP,
        _PACK_OF_THREAD,
        _PANELS_OF_THREAD,
        x.data_ptr(),
        0 if norm_weight is None else norm_weight.data_ptr(),
        eps,
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        width,
        panels.shape[1],
        out.shape[1],
        gated,
        add,
        torch.get_num_threads(),
    )


@kernel
def _project(
    openmp,
    pack,
    multiply,
    x_ptr,
    norm_ptr,
    eps,
    panels_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    width,
    depth,
    num_columns,
    gated,
    add,
    num_threads,
):
    block = min(num_rows, BLOCK_ROWS)
    scratch = np.empty(block * depth + LINE // 4, np.float32)
    packed_ptr = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
    args = np.empty(14, np.int64)
    args[0], args[2], args[4], args[5] = openmp, norm_ptr, panels_ptr, bias_ptr
    args[7], args[9], args[10], args[11], args[12] = packed_ptr, width, depth, num_columns, gated
    args[13] = add
    args_ptr = np.int64(args.ctypes.data)
    args.view(np.float64)[3] = eps
    for begin in range(0, num_rows, block):
        args[1] = x_ptr + 4 * begin * width
        args[6] = out_ptr + 4 * begin * num_columns
        args[8] = min(block, num_rows - begin)
        if num_rows > 2 * TILE_ROWS:
            run_region(pack, args_ptr, num_threads)
        else:
            _pack(args, 0, -(-args[8] // TILE_ROWS))
        run_region(multiply, args_ptr, num_threads)
    keep_alive(args)
    keep_alive(scratch)


def _pack_of_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (14,), np.int64)
    index, count, num_tiles = thread_index(args_ptr), thread_count(args_ptr), -(-args[8] // TILE_ROWS)
    _pack(args, index * num_tiles // count, (index + 1) * num_tiles // count)


@kernel
def _block_depth(depth):
    """Return the depth of all blocks but the last."""
    num_blocks = -(-depth // DEPTH)
    return -(-depth // (num_blocks * UNROLL)) * UNROLL


@ordered_kernel
def _pack(args, first_tile, last_tile):
    """Write normed rows of these tiles, block by block of K, within a block tile by tile, each as [depth, rows]."""
    num_rows, width, depth = args[8], args[9], args[10]
    num_tiles, step = -(-num_rows // TILE_ROWS), _block_depth(depth)
    eps = np.float32(args.view(np.float64)[3])
    x = numba.carray(pointer(args[1]), (num_rows, width), np.float32)
    weight = numba.carray(pointer(args[2]), (width,), np.float32)
    scales = np.empty(TILE_ROWS, np.float32)
    for tile in range(first_tile, last_tile):
        begin, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
        count = end - begin
        if args[2]:
            for row in range(count):
                scales[row] = inverse_rms(x, begin + row, 0, width, eps)
        for start in range(0, depth, step):
            size = min(step, depth - start)
            packed_ptr = args[7] + 4 * (start * num_rows + begin * size)
            packed = numba.carray(pointer(packed_ptr), (size, count), np.float32)
            filled = min(size, width - start)
            if count == TILE_ROWS:
                _pack_tile(x[begin:end, start : start + filled], packed)
            else:
                for row in range(count):
                    for k in range(filled):
                        packed[k, row] = x[begin + row, start + k]
            packed[filled:] = _ZERO
            if args[2]:
                for k in range(filled):
                    number = weight[start + k]
                    for row in range(count):
                        packed[k, row] = packed[k, row] * scales[row] * number


@ordered_kernel
def _pack_tile(rows, packed):
    for k in range(rows.shape[1]):
        packed[k, 0] = rows[0, k]
        packed[k, 1] = rows[1, k]
        packed[k, 2] = rows[2, k]
        packed[k, 3] = rows[3, k]
        packed[k, 4] = rows[4, k]
        packed[k, 5] = rows[5, k]


def _panels_of_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (14,), np.int64)
    num_rows, num_columns, gated = args[8], args[11], args[12] != 0
    index, count, num_panels = thread_index(args_ptr), thread_count(args_ptr), -(-num_columns // PANEL)
    scratch = np.empty(2 * num_rows * PANEL + DEPTH * PANEL + LINE // 4, np.float32)
    copy_ptr = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
    sums_ptr = copy_ptr + 4 * DEPTH * PANEL
    for panel in range(index * num_panels // count, (index + 1) * num_panels // count):
        if gated:
            _multiply(args, panel, panel + num_panels, copy_ptr, sums_ptr)
            _multiply(args, panel + num_panels, panel + 1, copy_ptr, sums_ptr + 4 * num_rows * PANEL)
        else:
            _multiply(args, panel, panel + 1, copy_ptr, sums_ptr)
        _finish(args, panel, sums_ptr)
    keep_alive(scratch)


@kernel
def _multiply(args, panel, next_panel, copy_ptr, sums_ptr):
    num_rows, depth = args[8], args[10]
    num_tiles, step = -(-num_rows // TILE_ROWS), _block_depth(depth)
    panel_ptr = args[4] + 2 * panel * depth * PANEL
    converts = num_rows >= CONVERTED_ROWS
    # Each pass over a block prefetches an equal part of the next block.
    num_passes = num_tiles if num_rows <= STREAMED_ROWS else num_tiles * NUM_GROUPS
    ahead_step = LINE * UNROLL // num_passes
    for start in range(0, depth, step):
        size = min(step, depth - start)
        block_ptr, rows_ptr = panel_ptr + 2 * start * PANEL, args[7] + 4 * start * num_rows
        ahead_ptr = block_ptr + 2 * size * PANEL
        if start + size == depth:
            ahead_ptr = args[4] + 2 * next_panel * depth * PANEL
        if converts:
            convert_panel(block_ptr, size, copy_ptr)
            for group in range(NUM_GROUPS):
                group_ptr, shift = copy_ptr + 4 * group * size * GROUP, 4 * group * GROUP
                for tile in range(num_tiles):
                    begin, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
                    tile_ptr, to = rows_ptr + 4 * begin * size, sums_ptr + 4 * begin * PANEL + shift
                    _multiply_copy(end - begin, tile_ptr, group_ptr, size, to, start, ahead_ptr, ahead_step)
                    ahead_ptr += ahead_step * size // UNROLL
        else:
            for tile in range(num_tiles):
                begin, end = tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles
                tile_ptr, to = rows_ptr + 4 * begin * size, sums_ptr + 4 * begin * PANEL
                _multiply_bf16(end - begin, tile_ptr, block_ptr, size, to, start, ahead_ptr, ahead_step)
                ahead_ptr += (end - begin > STREAMED_ROWS) * NUM_GROUPS * ahead_step * size // UNROLL


@kernel
def _finish(args, panel, sums_ptr):
    """Write a panel's results: its sums with bias, gate or residual."""
    num_rows, num_columns, gated, add = args[8], args[11], args[12] != 0, args[13] != 0
    first = panel * PANEL
    size = min(PANEL, num_columns - first)
    if args[5]:
        _add_bias(args[5] + 2 * first, size, sums_ptr, num_rows)
        if gated:
            _add_bias(args[5] + 2 * (num_columns + first), size, sums_ptr + 4 * num_rows * PANEL, num_rows)
    for row in range(num_rows):
        from_ptr, to_ptr = sums_ptr + 4 * row * PANEL, args[6] + 4 * (row * num_columns + first)
        if gated:
            gate_numbers(from_ptr, from_ptr + 4 * num_rows * PANEL, to_ptr, PANEL)
        else:
            _finish_row(from_ptr, to_ptr, size, add)


@ordered_kernel
def _add_bias(bias_ptr, size, sums_ptr, num_rows):
    bias = numba.carray(pointer(bias_ptr), (size,), np.uint16)
    sums = numba.carray(pointer(sums_ptr), (num_rows, PANEL), np.float32)
    for row in range(num_rows):
        for j in range(size):
            sums[row, j] += from_bf16(bias[j])


@ordered_kernel
def _finish_row(sums_ptr, out_ptr, size, add):
    sums = numba.carray(pointer(sums_ptr), (size,), np.float32)
    out = numba.carray(pointer(out_ptr), (size,), np.float32)
    for j in range(size):
        out[j] = out[j] + sums[j] if add else sums[j]


_bf16_1 = make_tile(1, num_groups=NUM_GROUPS, from_bf16=True, num_prefetches=UNROLL)
_bf16_2 = make_tile(2, num_groups=NUM_GROUPS, from_bf16=True, num_prefetches=UNROLL)
_bf16_3 = make_tile(3, num_groups=NUM_GROUPS, from_bf16=True, num_prefetches=UNROLL)
_bf16_4 = make_tile(4, from_bf16=True, num_prefetches=UNROLL // NUM_GROUPS)
_bf16_5 = make_tile(5, from_bf16=True, num_prefetches=UNROLL // NUM_GROUPS)
_bf16_6 = make_tile(6, from_bf16=True, num_prefetches=UNROLL // NUM_GROUPS)
_copy_4 = make_tile(4, num_prefetches=1)
_copy_5 = make_tile(5, num_prefetches=1)
_copy_6 = make_tile(6, num_prefetches=1)


@kernel
def _multiply_bf16(num_rows, rows_ptr, panel_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step):
    if num_rows == 1:
        _bf16_1(rows_ptr, panel_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step)
    elif num_rows == 2:
        _bf16_2(rows_ptr, panel_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step)
    elif num_rows == 3:
        _bf16_3(rows_ptr, panel_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step)
    else:
        for group in range(NUM_GROUPS):
            at, to = panel_ptr + 2 * GROUP * group, sums_ptr + 4 * GROUP * group
            ahead = ahead_ptr + group * ahead_step * depth // UNROLL
            if num_rows == 4:
                _bf16_4(rows_ptr, at, depth, to, more, ahead, ahead_step)
            elif num_rows == 5:
                _bf16_5(rows_ptr, at, depth, to, more, ahead, ahead_step)
            else:
                _bf16_6(rows_ptr, at, depth, to, more, ahead, ahead_step)


@kernel
def _multiply_copy(num_rows, rows_ptr, copy_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step):
    if num_rows == 6:
        _copy_6(rows_ptr, copy_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step)
    elif num_rows == 5:
        _copy_5(rows_ptr, copy_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step)
    else:
        _copy_4(rows_ptr, copy_ptr, depth, sums_ptr, more, ahead_ptr, ahead_step)


_PACK_OF_THREAD = region(_pack_of_thread)
_PANELS_OF_THREAD = region(_panels_of_thread)
