"""Mixtures of experts: who computes what of a token, and SwiGLU experts with the weighted sum of their results.

On CUDA, for few tokens (see `tiles`) two Triton kernels that sort nothing, for one token and block FP8 two without
tensor cores, for more a sort on the device and two grouped products; nothing waits for the device, and no launch
depends on what the tokens chose. Elsewhere plain torch.
This room must not know models, nor where the experts' weights came from.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.gemm import block_fp8
from nanovllm_kernels.moe import reference, tiles

__all__ = ["PackedExperts", "Routing", "fused_experts", "pack_experts", "route"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its `top_k` experts and weighs what they say.

    scoring: what makes scores of logits. renormalize: the chosen scores are divided by their sum. scale: and then
        multiplied by this. num_groups, top_groups: only the experts of a token's best groups are eligible (DeepSeek-AI
        2024, https://arxiv.org/abs/2412.19437); a group is as good as the sum of its best two.
    shared: whether every token goes to one expert more, and that with the weight 1 ("always") or with one that a logit
        of its own decides ("gated").
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: Literal["none", "always", "gated"] = "none"


class PackedExperts(NamedTuple):
    """Experts' weights, made ready for `fused_experts` by `pack_experts`, which says what they are.

    counters: on CUDA int32 zeros; every launch leaves them so, and only one at a time may use them.
    """

    w13: Tensor
    w2: Tensor
    scales13: Tensor | None
    scales2: Tensor | None
    counters: Tensor | None


def pack_experts(
    w13: Tensor, w2: Tensor, scales13: Tensor | None = None, scales2: Tensor | None = None
) -> PackedExperts:
    """Make experts ready for `fused_experts`, without a copy.

    w13: [E, 2 I, H], contiguous, of each expert the gate's rows, then the others. w2: [E, H, I], contiguous.
    scales13, scales2: beside weights of float8_e4m3fn, of each block of 128 x 128 one, float32 [E, 2, ceil(I / 128),
        ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)], contiguous; the blocks of the others begin with them.
    """
    counters = None
    if w2.is_cuda:
        counters = torch.zeros(tiles.num_counters(w2.shape[1]), dtype=torch.int32, device=w2.device)
    return PackedExperts(w13, w2, scales13, scales2, counters)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, float32 [T, k] and int32 [T, k], of `logits` [T, E].

    bias: float32 [E], added to the scores where experts and groups are chosen, and not where they are weighed (Wang et
    al. 2024, https://arxiv.org/abs/2408.15664). Computed in float32. E / num_groups is a whole number, and the best
    groups have `top_k` experts or more. On CUDA the lowest id of equals comes first; logits that are no numbers give
    ids within range all the same.
    A shared expert is number E, and each token's last: then both are [T, k + 1], and nothing said above concerns it. If
    it is gated, logits are [T, E + 1], and its weight is the sigmoid of the last.
    """
    if not logits.is_cuda:
        return reference.route(logits, routing, bias)
    groups = routing.num_groups, routing.top_groups
    rest = (*groups, routing.scale, routing.shared)
    return _route_op(logits, bias, routing.top_k, routing.scoring, routing.renormalize, *rest)


def fused_experts(
    x: Tensor, experts: PackedExperts, weights: Tensor, ids: Tensor, residual: Tensor | None = None
) -> Tensor:
    """`sum_j weights[t, j] * down(silu(gate(x[t])) * up(x[t]))` with the experts `ids[t, j]`, plus `residual`: [T, H].

    x: [T, H], rows contiguous, T at least 1. weights: float32 [T, k]. ids: int32 [T, k], contiguous, those of a token
        all different. residual: [T, H], float32 beside any `x`, or of its dtype; may be overwritten, and may share
        memory with what is returned, which has its dtype, and without one that of `x`.
    `x` has the experts' dtype, where these aren't FP8; on a CPU it may be float32 beside any. What is multiplied by FP8
    weights is quantised in groups of 128 as `block_fp8.quantize_groups` does. The weighted sum is float32, on CUDA for
    many tokens of terms that were rounded to the dtype of `x`.
    """
    if x.is_cuda or torch.compiler.is_compiling():
        return _fused_experts_op(x, *experts, weights, ids, residual)
    return reference.fused_experts(x, experts, weights, ids, residual)


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

    return triton_route.route(logits, bias, top_k, scoring, renormalize, num_groups, top_groups, scale, shared)


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
    """What `fused_experts` does, into a tensor of its own. `counters` are zeros before and after."""
    if counters is None:
        experts = PackedExperts(w13, w2, scales13, scales2, None)
        return reference.fused_experts(x, experts, weights, ids, None if residual is None else residual.clone())
    rows = x if x.stride(1) == 1 else x.contiguous()
    out = _empty_result(x, residual)
    if len(x) == 1 and scales13 is not None and scales2 is not None:
        from nanovllm_kernels.moe import triton_one

        triton_one.one_token(rows, w13, w2, scales13, scales2, weights, ids, residual, out)
        return out
    if tiles.takes_few(x.shape[0], quantized=scales13 is not None):
        from nanovllm_kernels.moe import triton_few

        triton_few.few_experts(rows, w13, w2, scales13, scales2, weights, ids, residual, counters, out)
        return out
    from nanovllm_kernels.moe import triton_grouped

    row_scales = None
    if scales13 is not None:
        rows, row_scales = block_fp8.quantize_groups(rows)
    triton_grouped.grouped_experts(
        rows, row_scales, w13, w2, scales13, scales2, weights, ids, residual, out, dtype=x.dtype
    )
    return out


def _empty_result(x: Tensor, residual: Tensor | None) -> Tensor:
    return torch.empty_like(x if residual is None else residual, memory_format=torch.contiguous_format)


_fused_experts_op.register_fake(
    lambda x, _w13, _w2, _scales13, _scales2, _counters, _weights, _ids, residual: _empty_result(x, residual)
)
