"""Types of mixtures of experts: the routing's options, the experts' weights, and the experts that tokens chose."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses its `top_k` experts and their weights.

    scoring: function that turns logits into scores.
    renormalize: divide the chosen scores by their sum.
    num_groups, top_groups: only experts of a token's `top_groups` best groups are eligible (DeepSeek-AI 2024,
        https://arxiv.org/abs/2412.19437). A group's score is the sum of its two best scores.
    scale: factor for the weights, applied after renormalizing.
    shared: whether each token also uses a shared expert: with weight 1 ("always") or a gate logit's sigmoid ("gated").
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: Literal["none", "always", "gated"] = "none"


class PackedExperts(NamedTuple):
    """The weights of E experts as `fused_experts` takes them. `pack_experts` describes w13, w2 and the scales.

    counters: int32 zeros on CUDA, else None. Each launch leaves them zero; concurrent launches may not share them.
    """

    w13: Tensor
    w2: Tensor
    scales13: Tensor | None
    scales2: Tensor | None
    counters: Tensor | None


class ChosenExperts(NamedTuple):
    """The experts that `route` chose for each token, k per token.

    weights: float32 [T, k], factors of the experts' results.
    ids: int32 [T, k], contiguous; a token's ids differ.
    """

    weights: Tensor
    ids: Tensor
