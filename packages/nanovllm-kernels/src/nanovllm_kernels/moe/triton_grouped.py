"""Experts for many tokens on CUDA: pairs of a token and an expert sorted by expert, then two grouped products.

The grids depend on the number of tokens only, and persistent programs take one tile after another. Results are written
pair by pair; a separate kernel adds them up in a fixed order. For many rows per expert Hopper uses `gluon_grouped`.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.policy import (
    GROUP,
    SPECIALIZED_ROWS,
    GroupedConfig,
    grouped_config,
    specializes,
)
from nanovllm_kernels.moe.triton_sort import SortedPairs, sort_pairs
from nanovllm_kernels.moe.triton_tile_product import add_product, load_weight
from nanovllm_kernels.platform import can_overlap_launches, describe
from nanovllm_kernels.triton_fp8 import quantize_groups

SUM_BLOCK = 1024


def grouped_experts(
    x: Tensor,
    x_scales: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    scales13: Tensor | None,
    scales2: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
) -> None:
    """Write the result of the package's `fused_experts` into `out` [T, H].

    `x` is already quantised if weights are FP8. Each expert's result is rounded to `dtype` before it is added up.
    """
    num_tokens, top_k = ids.shape
    num_pairs = num_tokens * top_k
    num_experts, hidden_size, width = w2.shape
    overlap = can_overlap_launches(x.device)
    config = grouped_config(num_pairs, num_experts, wide=x.element_size() == 4, quantized=x_scales is not None)
    parts = torch.empty((num_pairs, hidden_size), dtype=dtype, device=x.device)
    specialized = (
        specializes(num_pairs, num_experts, hidden_size, width)
        and (x_scales is not None and parts.element_size() == 2)
        and describe(x.device).capability == (9, 0)
    )
    pairs = sort_pairs(ids, num_experts, SPECIALIZED_ROWS if specialized else config.block_m)
    if specialized:
        from nanovllm_kernels.moe import gluon_grouped

        gluon_grouped.multiply(x, x_scales, w13, w2, scales13, scales2, weights, pairs, parts)
    else:
        _multiply(x, x_scales, w13, w2, scales13, scales2, weights, pairs, parts, config)
    _sum_pairs[(num_tokens, triton.cdiv(hidden_size, SUM_BLOCK))](
        parts,
        parts if residual is None else residual,
        out,
        0 if residual is None else residual.stride(0),
        WIDTH=hidden_size,
        TOP_K=top_k,
        RESIDUAL=residual is not None,
        BLOCK=SUM_BLOCK,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


def _multiply(
    x: Tensor,
    x_scales: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    scales13: Tensor | None,
    scales2: Tensor | None,
    weights: Tensor,
    pairs: SortedPairs,
    parts: Tensor,
    config: GroupedConfig,
) -> None:
    """Write each pair's expert result times its weight into `parts` [T k, H]."""
    num_pairs, width = parts.shape[0], w2.shape[2]
    quantized = x_scales is not None
    overlap = can_overlap_launches(x.device)
    hidden = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    hidden_scales = torch.empty((num_pairs, triton.cdiv(width, GROUP)), dtype=torch.float32, device=x.device)
    # The interpreter reports zero SMs.
    programs = config.per_sm * max(1, describe(x.device).num_sms)
    products = (
        (True, x, x_scales, w13, scales13, hidden),
        (False, hidden, hidden_scales if quantized else None, w2, scales2, parts),
    )
    for gated, rows, row_scales, weight, scales, result in products:
        columns = result.shape[1]
        _grouped_product[(min(programs, (len(pairs.tiles) - 1) * triton.cdiv(columns, config.block_n)),)](
            rows,
            rows if row_scales is None else row_scales,
            weight,
            weight if scales is None else scales,
            *pairs,
            weights,
            result,
            hidden_scales,
            rows.stride(0),
            *((0, 0) if row_scales is None else row_scales.stride()),
            WIDTH=columns,
            K=rows.shape[1],
            TOP_K=weights.shape[1],
            GATED=gated,
            QUANTIZED=quantized,
            SWAPPED=config.swapped,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            STAGES=config.num_stages,
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
    order_ptr,
    starts_ptr,
    tiles_ptr,
    weights_ptr,
    out_ptr,
    out_scales_ptr,
    x_stride,
    x_scales_stride,
    x_scales_step,
    WIDTH: tl.constexpr,
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
    """GATED: `silu(gate) * up` of each pair's token, in sorted order. Otherwise: the weighted down product per pair."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    column_tiles: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    blocks: tl.constexpr = (WIDTH + 127) // 128
    depth: tl.constexpr = (K + 127) // 128
    halves: tl.constexpr = 2 if GATED else 1
    ks = tl.arange(0, BLOCK_K)[None, :]
    num_tiles = tl.load(tiles_ptr)
    for work in tl.range(tl.program_id(0), num_tiles * column_tiles, tl.num_programs(0)):
        entry_ptr = tiles_ptr + 2 * (1 + work // column_tiles)
        expert = tl.load(entry_ptr).to(tl.int64)
        places = tl.load(entry_ptr + 1) + tl.arange(0, BLOCK_M)
        inside = places < tl.load(starts_ptr + expert + 1)
        pairs = tl.load(order_ptr + places, mask=inside, other=0).to(tl.int64)
        rows = pairs // TOP_K if GATED else places.to(tl.int64)
        begin = (work % column_tiles) * BLOCK_N
        columns = begin + tl.arange(0, BLOCK_N)
        own_scales_ptr = scales_ptr + (expert * halves * blocks + begin // 128) * depth
        own_weight_ptr = weight_ptr + expert * halves * WIDTH * K
        if SWAPPED:
            sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptr + rows[:, None] * x_stride + k + ks, mask=inside[:, None] & (k + ks < K), other=0.0)
            scale = 1.0
            up_scale = 1.0
            if QUANTIZED:
                own_row_scales = x_scales_ptr + rows * x_scales_stride + (k // 128) * x_scales_step
                row_scale = tl.load(own_row_scales, mask=inside, other=0.0)
                scale = row_scale * tl.load(own_scales_ptr + k // 128)
                if GATED:
                    up_scale = row_scale * tl.load(own_scales_ptr + blocks * depth + k // 128)
            tile = load_weight(own_weight_ptr, columns, k + ks, WIDTH, K)
            sums = add_product(sums, x, tile, scale, QUANTIZED, SWAPPED)
            if GATED:
                tile = load_weight(own_weight_ptr + WIDTH * K, columns, k + ks, WIDTH, K)
                up = add_product(up, x, tile, up_scale, QUANTIZED, SWAPPED)
        if GATED:
            sums = sums * tl.sigmoid(sums) * up
        result = sums.T if SWAPPED else sums
        mask = inside[:, None] & (columns < WIDTH)[None, :]
        if GATED:
            if QUANTIZED:
                result, out_scale = quantize_groups(tl.where(mask, result, 0.0), 1)
                tl.store(out_scales_ptr + places.to(tl.int64) * blocks + begin // 128, out_scale, mask=inside)
            at = out_ptr + places[:, None].to(tl.int64) * WIDTH + columns[None, :]
        else:
            result *= tl.load(weights_ptr + pairs, mask=inside, other=0.0)[:, None]
            at = out_ptr + pairs[:, None] * WIDTH + columns[None, :]
        tl.store(at, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_pairs(
    parts_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (token * TOP_K + slot) * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + token * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
