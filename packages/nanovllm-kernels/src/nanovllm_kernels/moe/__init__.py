"""Runs mixtures of experts: `route` chooses each token's experts, and `fused_experts` runs SwiGLU experts.

On CUDA the host never waits for the ids of the chosen experts: kernel launches depend only on the number of tokens.
"""

from dataclasses import astuple

import torch
from torch import Tensor

from nanovllm_kernels.moe import moe_reference, policy
from nanovllm_kernels.moe.experts import ChosenExperts, PackedExperts, Routing

__all__ = ["ChosenExperts", "PackedExperts", "Routing", "fused_experts", "pack_experts", "route"]


def pack_experts(
    w13: Tensor,
    w2: Tensor,
    scales13: Tensor | None = None,
    scales2: Tensor | None = None,
    *,
    first_id: int = 0,
    num_all_experts: int | None = None,
) -> PackedExperts:
    """Prepare this rank's E experts with hidden size H and intermediate size I for `fused_experts`, without a copy.

    With expert parallelism, each rank has the experts of one range of ids. The shared expert that `route` adds has the
    last id, so only the rank with the last range stores and computes the shared expert.

    w13: [E, 2 I, H], contiguous. Each expert has I rows of the gate, followed by I rows of the up projection.
    w2: [E, H, I], contiguous. The down projection.
    scales13: float32 [E, 2, ceil(I / 128), ceil(H / 128)], contiguous. Each 128 x 128 block of e4m3 `w13` has one
        scale. Index 0 of the second dimension is the gate, index 1 the up projection. None: the weights are not FP8.
    scales2: float32 [E, ceil(H / 128), ceil(I / 128)], contiguous. Scales of e4m3 `w2`. None: `w2` is not FP8.
    first_id: id of the rank's first expert.
    num_all_experts: number of experts of all ranks, including a shared expert from `route`. None: this rank has all
        experts.
    Raises: ValueError if the rank has no experts, or if its ids are not in [0, num_all_experts).
    """
    num_experts = w2.shape[0]
    num_all_experts = num_experts if num_all_experts is None else num_all_experts
    if not num_experts or not 0 <= first_id <= num_all_experts - num_experts:
        raise ValueError(
            f"{num_experts} experts with first_id={first_id} and num_all_experts={num_all_experts}: "
            f"a rank needs at least one expert, and ids in [0, num_all_experts)"
        )
    counters = None
    if w2.is_cuda:
        counters = torch.zeros(policy.num_counters(w2.shape[1]), dtype=torch.int32, device=w2.device)
    return PackedExperts(w13, w2, scales13, scales2, counters, first_id, num_all_experts)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> ChosenExperts:
    """Choose each token's experts, in float32. On CUDA the lowest id wins a tie, and NaN logits give valid ids.

    logits: [T, E], for the E experts of all ranks, without the shared expert. If the shared expert is gated, the shape
        is [T, E + 1], and the last logit is the shared expert's gate.
    routing: `num_groups` must divide E, and `top_groups` groups together must have at least `top_k` experts.
    bias: float32 [E], added to scores when experts and groups are chosen, but not to weights (Wang et al. 2024,
        https://arxiv.org/abs/2408.15664). None: no bias.
    Returns: `top_k` experts per token. The shared expert, if any, follows as a last column with id E. Its weight is
        1 or the sigmoid of the gate logit, and is neither renormalized nor scaled.
    """
    if not logits.is_cuda:
        return moe_reference.route(logits, routing, bias)
    return ChosenExperts(*_route_op(logits, bias, *astuple(routing)))


def fused_experts(x: Tensor, experts: PackedExperts, chosen: ChosenExperts, residual: Tensor | None = None) -> Tensor:
    """Return each token's weighted sum of its chosen experts' results, plus `residual`: [T, H].

    The result of an expert for token t is down(silu(gate(x[t])) * up(x[t])). Experts of other ranks are skipped, so a
    token without experts of this rank gets its residual, or zeros if `residual` is None. If one rank passes the
    residual and the other ranks pass None, the sum over ranks is the result of all experts plus the residual.
    x: [T, H], T >= 1. Rows are contiguous. FP8 experts accept any dtype, and round `x` in groups of 128. Other experts
        accept the weights' dtype, and on a CPU also float32.
    residual: [T, H], float32 or the dtype of `x`. May be overwritten, and may share memory with the result.
    Returns: [T, H] in the dtype of `residual`, or of `x` without a residual. Sums are float32. On CUDA with
        many tokens, each expert's result is rounded to the dtype of `x` before the sum.
    """
    if x.is_cuda or torch.compiler.is_compiling():
        return _fused_experts_op(x, *experts, *chosen, residual)
    return moe_reference.fused_experts(x, experts, chosen, residual)


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
    shape = logits.shape[0], top_k + (rest[-1] != "none")  # rest[-1] is `shared`
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("nanovllm::fused_experts", mutates_args=())
def _fused_experts_op(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    scales13: Tensor | None,
    scales2: Tensor | None,
    counters: Tensor | None,
    first_id: int,
    num_all_experts: int,
    weights: Tensor,
    ids: Tensor,
    residual: Tensor | None,
) -> Tensor:
    """Run `fused_experts` without overwriting `residual`."""
    experts = PackedExperts(w13, w2, scales13, scales2, counters, first_id, num_all_experts)
    chosen = ChosenExperts(weights, ids)
    if counters is None:
        return moe_reference.fused_experts(x, experts, chosen, None if residual is None else residual.clone())
    rows = x if x.stride(1) == 1 else x.contiguous()
    out = _empty_out(x, residual)
    kernel = policy.choose_kernel(*ids.shape, experts, x.dtype, x.device)
    if kernel == "matvec":
        from nanovllm_kernels.moe import triton_matvec

        triton_matvec.run_experts(rows, experts, chosen, residual, out)
    elif kernel == "unsorted":
        from nanovllm_kernels.moe import triton_unsorted

        triton_unsorted.run_experts(rows, experts, chosen, residual, out)
    else:
        from nanovllm_kernels.moe import triton_grouped

        triton_grouped.run_experts(rows, experts, chosen, residual, out, uses_gluon=kernel == "specialized")
    return out


def _empty_out(x: Tensor, residual: Tensor | None) -> Tensor:
    return torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)


_fused_experts_op.register_fake(
    lambda x, *arguments: _empty_out(x, arguments[-1])  # the last argument is `residual`
)
