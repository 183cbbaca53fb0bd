"""Mixtures of experts: `route` chooses each token's experts; `fused_experts` runs SwiGLU experts and sums the results.

On CUDA nothing waits for the device, and no launch depends on which experts were chosen. `policy` chooses the kernel by
the numbers of tokens and experts. A CPU runs `reference`.
"""

from dataclasses import astuple

import torch
from torch import Tensor

from nanovllm_kernels.moe import policy, reference
from nanovllm_kernels.moe.experts import ChosenExperts, PackedExperts, Routing

__all__ = ["ChosenExperts", "PackedExperts", "Routing", "fused_experts", "pack_experts", "route"]


def pack_experts(
    w13: Tensor, w2: Tensor, scales13: Tensor | None = None, scales2: Tensor | None = None
) -> PackedExperts:
    """Prepare experts for `fused_experts`, without a copy.

    w13: [E, 2 I, H], contiguous; for each expert the gate's I rows, then the up projection's I rows.
    w2: [E, H, I], contiguous; the down projection.
    scales13: for float8_e4m3fn weights, float32 [E, 2, ceil(I / 128), ceil(H / 128)], contiguous, one per 128 x 128
        block. The up projection's blocks start at its own first row. None: weights are not FP8.
    scales2: likewise, float32 [E, ceil(H / 128), ceil(I / 128)].
    """
    counters = None
    if w2.is_cuda:
        counters = torch.zeros(policy.num_counters(w2.shape[1]), dtype=torch.int32, device=w2.device)
    return PackedExperts(w13, w2, scales13, scales2, counters)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> ChosenExperts:
    """Choose each token's experts, in float32. On CUDA the lowest id wins a tie, and NaN logits give valid ids.

    logits: [T, E], or [T, E + 1] if the shared expert is gated; the last is then that expert's gate logit.
    routing: E must be a multiple of `num_groups`, and the best groups must hold at least `top_k` experts.
    bias: float32 [E], added to the scores to choose experts and groups, but not in the weights (Wang et al. 2024,
        https://arxiv.org/abs/2408.15664).
    Returns: with a shared expert, k + 1 experts per token: each token's last id is E, and its weight (1, or the gate
        logit's sigmoid) is neither renormalized nor scaled.
    """
    if not logits.is_cuda:
        return reference.route(logits, routing, bias)
    return ChosenExperts(*_route_op(logits, bias, *astuple(routing)))


def fused_experts(x: Tensor, experts: PackedExperts, chosen: ChosenExperts, residual: Tensor | None = None) -> Tensor:
    """Return `sum_j weights[t, j] * down(silu(gate(x[t])) * up(x[t]))` of experts `ids[t, j]`, plus `residual`: [T, H].

    chosen: the weights and ids, from `route`.

    x: [T, H], rows contiguous, T >= 1. Its dtype is the experts', or any if these are FP8; a CPU also takes float32.
        FP8 experts quantise their inputs in groups of 128, as `block_fp8.quantize_groups` does.
    residual: [T, H], float32 or `x`'s dtype. May be overwritten, and may share memory with the result.
    Returns: the sum in the residual's dtype, else in `x`'s. Sums are float32; for many tokens on CUDA their terms are
        first rounded to `x`'s dtype.
    """
    if x.is_cuda or torch.compiler.is_compiling():
        return _fused_experts_op(x, *experts, *chosen, residual)
    return reference.fused_experts(x, experts, chosen, residual)


@torch.library.custom_op("nanovllm::route", mutates_args=())
def _route_op(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    scale: float,
    shared: str,
) -> tuple[Tensor, Tensor]:
    from nanovllm_kernels.moe import triton_route

    routing = Routing(top_k, scoring, renormalize, num_groups, top_groups, scale, shared)
    return triton_route.route(logits, bias, routing)


@_route_op.register_fake
def _(logits: Tensor, _bias: Tensor | None, top_k: int, *rest: object) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k + (rest[-1] != "none")
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("nanovllm::fused_experts", mutates_args=())
def _fused_experts_op(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    scales13: Tensor | None,
    scales2: Tensor | None,
    counters: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None,
) -> Tensor:
    """Implement `fused_experts` with a new tensor as result. `counters` are zeros before and after."""
    experts, chosen = PackedExperts(w13, w2, scales13, scales2, counters), ChosenExperts(weights, ids)
    if counters is None:
        return reference.fused_experts(x, experts, chosen, None if residual is None else residual.clone())
    rows = x if x.stride(1) == 1 else x.contiguous()
    out = _empty_result(x, residual)
    kernel = policy.choose_kernel(*ids.shape, w2.shape, x.dtype, x.device, is_block_fp8=scales13 is not None)
    if kernel == "matvec":
        from nanovllm_kernels.moe import triton_matvec

        triton_matvec.run_experts(rows, experts, chosen, residual, out)
    elif kernel == "unsorted":
        from nanovllm_kernels.moe import triton_unsorted

        triton_unsorted.run_experts(rows, experts, chosen, residual, out)
    else:
        from nanovllm_kernels.moe import triton_grouped

        triton_grouped.run_experts(rows, experts, chosen, residual, out, is_specialized=kernel == "specialized")
    return out


def _empty_result(x: Tensor, residual: Tensor | None) -> Tensor:
    return torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)


_fused_experts_op.register_fake(
    lambda x, _w13, _w2, _scales13, _scales2, _counters, _weights, _ids, residual: _empty_result(x, residual)
)
