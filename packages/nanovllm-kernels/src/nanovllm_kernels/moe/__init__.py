"""Mixtures of experts: who computes what of a token, and SwiGLU experts with the weighted sum of their results.

This room must not know models, nor where the experts' weights came from.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanovllm_kernels.moe import reference

__all__ = ["Routing", "fused_experts", "route"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its `top_k` experts and weighs what they say.

    scoring: what makes scores of logits. renormalize: the chosen scores are divided by their sum. scale: and then
        multiplied by this. num_groups, top_groups: only the experts of a token's best groups are eligible (DeepSeek-AI
        2024, https://arxiv.org/abs/2412.19437); a group is as good as the sum of its best two.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, float32 [T, k] and int32 [T, k], of `logits` [T, E].

    bias: float32 [E], added to the scores where experts and groups are chosen, and not where they are weighed (Wang et
    al. 2024, https://arxiv.org/abs/2408.15664). Computed in float32. E / num_groups is a whole number, and the best
    groups have `top_k` experts or more.
    """
    return reference.route(logits, routing, bias)


def fused_experts(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None = None
) -> Tensor:
    """`sum_j weights[t, j] * down(silu(gate(x[t])) * up(x[t]))` with the experts `ids[t, j]`, plus `residual`: [T, H].

    x: [T, H]. w13: [E, 2 I, H], contiguous, of each expert the gate's rows, then the others. w2: [E, H, I], contiguous.
    weights: float32 [T, k]. ids: int32 [T, k], those of a token all different. residual: [T, H], float32 beside any
    `x`, or of its dtype; may be overwritten, and may share memory with what is returned, which has its dtype, and
    without one that of `x`. On a CPU `x` may be float32 beside any weights. The weighted sum is float32.
    """
    if torch.compiler.is_compiling():
        return _fused_experts_op(x, w13, w2, weights, ids, residual)
    return reference.fused_experts(x, w13, w2, weights, ids, residual)


@torch.library.custom_op("nanovllm::fused_experts", mutates_args=())
def _fused_experts_op(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None
) -> Tensor:
    """What `fused_experts` does, into a tensor of its own; opaque to a compiler, as experts are found in the data."""
    return reference.fused_experts(x, w13, w2, weights, ids, None if residual is None else residual.clone())


_fused_experts_op.register_fake(
    lambda x, _w13, _w2, _weights, _ids, residual: torch.empty_like(x if residual is None else residual)
)
