"""Types of mixtures of experts: options of the routing, weights of the experts, and the chosen experts."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How each token's `top_k` experts are chosen and weighted.

    scoring: function from logits to scores.
    renormalize: divide the chosen scores by their sum.
    num_groups, top_groups: a token chooses experts from its `top_groups` best groups only. A group's score is the sum
        of its two best scores (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437).
    scale: factor by which weights are multiplied after renormalizing.
    shared: each token also uses a shared expert, with weight 1 ("always") or a gate logit's sigmoid ("gated").
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: Literal["none", "always", "gated"] = "none"


class PackedExperts(NamedTuple):
    """Weights of E experts. `pack_experts` makes them, and describes the other fields.

    counters: int32 per tile, 0 between launches. Concurrent launches must not share counters. None: on a CPU.
    """

    w13: Tensor
    w2: Tensor
    scales13: Tensor | None
    scales2: Tensor | None
    counters: Tensor | None


class ChosenExperts(NamedTuple):
    """The k experts that `route` chose for each token.

    weights: float32 [T, k], factors of the experts' results.
    ids: int32 [T, k], contiguous, unique per token.
    """

    weights: Tensor
    ids: Tensor
