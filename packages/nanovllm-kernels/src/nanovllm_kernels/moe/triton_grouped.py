"""Runs experts for many tokens on CUDA: sorts (token, expert) pairs by expert, and runs two grouped products.

Persistent programs process one tile after another. A separate kernel adds up the pairs' results in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.gemm import block_fp8
from nanovllm_kernels.moe.experts import ChosenExperts, PackedExperts
from nanovllm_kernels.moe.policy import GLUON_TILE_ROWS, GROUP, GroupedConfig, grouped_config
from nanovllm_kernels.moe.triton_local_experts import to_local
from nanovllm_kernels.moe.triton_sort import SortedPairs, sort_pairs
from nanovllm_kernels.moe.triton_tile_product import add_product, load_weight
from nanovllm_kernels.platform import can_overlap_launches, describe_device
from nanovllm_kernels.triton_fp8 import quantize_groups

SUM_BLOCK_COLUMNS = 1024  # columns that a program of `_sum_pairs` adds up


def run_experts(
    x: Tensor,
    experts: PackedExperts,
    chosen: ChosenExperts,
    residual: Tensor | None,
    out: Tensor,
    *,
    uses_gluon: bool,
) -> None:
    """See the package's `fused_experts`. Writes into `out` [T, H]. uses_gluon: whether to use `gluon_grouped`."""
    num_tokens, top_k = chosen.ids.shape
    num_experts, hidden_size, _ = experts.w2.shape
    first_id = experts.first_id if experts.is_partial else None
    is_block_fp8 = experts.scales13 is not None
    pair_results = torch.empty((num_tokens * top_k, hidden_size), dtype=x.dtype, device=x.device)
    rows, row_scales = block_fp8.quantize_groups(x) if is_block_fp8 else (x, None)
    if uses_gluon:
        from nanovllm_kernels.moe import gluon_grouped

        pairs = sort_pairs(chosen.ids, num_experts, GLUON_TILE_ROWS, first_id)
        gluon_grouped.run_products(rows, row_scales, experts, chosen.weights, pairs, pair_results)
    else:
        is_float32 = x.element_size() == 4 and not is_block_fp8
        config = grouped_config(
            len(pair_results), experts.num_all_experts, is_float32=is_float32, is_block_fp8=is_block_fp8
        )
        pairs = sort_pairs(chosen.ids, num_experts, config.block_m, first_id)
        _run_products(rows, row_scales, experts, chosen.weights, pairs, pair_results, config)
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    _sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK_COLUMNS))](
        pair_results,
        pair_results if residual is None else residual,
        out,
        0 if residual is None else residual.stride(0),
        chosen.ids,
        experts.first_id,
        num_experts,
        N=hidden_size,
        TOP_K=top_k,
        PARTIAL=experts.is_partial,  # other ranks have experts too
        RESIDUAL=residual is not None,
        BLOCK=SUM_BLOCK_COLUMNS,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


def _run_products(
    x: Tensor,
    x_scales: Tensor | None,
    experts: PackedExperts,
    pair_weights: Tensor,
    pairs: SortedPairs,
    pair_results: Tensor,
    config: GroupedConfig,
) -> None:
    """For each of `pairs`, write the expert's result times the pair's routing weight to `pair_results` [T k, H]."""
    num_pairs, intermediate_size = pair_results.shape[0], experts.w2.shape[2]
    quantized = x_scales is not None
    overlap = can_overlap_launches(x.device)
    hidden = torch.empty((num_pairs, intermediate_size), dtype=x.dtype, device=x.device)  # silu(gate) * up
    hidden_scales = torch.empty(
        (num_pairs, triton.cdiv(intermediate_size, GROUP)), dtype=torch.float32, device=x.device
    )
    # The interpreter reports zero SMs.
    num_programs = config.programs_per_sm * max(1, describe_device(x.device).num_sms)
    products = (
        (True, x, x_scales, experts.w13, experts.scales13, hidden),
        (False, hidden, hidden_scales if quantized else None, experts.w2, experts.scales2, pair_results),
    )
    for gated, rows, row_scales, weight, scales, result in products:
        num_columns = result.shape[1]
        _grouped_product[(min(num_programs, (len(pairs.tiles) - 1) * triton.cdiv(num_columns, config.block_n)),)](
            rows,
            rows if row_scales is None else row_scales,
            weight,
            weight if scales is None else scales,
            *pairs,
            pair_weights,
            result,
            hidden_scales,
            rows.stride(0),
            *((0, 0) if row_scales is None else row_scales.stride()),
            N=num_columns,
            K=rows.shape[1],
            TOP_K=pair_weights.shape[1],
            GATED=gated,
            QUANTIZED=quantized,
            SWAPPED=config.swapped,  # the weight is the left operand
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            STAGES=config.num_stages,  # stages of the pipelined loop over K
            OVERLAP=overlap,
            num_warps=config.num_warps,
            launch_pdl=overlap,
        )


@triton.jit
def _grouped_product(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    order_ptr,  # `order_ptr`, `starts_ptr` and `tiles_ptr`: fields of `SortedPairs`
    starts_ptr,
    tiles_ptr,
    pair_weights_ptr,
    out_ptr,
    out_scales_ptr,
    x_stride,
    x_scales_stride,
    x_scales_group_stride,  # between the scales of a row's adjacent groups (of 128 elements)
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute `silu(gate) * up` in sorted order if GATED, else each pair's down projection times the pair's weight."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # The weight has one scale per 128 x 128 block.
    num_column_blocks: tl.constexpr = (N + 127) // 128
    num_depth_groups: tl.constexpr = (K + 127) // 128
    num_halves: tl.constexpr = 2 if GATED else 1  # gate and up
    ks = tl.arange(0, BLOCK_K)[None, :]
    num_tiles = tl.load(tiles_ptr)
    for work_item in tl.range(tl.program_id(0), num_tiles * column_tiles, tl.num_programs(0)):
        tile_ptr = tiles_ptr + 2 * (1 + work_item // column_tiles)
        expert = tl.load(tile_ptr).to(tl.int64)
        sorted_rows = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
        row_mask = sorted_rows < tl.load(starts_ptr + expert + 1)
        pairs = tl.load(order_ptr + sorted_rows, mask=row_mask, other=0).to(tl.int64)
        rows = pairs // TOP_K if GATED else sorted_rows.to(tl.int64)
        first_column = (work_item % column_tiles) * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        expert_scales_ptr = (
            scales_ptr + (expert * num_halves * num_column_blocks + first_column // 128) * num_depth_groups
        )
        expert_weight_ptr = weight_ptr + expert * num_halves * N * K
        if SWAPPED:
            sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            up_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptr + rows[:, None] * x_stride + k + ks, mask=row_mask[:, None] & (k + ks < K), other=0.0)
            scale = 1.0
            up_scale = 1.0
            if QUANTIZED:
                row_scale_ptrs = x_scales_ptr + rows * x_scales_stride + (k // 128) * x_scales_group_stride
                row_scale = tl.load(row_scale_ptrs, mask=row_mask, other=0.0)
                scale = row_scale * tl.load(expert_scales_ptr + k // 128)
                if GATED:
                    up_scale = row_scale * tl.load(expert_scales_ptr + num_column_blocks * num_depth_groups + k // 128)
            tile = load_weight(expert_weight_ptr, columns, k + ks, N, K)
            sums = add_product(sums, x, tile, scale, QUANTIZED, SWAPPED)
            if GATED:
                tile = load_weight(expert_weight_ptr + N * K, columns, k + ks, N, K)
                up_sums = add_product(up_sums, x, tile, up_scale, QUANTIZED, SWAPPED)
        if GATED:
            sums = sums * tl.sigmoid(sums) * up_sums
        result = sums.T if SWAPPED else sums
        mask = row_mask[:, None] & (columns < N)[None, :]
        if GATED:
            if QUANTIZED:
                result, out_scale = quantize_groups(tl.where(mask, result, 0.0), 1)
                out_scale_ptrs = out_scales_ptr + sorted_rows.to(tl.int64) * num_column_blocks + first_column // 128
                tl.store(out_scale_ptrs, out_scale, mask=row_mask)
            out_ptrs = out_ptr + sorted_rows[:, None].to(tl.int64) * N + columns[None, :]
        else:
            result *= tl.load(pair_weights_ptr + pairs, mask=row_mask, other=0.0)[:, None]
            out_ptrs = out_ptr + pairs[:, None] * N + columns[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_id", "num_experts"])
def _sum_pairs(
    pair_results_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    ids_ptr,
    first_id,
    num_experts,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTIAL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the results of one token's pairs on this rank, and the token's residual, for BLOCK columns."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):  # slot: index of an expert among the token's experts
        pair = token * TOP_K + slot
        pair_mask = mask
        if PARTIAL:
            pair_mask = mask & (to_local(tl.load(ids_ptr + pair), first_id, num_experts) >= 0)
        total += tl.load(pair_results_ptr + pair * N + columns, mask=pair_mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + token * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
