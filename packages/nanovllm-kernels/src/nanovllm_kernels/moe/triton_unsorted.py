"""Experts for few tokens on CUDA: pairs are not sorted, and each chosen expert is read once.

A program computes some columns of one expert for all tokens. Rows of tokens that did not choose the expert are zero:
the time to load the weights dominates. The grid depends on the number of tokens only; programs whose expert belongs to
an earlier pair exit. The last program of a column tile adds up the experts' results in a fixed order.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.policy import few_config
from nanovllm_kernels.moe.triton_tile_product import add_product, load_weight
from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import quantize_groups


def few_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    scales13: Tensor | None,
    scales2: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None,
    counters: Tensor,
    out: Tensor,
) -> None:
    """Write into `out` [T, H] what the package's `fused_experts` returns."""
    num_tokens, top_k = ids.shape
    num_experts, hidden_size, width = w2.shape
    by_expert = num_tokens * top_k > num_experts
    num_groups = min(num_tokens * top_k, num_experts)
    quantized = scales13 is not None
    rows = max(16, triton.next_power_of_2(num_tokens))
    overlap = can_overlap_launches(x.device)
    hidden = torch.empty((num_tokens * top_k, width), dtype=x.dtype, device=x.device)
    partial = torch.empty((num_tokens * top_k, hidden_size), dtype=torch.float32, device=x.device)
    shared = {
        "TOP_K": top_k,
        "PADDED_K": triton.next_power_of_2(top_k),
        "ROWS": rows,
        "BY_EXPERT": by_expert,
        "QUANTIZED": quantized,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
    }
    wide = x.element_size() == 4
    config = few_config(rows, num_groups, width, hidden_size, wide=wide, quantized=quantized)
    _few_gate_up[(triton.cdiv(width, config.block_n), num_groups)](
        x,
        w13,
        w13 if scales13 is None else scales13,
        ids,
        hidden,
        num_tokens,
        x.stride(0),
        WIDTH=width,
        K=hidden_size,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SWAPPED=config.swapped,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **shared,
    )
    config = few_config(rows, num_groups, hidden_size, width, wide=wide, quantized=quantized)
    _few_down[(triton.cdiv(hidden_size, config.block_n), num_groups)](
        hidden,
        w2,
        w2 if scales2 is None else scales2,
        ids,
        weights,
        x if residual is None else residual,
        out,
        partial,
        counters,
        num_tokens,
        0 if residual is None else residual.stride(0),
        WIDTH=hidden_size,
        K=width,
        RESIDUAL=residual is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SWAPPED=config.swapped,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **shared,
    )


@triton.jit
def _claim(
    ids_ptr, num_tokens, TOP_K: tl.constexpr, PADDED_K: tl.constexpr, ROWS: tl.constexpr, BY_EXPERT: tl.constexpr
):
    """Return this program's expert, the slot in which each token chose it (TOP_K or more: not chosen), and whether
    this program computes it: some token chose it, and no program of an earlier pair has it.
    """
    group = tl.program_id(1)
    tokens = tl.arange(0, ROWS)[:, None]
    slots = tl.arange(0, PADDED_K)[None, :]
    pairs = tokens * TOP_K + slots
    ids = tl.load(ids_ptr + pairs, mask=(tokens < num_tokens) & (slots < TOP_K), other=-1)
    expert = group
    if not BY_EXPERT:
        expert = tl.load(ids_ptr + group)
    chosen = ids == expert
    places = tl.min(tl.where(chosen, slots, PADDED_K), 1)
    is_owner = tl.min(places, 0) < TOP_K
    if not BY_EXPERT:
        is_owner = tl.min(tl.min(tl.where(chosen, pairs, ROWS * PADDED_K), 1), 0) == group
    return expert.to(tl.int64), places, is_owner


