"""Multiplies tens or hundreds of rows by a weight with few columns on CUDA.

The product has fewer tiles than the GPU has SMs. To use more SMs, several CTAs share a tile, and each CTA sums over a
part of K. The last CTA to finish its part of a tile adds up the sums of all parts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.gemm.tiles import split_config
from nanovllm_kernels.platform import can_overlap_launches


def project_split_k(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, counters: Tensor, out: Tensor
) -> None:
    """Multiply `x` [M, K] by `weight` [N, K], add `bias` and `residual`, and write `out` [M, N]."""
    num_rows, depth = x.shape
    num_columns = out.shape[1]
    config = split_config(num_rows)
    row_tiles = triton.cdiv(num_rows, config.block_m)
    column_tiles = num_columns // config.block_n
    partial_sums = torch.empty(
        (row_tiles * column_tiles, config.num_splits, config.block_m, config.block_n),
        dtype=torch.float32,
        device=x.device,
    )
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    _project_split_k[(column_tiles, row_tiles, config.num_splits)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partial_sums,
        counters,
        num_rows,
        num_columns,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        K=depth,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NUM_SPLITS=config.num_splits,
        STAGES=config.num_stages,  # stages of the pipelined loop over K
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines at `pointers` into the L2 cache."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def _project_split_k(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,  # sums of each part of K: [tile, split, BLOCK_M, BLOCK_N]
    counter_ptr,  # number of finished parts of K, for each tile
    num_rows,
    num_columns,
    x_stride,
    residual_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum one of NUM_SPLITS parts of K for one tile. The last program to finish a tile writes the output."""
    split_depth: tl.constexpr = K // NUM_SPLITS  # size of a part of K
    line_elements: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    row_mask = (rows < num_rows)[:, None]
    wide_rows = rows[:, None].to(tl.int64)  # wide: 64 bits
    weight_ptr += columns[:, None].to(tl.int64) * K + split * split_depth
    if OVERLAP:
        if tl.program_id(1) == 0:
            for first_k in tl.static_range(0, split_depth, BLOCK_K):
                prefetch(weight_ptr + first_k + tl.arange(0, BLOCK_K // line_elements)[None, :] * line_elements)
        gdc_wait()
    ks = tl.arange(0, BLOCK_K)[None, :]
    weight_ptr += ks
    x_ptr += wide_rows * x_stride + split * split_depth + ks
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_k in tl.range(0, split_depth, BLOCK_K, num_stages=STAGES):
        tile = tl.load(x_ptr + first_k, mask=row_mask, other=0.0)
        sums = tl.dot(tile, tl.load(weight_ptr + first_k).T, sums)
    if OVERLAP:
        gdc_launch_dependents()

    tile_index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tile_offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    partial_ptr += tile_index.to(tl.int64) * (NUM_SPLITS * BLOCK_M * BLOCK_N) + tile_offsets
    tl.store(partial_ptr + split * (BLOCK_M * BLOCK_N), sums)
    # All threads of this program must store their sums before the counter is incremented.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + tile_index, 1, sem="acq_rel") == NUM_SPLITS - 1:
        tl.store(counter_ptr + tile_index, 0)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in tl.static_range(NUM_SPLITS):
            sums += tl.load(partial_ptr + part * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
        if BIAS:
            sums += tl.load(bias_ptr + columns)[None, :].to(tl.float32)
        if RESIDUAL:
            residual = tl.load(residual_ptr + wide_rows * residual_stride + columns[None, :], mask=row_mask, other=0.0)
            sums += residual.to(tl.float32)
        tl.store(out_ptr + wide_rows * num_columns + columns[None, :], sums.to(out_ptr.dtype.element_ty), mask=row_mask)
