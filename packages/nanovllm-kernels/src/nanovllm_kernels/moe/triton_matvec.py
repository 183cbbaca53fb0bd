"""Runs block FP8 experts for one token on CUDA: matrix-vector products without tensor cores.

Each program computes a few columns. Tensor cores would use only one of their 64 rows.

The sizes `k` and `top_k` are runtime values, so that ptxas can't prove that masked FP8 values are 0. With such a proof,
ptxas generates wrong code. Versions 12.8 and 12.9 merge an uninitialised register into the word that packs quantised
inputs (F2FP.E4M3.PACK_AB_MERGE_C). The results are then garbage or NaN. Versions 12.8 to 13.0 replace the upper half of
a word of weights by 0x0008.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.experts import ChosenExperts, PackedExperts
from nanovllm_kernels.moe.policy import matvec_config
from nanovllm_kernels.moe.triton_local_experts import to_local
from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import quantize_groups


def run_experts(x: Tensor, experts: PackedExperts, chosen: ChosenExperts, residual: Tensor | None, out: Tensor) -> None:
    """See the package's `fused_experts`. Writes into `out` [1, H]."""
    top_k = chosen.ids.shape[1]
    num_experts, hidden_size, intermediate_size = experts.w2.shape
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    local_options = {
        "first_id": experts.first_id,
        "num_experts": num_experts,
        "PARTIAL": experts.is_partial,  # other ranks have experts too
    }
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
        **local_options,
    )
    # A slot is one of the token's experts. A pass of `_down` computes the average number of slots per rank, rounded up
    # to a power of two.
    slots_per_pass = triton.next_power_of_2(triton.cdiv(top_k * num_experts, experts.num_all_experts))
    config = matvec_config(intermediate_size, slots_per_pass)
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
        PADDED_TOP_K=triton.next_power_of_2(top_k),
        SLOTS=slots_per_pass,
        RESIDUAL=residual is not None,
        BLOCK_N=config.block_n,
        GROUPS=config.num_groups,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
        **local_options,
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


@triton.jit(do_not_specialize=["first_id", "num_experts"])
def _gate_up(
    x_ptr,
    weight_ptr,
    scales_ptr,
    ids_ptr,
    out_ptr,  # [top_k, N]
    k,  # runtime value of K
    first_id,
    num_experts,
    PARTIAL: tl.constexpr,
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
    expert = tl.load(ids_ptr + slot)
    if PARTIAL:
        expert = to_local(expert, first_id, num_experts)
        if expert < 0:
            return
    expert = expert.to(tl.int64)
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
def _multiply_slots(
    x_ptr,  # `hidden`
    weight_ptr,
    scales_ptr,
    ids_ptr,
    routing_weights_ptr,
    slots,
    slot_mask,
    columns,
    k,  # runtime value of K
    first_id,
    PARTIAL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return a few columns of the weighted sum over the experts in `slots` [SLOTS]: [BLOCK_N]."""
    first_column = tl.program_id(0) * BLOCK_N
    num_column_blocks: tl.constexpr = (N + 127) // 128
    num_depth_groups: tl.constexpr = (K + 127) // 128
    experts = tl.load(ids_ptr + slots, mask=slot_mask, other=0)
    if PARTIAL:
        experts -= first_id
    experts = experts.to(tl.int64)
    weights = tl.load(routing_weights_ptr + slots, mask=slot_mask, other=0.0)
    expert_scales_ptr = scales_ptr + (experts * num_column_blocks + first_column // 128)[:, None] * num_depth_groups
    weight_rows_ptr = weight_ptr + (experts[:, None] * N + columns[None, :])[:, :, None, None] * K
    column_mask = slot_mask[:, None] & (columns < N)[None, :]
    sums = tl.zeros((SLOTS, BLOCK_N), tl.float32)
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
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["first_id", "num_experts"])
def _down(
    x_ptr,  # `hidden`
    weight_ptr,
    scales_ptr,
    ids_ptr,
    routing_weights_ptr,
    residual_ptr,
    out_ptr,
    k,  # runtime value of K
    top_k,
    first_id,
    num_experts,
    PARTIAL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a few columns of the weighted sum over this rank's chosen experts. A pass handles SLOTS experts."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pointers = (x_ptr, weight_ptr, scales_ptr, ids_ptr, routing_weights_ptr)
    slots = tl.arange(0, PADDED_TOP_K)
    slot_mask = slots < top_k
    if PARTIAL:
        ids = tl.load(ids_ptr + slots, mask=slot_mask, other=-1)
        is_local = to_local(ids, first_id, num_experts) >= 0
        num_local = tl.sum(is_local.to(tl.int32), 0)
        # Index of each local slot (of an expert on this rank) among the local slots.
        local_indices = tl.cumsum(is_local.to(tl.int32), 0) - 1
        total = tl.zeros((BLOCK_N,), tl.float32)
        for first_index in range(0, num_local, SLOTS):
            indices = first_index + tl.arange(0, SLOTS)
            is_found = is_local[None, :] & (local_indices[None, :] == indices[:, None])
            local_slots = tl.sum(tl.where(is_found, slots[None, :], 0), 1)
            total += _multiply_slots(
                *pointers, local_slots, indices < num_local, columns, k, first_id, True, N, K, SLOTS, BLOCK_N, GROUPS
            )
    else:
        total = _multiply_slots(*pointers, slots, slot_mask, columns, k, 0, False, N, K, SLOTS, BLOCK_N, GROUPS)
    if RESIDUAL:
        total += tl.load(residual_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < N)