@triton.jit(do_not_specialize=["num_tokens"])
def _few_gate_up(
    x_ptr,
    weight_ptr,
    scales_ptr,
    ids_ptr,
    out_ptr,
    num_tokens,
    x_stride,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    ROWS: tl.constexpr,
    BY_EXPERT: tl.constexpr,
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
    expert, places, is_owner = _claim(ids_ptr, num_tokens, TOP_K, PADDED_K, ROWS, BY_EXPERT)
    if is_owner:
        tokens = tl.arange(0, ROWS).to(tl.int64)
        inside = places < TOP_K
        begin = tl.program_id(0) * BLOCK_N
        columns = begin + tl.arange(0, BLOCK_N)
        ks = tl.arange(0, BLOCK_K)[None, :]
        blocks: tl.constexpr = (WIDTH + 127) // 128
        depth: tl.constexpr = (K + 127) // 128
        own_scales_ptr = scales_ptr + (expert * 2 * blocks + begin // 128) * depth
        own_weight_ptr = weight_ptr + expert * 2 * WIDTH * K
        rows_ptr = x_ptr + tokens[:, None] * x_stride + ks
        gate = tl.zeros((BLOCK_N, ROWS) if SWAPPED else (ROWS, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_N, ROWS) if SWAPPED else (ROWS, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = tl.load(rows_ptr + k, mask=inside[:, None] & (k + ks < K), other=0.0)
            gate_tile = load_weight(own_weight_ptr, columns, k + ks, WIDTH, K)
            up_tile = load_weight(own_weight_ptr + WIDTH * K, columns, k + ks, WIDTH, K)
            if QUANTIZED:
                numbers, scale = quantize_groups(x.to(tl.float32), 1)
                gate_scale = scale * tl.load(own_scales_ptr + k // 128)
                up_scale = scale * tl.load(own_scales_ptr + blocks * depth + k // 128)
                gate = add_product(gate, numbers, gate_tile, gate_scale, True, SWAPPED)
                up = add_product(up, numbers, up_tile, up_scale, True, SWAPPED)
            else:
                gate = add_product(gate, x, gate_tile, 1.0, False, SWAPPED)
                up = add_product(up, x, up_tile, 1.0, False, SWAPPED)
        gated = gate * tl.sigmoid(gate) * up
        out = gated.T if SWAPPED else gated
        at = out_ptr + (tokens * TOP_K + places)[:, None] * WIDTH + columns[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _few_down(
    x_ptr,
    weight_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    num_tokens,
    residual_stride,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    ROWS: tl.constexpr,
    BY_EXPERT: tl.constexpr,
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
    expert, places, is_owner = _claim(ids_ptr, num_tokens, TOP_K, PADDED_K, ROWS, BY_EXPERT)
    tokens = tl.arange(0, ROWS).to(tl.int64)
    begin = tl.program_id(0) * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    real = (columns < WIDTH)[None, :]
    if is_owner:
        pairs = (tokens * TOP_K + places)[:, None]
        inside = (places < TOP_K)[:, None]
        ks = tl.arange(0, BLOCK_K)[None, :]
        depth: tl.constexpr = (K + 127) // 128
        own_scales_ptr = scales_ptr + (expert * ((WIDTH + 127) // 128) + begin // 128) * depth
        own_weight_ptr = weight_ptr + expert * WIDTH * K
        sums = tl.zeros((BLOCK_N, ROWS) if SWAPPED else (ROWS, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_ptr + pairs * K + k + ks, mask=inside & (k + ks < K), other=0.0)
            tile = load_weight(own_weight_ptr, columns, k + ks, WIDTH, K)
            if QUANTIZED:
                numbers, scale = quantize_groups(x.to(tl.float32), 1)
                sums = add_product(sums, numbers, tile, scale * tl.load(own_scales_ptr + k // 128), True, SWAPPED)
            else:
                sums = add_product(sums, x, tile, 1.0, False, SWAPPED)
        result = sums.T if SWAPPED else sums
        tl.store(partial_ptr + pairs * WIDTH + columns[None, :], result, mask=inside & real)
    # All threads of this program must have stored their sums before the counter is raised.
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + tl.program_id(0), 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(counter_ptr + tl.program_id(0), 0)
        mask = (tokens < num_tokens)[:, None] & real
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for slot in tl.static_range(TOP_K):
            own = tokens * TOP_K + slot
            weight = tl.load(weights_ptr + own, mask=tokens < num_tokens, other=0.0)
            at = partial_ptr + own[:, None] * WIDTH + columns[None, :]
            total += weight[:, None] * tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        if RESIDUAL:
            added = residual_ptr + tokens[:, None] * residual_stride + columns[None, :]
            total += tl.load(added, mask=mask, other=0.0).to(tl.float32)
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + tokens[:, None] * WIDTH + columns[None, :], out, mask=mask)
