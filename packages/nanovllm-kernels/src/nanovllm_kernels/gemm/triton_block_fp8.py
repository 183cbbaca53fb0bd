"""Block FP8 on CUDA: quantises rows in groups of 128, and multiplies the rows by a weight in blocks of 128 x 128.

If there are few rows and no norm, each CTA of the product quantises the rows while the weight loads. Tensor cores sum
only within a group, because their accumulators have less than float32's precision.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels import triton_fp8
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm.block_fp8_weight import GROUP, BlockFP8Weight
from nanovllm_kernels.gemm.tiles import BlockFP8Config
from nanovllm_kernels.gemm.triton_split_k import prefetch
from nanovllm_kernels.platform import can_overlap_launches

# Number of groups of a row that one program quantises. With a norm, one program quantises a whole row.
GROUPS_PER_PROGRAM = 8
# The left operand of Hopper's e4m3 products has at least 64 rows. For smaller tiles, the weight is the left operand.
MIN_LEFT_ROWS = 64
# Number of weight tiles that a program prefetches before the previous kernel ends.
NUM_PREFETCHED_TILES = 4


def quantize_groups(x: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm to `x` [T, K] if `norm_weight` is given. Return e4m3 values and their scales [T, K / 128]."""
    num_rows, depth = x.shape
    num_groups = triton.cdiv(depth, GROUP)
    values = torch.empty((num_rows, depth), dtype=DTYPE, device=x.device)
    scales = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    max_groups = num_groups if norm_weight is not None else min(GROUPS_PER_PROGRAM, num_groups)
    groups_per_program = triton.next_power_of_2(max_groups)
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    _norm_and_quantize_groups[(num_rows, triton.cdiv(num_groups, groups_per_program))](
        x,
        x if norm_weight is None else norm_weight,
        values,
        scales,
        num_rows,
        x.stride(0),
        eps,
        K=depth,
        GROUPS=num_groups,  # groups per row
        BLOCK_GROUPS=groups_per_program,  # a power of two
        GROUP=GROUP,
        NORM=norm_weight is not None,
        OVERLAP=overlap,
        num_warps=max(1, min(16, groups_per_program * GROUP // 256)),
        launch_pdl=overlap,
    )
    return values, scales.t()


def project(
    x: Tensor,
    x_scales: Tensor | None,
    weight: BlockFP8Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    config: BlockFP8Config,
    *,
    gated: bool,
) -> None:
    """Write `x` [M, K] times a weight, with bias, gate and residual, into `out`. x_scales: None to quantise `x`."""
    num_rows, depth = x.shape
    num_columns = out.shape[1]
    column_tiles, row_tiles = triton.cdiv(num_columns, config.block_n), triton.cdiv(num_rows, config.block_m)
    partial_sums = out
    if config.num_splits > 1:
        # If gated, the third dimension separates the sums of the gate from the sums of the up projection.
        shape = (row_tiles * column_tiles, config.num_splits, 1 + gated, config.block_m, config.block_n)
        partial_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    overlap = can_overlap_launches(x.device)
    _project[(column_tiles, row_tiles, config.num_splits)](
        x,
        x if x_scales is None else x_scales,
        weight.data,
        weight.scales,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partial_sums,
        out if weight.counters is None else weight.counters,
        num_rows,
        num_columns,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        0 if x_scales is None else x_scales.stride(1),
        weight.scales.stride(0),
        0 if residual is None else residual.stride(0),
        K=depth,
        GROUPS=triton.cdiv(depth, GROUP),
        GROUP=GROUP,
        ROWS_PER_SCALE=weight.block_rows,  # weight rows (columns of the product) that share a scale
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        NUM_SPLITS=config.num_splits,
        STAGES=config.num_stages,  # stages of the pipelined loop over K
        PREFETCHED_TILES=min(NUM_PREFETCHED_TILES, -(-triton.cdiv(depth, GROUP) // config.num_splits)),
        # Whether all columns of a tile share one scale per group.
        TILE_SHARES_SCALE=weight.block_rows % config.block_n == 0 and (not gated or num_columns % config.block_n == 0),
        SWAP=config.block_m < MIN_LEFT_ROWS,  # the weight is the left operand
        QUANTIZED=x_scales is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _norm_and_quantize_groups(
    x_ptr,
    norm_weight_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    x_stride,
    eps,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    ks = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * x_stride + ks, mask=ks < K, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / K + eps)
        x *= factor * tl.load(norm_weight_ptr + ks, mask=ks < K, other=0.0).to(tl.float32)
    values, scales = triton_fp8.quantize_groups(x, 1)
    tl.store(values_ptr + row * K + ks, values, mask=ks < K)
    tl.store(scales_ptr + groups.to(tl.int64) * num_rows + row, scales, mask=groups < GROUPS)


@triton.jit
def _prefetch_tiles(weight_ptr, rows, mask, first_group, K: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr):
    """Prefetch TILES tiles of the weight's `rows`, from group `first_group` on. Each tile row is one cache line."""
    for tile in tl.static_range(TILES):
        ks = (first_group + tile) * GROUP
        prefetch(weight_ptr + tl.where(mask & (ks < K), rows * K + ks, 0))


@triton.jit
def _load_rows(x_ptr, x_scales_ptr, ks, is_row, K: tl.constexpr, QUANTIZED: tl.constexpr):
    """Load a group of each row: e4m3 values [M, 128], scales [M]. x_ptr: row pointers [M, 1]. QUANTIZED: x is e4m3."""
    tile = tl.load(x_ptr + ks[None, :], mask=is_row[:, None] & (ks < K)[None, :], other=0.0)
    if QUANTIZED:
        scales = tl.load(x_scales_ptr, mask=is_row, other=0.0)
    else:
        tile, scales = triton_fp8.quantize_groups(tile.to(tl.float32), 1)
    return tile, scales


@triton.jit
def _multiply(
    values,  # e4m3 [M, 128]
    x_scales,
    weight_ptr,
    scales_ptr,
    scales_stride,
    first_weight_row,
    num_columns,
    ks,
    K: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_SHARES_SCALE: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Multiply one group of each row by the weights of this tile's columns.

    first_weight_row: row of the weight for column 0 of the output.
    Returns: [M, N]. With SWAP the weight is the left operand, and the result is [N, M].
    """
    first_column = tl.program_id(0) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    column_mask = columns < num_columns
    weight_rows = (first_weight_row + columns)[:, None].to(tl.int64)
    weight_mask = column_mask[:, None] & (ks < K)[None, :]
    weight = tl.load(weight_ptr + weight_rows * K + ks[None, :], mask=weight_mask, other=0.0)
    if TILE_SHARES_SCALE:
        scales = tl.load(
            scales_ptr + ((first_weight_row + first_column) // ROWS_PER_SCALE).to(tl.int64) * scales_stride
        )
    else:
        blocks = ((first_weight_row + columns) // ROWS_PER_SCALE).to(tl.int64)
        scales = tl.load(scales_ptr + blocks * scales_stride, mask=column_mask, other=0.0)
        scales = scales[:, None] if SWAP else scales[None, :]
    if SWAP:
        products = tl.dot(weight, values.T) * (x_scales[None, :] * scales)
    else:
        products = tl.dot(values, weight.T) * (x_scales[:, None] * scales)
    return products


@triton.jit
def _store_split(partial_ptr, counter_ptr, sums, up_sums, NUM_SPLITS: tl.constexpr, GATED: tl.constexpr):
    """Store the sums over one of NUM_SPLITS parts of K. Returns whether all other parts of the tile are stored."""
    size: tl.constexpr = sums.shape[0] * sums.shape[1]
    split = tl.program_id(2)
    if GATED:
        tl.store(partial_ptr + split * (2 * size), sums)
        tl.store(partial_ptr + split * (2 * size) + size, up_sums)
    else:
        tl.store(partial_ptr + split * size, sums)
    # All threads of this program must store their sums before the counter is incremented.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def _sum_splits(
    partial_ptr, NUM_SPLITS: tl.constexpr, NUM_PLANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add up the sums of all parts of K, in a fixed order. NUM_PLANES: 2 if gated (gate and up), else 1."""
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        sums += tl.load(partial_ptr + split * (NUM_PLANES * BLOCK_M * BLOCK_N), cache_modifier=".cg")
    return sums


@triton.jit
def _add_bias(sums, bias_ptr, first_bias, num_columns, BLOCK_N: tl.constexpr, BIAS: tl.constexpr):
    """Add the bias of this tile's columns to `sums` [M, N]. first_bias: index of the bias of output column 0."""
    if BIAS:
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + first_bias + columns, mask=columns < num_columns, other=0.0)
        sums += bias[None, :].to(tl.float32)
    return sums


@triton.jit
def _store(sums, residual_ptr, residual_stride, out_ptr, rows, columns, num_columns, mask, RESIDUAL: tl.constexpr):
    """Write `sums` plus the residual into `out`."""
    if RESIDUAL:
        residual = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
        sums += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _project(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,  # sums per part of K: [tile, split, plane (gate or up), BLOCK_M, BLOCK_N]
    counter_ptr,  # number of finished parts of K, per tile
    num_rows,
    num_columns,
    x_stride,
    x_scales_stride,
    x_scales_group_stride,  # from one group of a row to the next
    scales_stride,
    residual_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED_TILES: tl.constexpr,
    TILE_SHARES_SCALE: tl.constexpr,
    SWAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum one of NUM_SPLITS parts of K for one tile. The last program to finish a tile writes the output."""
    groups_per_split: tl.constexpr = (GROUPS + NUM_SPLITS - 1) // NUM_SPLITS
    split = tl.program_id(2)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, wide_rows = rows < num_rows, rows.to(tl.int64)  # wide: 64 bits
    if OVERLAP:
        column_mask, wide_columns = columns < num_columns, columns.to(tl.int64)
        _prefetch_tiles(weight_ptr, wide_columns, column_mask, split * groups_per_split, K, GROUP, PREFETCHED_TILES)
        if GATED:
            _prefetch_tiles(
                weight_ptr,
                num_columns + wide_columns,
                column_mask,
                split * groups_per_split,
                K,
                GROUP,
                PREFETCHED_TILES,
            )
        gdc_wait()
    x_ptr += wide_rows[:, None] * x_stride
    x_scales_ptr += wide_rows * x_scales_stride
    sums = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    up_sums = tl.zeros_like(sums)
    for group in tl.range(
        split * groups_per_split, min(split * groups_per_split + groups_per_split, GROUPS), num_stages=STAGES
    ):
        ks = group * GROUP + tl.arange(0, GROUP)
        group_scales_ptr = x_scales_ptr + group * x_scales_group_stride
        values, x_scales = _load_rows(x_ptr, group_scales_ptr, ks, is_row, K, QUANTIZED)
        sums += _multiply(
            values,
            x_scales,
            weight_ptr,
            scales_ptr + group,
            scales_stride,
            0,
            num_columns,
            ks,
            K,
            ROWS_PER_SCALE,
            BLOCK_N,
            TILE_SHARES_SCALE,
            SWAP,
        )
        if GATED:
            up_sums += _multiply(
                values,
                x_scales,
                weight_ptr,
                scales_ptr + group,
                scales_stride,
                num_columns,
                num_columns,
                ks,
                K,
                ROWS_PER_SCALE,
                BLOCK_N,
                TILE_SHARES_SCALE,
                SWAP,
            )
    if SWAP:
        sums, up_sums = sums.T, up_sums.T
    if OVERLAP:
        gdc_launch_dependents()

    is_last = True
    num_planes: tl.constexpr = 2 if GATED else 1  # gate and up
    if NUM_SPLITS > 1:
        tile_index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tile_offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_ptr += tile_index.to(tl.int64) * (NUM_SPLITS * num_planes * BLOCK_M * BLOCK_N) + tile_offsets
        is_last = _store_split(partial_ptr, counter_ptr + tile_index, sums, up_sums, NUM_SPLITS, GATED)
    if is_last:
        if NUM_SPLITS > 1:
            sums = _sum_splits(partial_ptr, NUM_SPLITS, num_planes, BLOCK_M, BLOCK_N)
        sums = _add_bias(sums, bias_ptr, 0, num_columns, BLOCK_N, BIAS)
        if GATED:
            if NUM_SPLITS > 1:
                up_sums = _sum_splits(partial_ptr + BLOCK_M * BLOCK_N, NUM_SPLITS, num_planes, BLOCK_M, BLOCK_N)
            up_sums = _add_bias(up_sums, bias_ptr, num_columns, num_columns, BLOCK_N, BIAS)
            sums = sums * tl.sigmoid(sums) * up_sums
        mask = is_row[:, None] & (columns < num_columns)[None, :]
        _store(sums, residual_ptr, residual_stride, out_ptr, wide_rows, columns, num_columns, mask, RESIDUAL)
