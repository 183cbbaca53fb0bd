"""Runs block FP8 experts for one token on CUDA: matrix-vector products without tensor cores.

Each program computes a few columns, and loads as many groups of K at once as its registers hold. Tensor cores would use
only one of their 64 rows.

The sizes `k` and `top_k` are runtime values, so that ptxas can't prove that masked FP8 values are 0. With this proof,
ptxas 12.8 and 12.9 merge an uninitialised register into the packed word (F2FP.E4M3.PACK_AB_MERGE_C), which gives
garbage or NaN. ptxas 12.8 to 13.0 turn the upper half of such a word into 0x0008.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.experts import ChosenExperts, PackedExperts
from nanovllm_kernels.moe.policy import matvec_config
from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import quantize_groups


def run_experts(x: Tensor, experts: PackedExperts, chosen: ChosenExperts, residual: Tensor | None, out: Tensor) -> None:
    """See the package's `fused_experts`. Writes into `out` [1, H]."""
    top_k = chosen.ids.shape[1]
    _, hidden_size, intermediate_size = experts.w2.shape
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    hidden = torch.empty((top_k, intermediate_size), dtype=x.dtype, device=x.device)  # silu(gate) * up
    config = matvec_config(hidden_size, 2)  # 2: a gate row and an up row per column
    _gate_up[(triton.cdiv(intermediate_size, config.block_n), top_k)](
        x,
        experts.w13,
        experts.scales13,
        chosen.ids,
        hidden,
        hidden_size,
        N=intermediate_size,
        K=hidden_size,
        BLOCK_N=config.block_n,
        GROUPS=config.num_groups,  # groups of 128 along K that are loaded at once
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )
    padded_top_k = triton.next_power_of_2(top_k)
    config = matvec_config(intermediate_size, padded_top_k)
    _down[(triton.cdiv(hidden_size, config.block_n),)](
        hidden,
        experts.w2,
        experts.scales2,
        chosen.ids,
        chosen.weights,
        x if residual is None else residual,
        out,
        intermediate_size,
        top_k,
        N=hidden_size,
        K=intermediate_size,
        PADDED_TOP_K=padded_top_k,
        RESIDUAL=residual is not None,
        BLOCK_N=config.block_n,
        GROUPS=config.num_groups,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )


@triton.jit
def _quantize(x):
    """Quantise rows `x` [..., 128]. Returns the e4m3 values as float32, and scales [...]."""
    values, scales = quantize_groups(x.to(tl.float32), len(x.shape) - 1)
    return values.to(tl.float32), scales


