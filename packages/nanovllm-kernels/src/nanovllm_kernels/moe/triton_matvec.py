"""Block FP8 experts for one token on CUDA: matrix-vector products without tensor cores.

Each program loads a few columns over their whole depth, or as much as its threads hold, at once. Tensor-core tiles
would waste 63 of 64 rows and leave too few loads in flight. Sums are float32; no sum spans programs.

Weight loads need masks unknown at compile time, hence the runtime sizes `k` and `top_k`. If the compiler knows that
masked FP8 values are zero, ptxas 12.8 and 12.9 drop one of two equal conversions and merge an uninitialised register
into the word (F2FP.E4M3.PACK_AB_MERGE_C): garbage, possibly NaN, that a zero scale does not remove. ptxas 12.8 to 13.0
also turn the upper half of such a zero word into 0x0008.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.policy import one_config
from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import quantize_groups


def one_token(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    scales13: Tensor,
    scales2: Tensor,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Write into `out` [1, H] what the package's `fused_experts` returns."""
    top_k = ids.shape[1]
    _, hidden_size, width = w2.shape
    overlap = can_overlap_launches(x.device)
    hidden = torch.empty((top_k, width), dtype=x.dtype, device=x.device)
    config = one_config(hidden_size, 2)
    _one_gate_up[(triton.cdiv(width, config.block_n), top_k)](
        x,
        w13,
        scales13,
        ids,
        hidden,
        hidden_size,
        WIDTH=width,
        K=hidden_size,
        BLOCK_N=config.block_n,
        GROUPS=config.groups,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )
    padded_k = triton.next_power_of_2(top_k)
    config = one_config(width, padded_k)
    _one_down[(triton.cdiv(hidden_size, config.block_n),)](
        hidden,
        w2,
        scales2,
        ids,
        weights,
        x if residual is None else residual,
        out,
        width,
        top_k,
        WIDTH=hidden_size,
        K=width,
        PADDED_K=padded_k,
        RESIDUAL=residual is not None,
        BLOCK_N=config.block_n,
        GROUPS=config.groups,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )


@triton.jit
def _quantize(x):
    """Quantise x [..., 128], each row being one group: e4m3 values as float32, and scales [...]."""
    numbers, scales = quantize_groups(x.to(tl.float32), len(x.shape) - 1)
    return numbers.to(tl.float32), scales


@triton.jit
def _gates_and_ups(
    x_ptr,
    rows_ptr,
    scales_ptr,
    columns,
    k,
    first: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
):
    """Return sums [BLOCK_N, GROUPS] of the gate's and of the up projection's products, each over one group."""
    blocks: tl.constexpr = (WIDTH + 127) // 128
    depth: tl.constexpr = (K + 127) // 128
    groups = first + tl.arange(0, GROUPS)
    ks = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (columns < WIDTH)[:, None, None] & (ks < k)[None, :, :]
    # Issue the weight loads first: they take longest.
    gate = tl.load(rows_ptr + ks[None, :, :], mask=inside, other=0.0)
    up = tl.load(rows_ptr + WIDTH * K + ks[None, :, :], mask=inside, other=0.0)
    real = groups * 128 < k
    gate_scales = tl.load(scales_ptr + groups, mask=real, other=0.0)
    up_scales = tl.load(scales_ptr + blocks * depth + groups, mask=real, other=0.0)
    numbers, scales = _quantize(tl.load(x_ptr + ks, mask=ks < k, other=0.0))
    gates = tl.sum(gate.to(tl.float32) * numbers[None, :, :], 2) * (scales * gate_scales)[None, :]
    ups = tl.sum(up.to(tl.float32) * numbers[None, :, :], 2) * (scales * up_scales)[None, :]
    return gates, ups


@triton.jit
def _one_gate_up(
    x_ptr,
    weight_ptr,
    scales_ptr,
    ids_ptr,
    out_ptr,
    k,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a few columns of one expert's `silu(gate) * up`."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    begin = tl.program_id(0) * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    blocks: tl.constexpr = (WIDTH + 127) // 128
    depth: tl.constexpr = (K + 127) // 128
    own_scales_ptr = scales_ptr + (expert * 2 * blocks + begin // 128) * depth
    rows_ptr = weight_ptr + (expert * 2 * WIDTH + columns)[:, None, None] * K
    whole: tl.constexpr = depth // GROUPS * GROUPS
    # Reduced over groups only after the loop, because the reduction synchronises all warps.
    gates = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    ups = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    for first in tl.static_range(0, whole, GROUPS):
        more_gates, more_ups = _gates_and_ups(x_ptr, rows_ptr, own_scales_ptr, columns, k, first, GROUPS, WIDTH, K)
        gates += more_gates
        ups += more_ups
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if whole < depth:
        rest: tl.constexpr = triton.next_power_of_2(depth - whole)
        gates, ups = _gates_and_ups(x_ptr, rows_ptr, own_scales_ptr, columns, k, whole, rest, WIDTH, K)
        gate += tl.sum(gates, 1)
        up += tl.sum(ups, 1)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + slot * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)


@triton.jit
def _one_down(
    x_ptr,
    weight_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    residual_ptr,
    out_ptr,
    k,
    top_k,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a few columns of the weighted sum over all chosen experts."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    begin = tl.program_id(0) * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    blocks: tl.constexpr = (WIDTH + 127) // 128
    depth: tl.constexpr = (K + 127) // 128
    slots = tl.arange(0, PADDED_K)
    chosen = slots < top_k
    experts = tl.load(ids_ptr + slots, mask=chosen, other=0).to(tl.int64)
    weights = tl.load(weights_ptr + slots, mask=chosen, other=0.0)
    own_scales_ptr = scales_ptr + (experts * blocks + begin // 128)[:, None] * depth
    rows_ptr = weight_ptr + (experts[:, None] * WIDTH + columns[None, :])[:, :, None, None] * K
    here = chosen[:, None] & (columns < WIDTH)[None, :]
    sums = tl.zeros((PADDED_K, BLOCK_N), tl.float32)
    for first in tl.static_range(0, depth, GROUPS):
        groups = first + tl.arange(0, min(GROUPS, triton.next_power_of_2(depth - first)))
        ks = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = here[:, :, None, None] & (ks < k)[None, None, :, :]
        tile = tl.load(rows_ptr + ks[None, None, :, :], mask=inside, other=0.0)
        real = chosen[:, None] & (groups * 128 < k)[None, :]
        own_scales = tl.load(own_scales_ptr + groups[None, :], mask=real, other=0.0)
        known = chosen[:, None, None] & (ks < k)[None, :, :]
        x = tl.load(x_ptr + slots[:, None, None] * K + ks[None, :, :], mask=known, other=0.0)
        numbers, scales = _quantize(x)
        scales *= own_scales * weights[:, None]
        sums += tl.sum(tl.sum(tile.to(tl.float32) * numbers[:, None, :, :], 3) * scales[:, None, :], 2)
    total = tl.sum(sums, 0)
    if RESIDUAL:
        total += tl.load(residual_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=columns < WIDTH)
