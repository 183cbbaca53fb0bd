"""Runs experts for few tokens on CUDA, without sorting the (token, expert) pairs by expert.

A program computes a tile of columns of one expert for all tokens, with zeros for tokens that did not choose the expert.
The extra products cost nothing, because the loads of weights take longer. For each tile of columns, the last program to
finish adds up the results of all experts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.experts import ChosenExperts, PackedExperts
from nanovllm_kernels.moe.policy import unsorted_config
from nanovllm_kernels.moe.triton_local_experts import to_local
from nanovllm_kernels.moe.triton_tile_product import add_product, load_weight
from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import quantize_groups


def run_experts(x: Tensor, experts: PackedExperts, chosen: ChosenExperts, residual: Tensor | None, out: Tensor) -> None:
    """See the package's `fused_experts`. Writes into `out` [T, H]."""
    w13, w2, scales13, scales2, counters, first_id, num_all_experts = experts
    num_tokens, top_k = chosen.ids.shape
    num_experts, hidden_size, intermediate_size = w2.shape
    grid_by_expert = num_tokens * top_k > num_experts  # one program per expert; if False, one per (token, expert) pair
    num_expert_programs = min(num_tokens * top_k, num_experts)
    # Expected number of programs whose expert belongs to this rank.
    num_busy_programs = max(1, min(num_tokens * top_k, num_all_experts) * num_experts // num_all_experts)
    quantized = scales13 is not None
    num_rows = max(16, triton.next_power_of_2(num_tokens))  # padded number of tokens
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    hidden = torch.empty((num_tokens * top_k, intermediate_size), dtype=x.dtype, device=x.device)  # silu(gate) * up
    pair_results = torch.empty((num_tokens * top_k, hidden_size), dtype=torch.float32, device=x.device)
    launch_options = {
        "first_id": first_id,
        "num_experts": num_experts,
        "PARTIAL": experts.is_partial,  # other ranks have experts too
        "TOP_K": top_k,
        "PADDED_TOP_K": triton.next_power_of_2(top_k),
        "ROWS": num_rows,
        "GRID_BY_EXPERT": grid_by_expert,
        "QUANTIZED": quantized,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
    }
    is_float32 = x.element_size() == 4
    config = unsorted_config(
        num_rows, num_busy_programs, intermediate_size, hidden_size, is_float32=is_float32, is_block_fp8=quantized
    )
    _gate_up[(triton.cdiv(intermediate_size, config.block_n), num_expert_programs)](
        x,
        w13,
        w13 if scales13 is None else scales13,
        chosen.ids,
        hidden,
        num_tokens,
        x.stride(0),
        N=intermediate_size,
        K=hidden_size,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SWAPPED=config.swapped,  # the weight is the left operand
        STAGES=config.num_stages,  # stages of the pipelined loop over K
        num_warps=config.num_warps,
        **launch_options,
    )
    config = unsorted_config(
        num_rows, num_busy_programs, hidden_size, intermediate_size, is_float32=is_float32, is_block_fp8=quantized
    )
    _down[(triton.cdiv(hidden_size, config.block_n), num_expert_programs)](
        hidden,
        w2,
        w2 if scales2 is None else scales2,
        chosen.ids,
        chosen.weights,
        x if residual is None else residual,
        out,
        pair_results,
        counters,
        num_tokens,
        0 if residual is None else residual.stride(0),
        N=hidden_size,
        K=intermediate_size,
        RESIDUAL=residual is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SWAPPED=config.swapped,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **launch_options,
    )


@triton.jit
def _find_expert(
    ids_ptr,
    num_tokens,
    first_id,
    num_experts,
    PARTIAL: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    GRID_BY_EXPERT: tl.constexpr,
):
    """Find the expert of this program.

    Returns: (expert, chosen_slots, is_owner).
        expert: index of the expert among this rank's experts, if this program computes the expert.
        chosen_slots: [ROWS], index of the expert among each token's experts; at least TOP_K if the token did not choose
            the expert.
        is_owner: whether this program computes the expert. If several programs have the same expert, the program of
            the expert's first pair is the owner. No program computes an expert of another rank.
    """
    program = tl.program_id(1)
    tokens = tl.arange(0, ROWS)[:, None]
    slots = tl.arange(0, PADDED_TOP_K)[None, :]
    pairs = tokens * TOP_K + slots
    ids = tl.load(ids_ptr + pairs, mask=(tokens < num_tokens) & (slots < TOP_K), other=-1)
    expert = program
    if not GRID_BY_EXPERT:
        expert = tl.load(ids_ptr + program)
    elif PARTIAL:
        expert += first_id
    is_chosen = ids == expert
    chosen_slots = tl.min(tl.where(is_chosen, slots, PADDED_TOP_K), 1)
    is_owner = tl.min(chosen_slots, 0) < TOP_K
    if not GRID_BY_EXPERT:
        is_owner = tl.min(tl.min(tl.where(is_chosen, pairs, ROWS * PADDED_TOP_K), 1), 0) == program
    if PARTIAL:
        expert = to_local(expert, first_id, num_experts)
        is_owner = is_owner & (expert >= 0)
    return expert.to(tl.int64), chosen_slots, is_owner


@triton.jit(do_not_specialize=["num_tokens", "first_id", "num_experts"])
def _gate_up(
    x_ptr,
    weight_ptr,
    scales_ptr,
    ids_ptr,
    out_ptr,  # `hidden`
    num_tokens,
    x_stride,
    first_id,
    num_experts,
    PARTIAL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    GRID_BY_EXPERT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert, chosen_slots, is_owner = _find_expert(
        ids_ptr, num_tokens, first_id, num_experts, PARTIAL, TOP_K, PADDED_TOP_K, ROWS, GRID_BY_EXPERT
    )
    if is_owner:
        tokens = tl.arange(0, ROWS).to(tl.int64)
        row_mask = chosen_slots < TOP_K
        first_column = tl.program_id(0) * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        ks = tl.arange(0, BLOCK_K)[None, :]
        num_column_blocks: tl.constexpr = (N + 127) // 128
        num_depth_groups: tl.constexpr = (K + 127) // 128
        expert_scales_ptr = scales_ptr + (expert * 2 * num_column_blocks + first_column // 128) * num_depth_groups
        expert_weight_ptr = weight_ptr + expert * 2 * N * K
        rows_ptr = x_ptr + tokens[:, None] * x_stride + ks
        gate = tl.zeros((BLOCK_N, ROWS) if SWAPPED else (ROWS, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_N, ROWS) if SWAPPED else (ROWS, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = tl.load(rows_ptr + k, mask=row_mask[:, None] & (k + ks < K), other=0.0)
            gate_tile = load_weight(expert_weight_ptr, columns, k + ks, N, K)
            up_tile = load_weight(expert_weight_ptr + N * K, columns, k + ks, N, K)
            if QUANTIZED:
                values, scale = quantize_groups(x.to(tl.float32), 1)
                gate_scale = scale * tl.load(expert_scales_ptr + k // 128)
                up_scale = scale * tl.load(expert_scales_ptr + num_column_blocks * num_depth_groups + k // 128)
                gate = add_product(gate, values, gate_tile, gate_scale, True, SWAPPED)
                up = add_product(up, values, up_tile, up_scale, True, SWAPPED)
            else:
                gate = add_product(gate, x, gate_tile, 1.0, False, SWAPPED)
                up = add_product(up, x, up_tile, 1.0, False, SWAPPED)
        hidden = gate * tl.sigmoid(gate) * up
        out = hidden.T if SWAPPED else hidden
        out_ptrs = out_ptr + (tokens * TOP_K + chosen_slots)[:, None] * N + columns[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "first_id", "num_experts"])
def _down(
    x_ptr,  # `hidden`
    weight_ptr,
    scales_ptr,
    ids_ptr,
    routing_weights_ptr,
    residual_ptr,
    out_ptr,
    pair_results_ptr,  # not multiplied by the routing weights yet
    counter_ptr,  # number of finished programs per column tile
    num_tokens,
    residual_stride,
    first_id,
    num_experts,
    PARTIAL: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    GRID_BY_EXPERT: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert, chosen_slots, is_owner = _find_expert(
        ids_ptr, num_tokens, first_id, num_experts, PARTIAL, TOP_K, PADDED_TOP_K, ROWS, GRID_BY_EXPERT
    )
    tokens = tl.arange(0, ROWS).to(tl.int64)
    first_column = tl.program_id(0) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    column_mask = (columns < N)[None, :]
    if is_owner:
        pairs = (tokens * TOP_K + chosen_slots)[:, None]
        row_mask = (chosen_slots < TOP_K)[:, None]
        ks = tl.arange(0, BLOCK_K)[None, :]
        num_depth_groups: tl.constexpr = (K + 127) // 128
        expert_scales_ptr = scales_ptr + (expert * ((N + 127) // 128) + first_column // 128) * num_depth_groups
        expert_weight_ptr = weight_ptr + expert * N * K
        sums = tl.zeros((BLOCK_N, ROWS) if SWAPPED else (ROWS, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptr + pairs * K + k + ks, mask=row_mask & (k + ks < K), other=0.0)
            tile = load_weight(expert_weight_ptr, columns, k + ks, N, K)
            if QUANTIZED:
                values, scale = quantize_groups(x.to(tl.float32), 1)
                sums = add_product(sums, values, tile, scale * tl.load(expert_scales_ptr + k // 128), True, SWAPPED)
            else:
                sums = add_product(sums, x, tile, 1.0, False, SWAPPED)
        result = sums.T if SWAPPED else sums
        tl.store(pair_results_ptr + pairs * N + columns[None, :], result, mask=row_mask & column_mask)
    # All threads of this program must store their sums before the counter is incremented.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + tl.program_id(0), 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(counter_ptr + tl.program_id(0), 0)
        mask = (tokens < num_tokens)[:, None] & column_mask
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for slot in tl.static_range(TOP_K):
            pairs = tokens * TOP_K + slot
            pair_mask = tokens < num_tokens
            if PARTIAL:
                ids = tl.load(ids_ptr + pairs, mask=pair_mask, other=-1)
                pair_mask = to_local(ids, first_id, num_experts) >= 0
            weight = tl.load(routing_weights_ptr + pairs, mask=pair_mask, other=0.0)
            pair_result_ptrs = pair_results_ptr + pairs[:, None] * N + columns[None, :]
            pair_result_mask = pair_mask[:, None] & column_mask
            total += weight[:, None] * tl.load(pair_result_ptrs, mask=pair_result_mask, other=0.0, cache_modifier=".cg")
        if RESIDUAL:
            residual_ptrs = residual_ptr + tokens[:, None] * residual_stride + columns[None, :]
            total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + tokens[:, None] * N + columns[None, :], out, mask=mask)