@triton.jit
def _multiply_groups(
    x_ptr,
    weight_rows_ptr,  # pointers to the gate's rows [BLOCK_N, 1, 1]
    scales_ptr,
    columns,
    k,  # runtime value of K
    first_group: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Return each group's sums of products, for the gate and for the up projection: [BLOCK_N, GROUPS] each."""
    num_column_blocks: tl.constexpr = (N + 127) // 128
    num_depth_groups: tl.constexpr = (K + 127) // 128
    groups = first_group + tl.arange(0, GROUPS)
    ks = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    weight_mask = (columns < N)[:, None, None] & (ks < k)[None, :, :]
    # Issue the weight loads first: they take longest.
    gate = tl.load(weight_rows_ptr + ks[None, :, :], mask=weight_mask, other=0.0)
    up = tl.load(weight_rows_ptr + N * K + ks[None, :, :], mask=weight_mask, other=0.0)
    group_mask = groups * 128 < k
    gate_scales = tl.load(scales_ptr + groups, mask=group_mask, other=0.0)
    up_scales = tl.load(scales_ptr + num_column_blocks * num_depth_groups + groups, mask=group_mask, other=0.0)
    values, scales = _quantize(tl.load(x_ptr + ks, mask=ks < k, other=0.0))
    gates = tl.sum(gate.to(tl.float32) * values[None, :, :], 2) * (scales * gate_scales)[None, :]
    ups = tl.sum(up.to(tl.float32) * values[None, :, :], 2) * (scales * up_scales)[None, :]
    return gates, ups


@triton.jit
def _gate_up(
    x_ptr,
    weight_ptr,
    scales_ptr,
    ids_ptr,
    out_ptr,  # [top_k, N]
    k,  # runtime value of K
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a few columns of one expert's `silu(gate) * up`."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(1)  # index of an expert among the token's experts
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    first_column = tl.program_id(0) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    num_column_blocks: tl.constexpr = (N + 127) // 128
    num_depth_groups: tl.constexpr = (K + 127) // 128
    expert_scales_ptr = scales_ptr + (expert * 2 * num_column_blocks + first_column // 128) * num_depth_groups
    weight_rows_ptr = weight_ptr + (expert * 2 * N + columns)[:, None, None] * K
    num_whole_groups: tl.constexpr = num_depth_groups // GROUPS * GROUPS
    # Sum over groups only after the loop, because this sum synchronises all warps.
    gates = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    ups = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    for first_group in tl.static_range(0, num_whole_groups, GROUPS):
        step_gates, step_ups = _multiply_groups(
            x_ptr, weight_rows_ptr, expert_scales_ptr, columns, k, first_group, GROUPS, N, K
        )
        gates += step_gates
        ups += step_ups
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if num_whole_groups < num_depth_groups:
        num_last_groups: tl.constexpr = triton.next_power_of_2(num_depth_groups - num_whole_groups)
        gates, ups = _multiply_groups(
            x_ptr, weight_rows_ptr, expert_scales_ptr, columns, k, num_whole_groups, num_last_groups, N, K
        )
        gate += tl.sum(gates, 1)
        up += tl.sum(ups, 1)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + slot * N + columns, out.to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def _down(
    x_ptr,  # `hidden`
    weight_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    residual_ptr,
    out_ptr,
    k,  # runtime value of K
    top_k,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a few columns of the weighted sum over all chosen experts."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first_column = tl.program_id(0) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    num_column_blocks: tl.constexpr = (N + 127) // 128
    num_depth_groups: tl.constexpr = (K + 127) // 128
    slots = tl.arange(0, PADDED_TOP_K)
    slot_mask = slots < top_k
    experts = tl.load(ids_ptr + slots, mask=slot_mask, other=0).to(tl.int64)
    weights = tl.load(weights_ptr + slots, mask=slot_mask, other=0.0)
    expert_scales_ptr = scales_ptr + (experts * num_column_blocks + first_column // 128)[:, None] * num_depth_groups
    weight_rows_ptr = weight_ptr + (experts[:, None] * N + columns[None, :])[:, :, None, None] * K
    column_mask = slot_mask[:, None] & (columns < N)[None, :]
    sums = tl.zeros((PADDED_TOP_K, BLOCK_N), tl.float32)
    for first_group in tl.static_range(0, num_depth_groups, GROUPS):
        groups = first_group + tl.arange(0, min(GROUPS, triton.next_power_of_2(num_depth_groups - first_group)))
        ks = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        weight_mask = column_mask[:, :, None, None] & (ks < k)[None, None, :, :]
        tile = tl.load(weight_rows_ptr + ks[None, None, :, :], mask=weight_mask, other=0.0)
        group_mask = slot_mask[:, None] & (groups * 128 < k)[None, :]
        weight_scales = tl.load(expert_scales_ptr + groups[None, :], mask=group_mask, other=0.0)
        x_mask = slot_mask[:, None, None] & (ks < k)[None, :, :]
        x = tl.load(x_ptr + slots[:, None, None] * K + ks[None, :, :], mask=x_mask, other=0.0)
        values, scales = _quantize(x)
        scales *= weight_scales * weights[:, None]
        sums += tl.sum(tl.sum(tile.to(tl.float32) * values[:, None, :, :], 3) * scales[:, None, :], 2)
    total = tl.sum(sums, 0)
    if RESIDUAL:
        total += tl.load(residual_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < N)
