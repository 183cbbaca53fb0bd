"""Defines routing options, expert weights and chosen experts."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Options for choosing and weighting each token's `top_k` experts.

    scoring: function from logits to scores.
    renormalize: divide the chosen scores by their sum.
    num_groups: number of groups of experts. A group's score is the sum of the group's two best scores (DeepSeek-AI
        2024, https://arxiv.org/abs/2412.19437).
    top_groups: number of best groups, from which a token's experts are chosen.
    scale: factor by which the routing weights are multiplied, after renormalizing.
    shared: weight of the shared expert, which every token uses: 1 ("always") or the sigmoid of a gate logit ("gated").
        "none": there is no shared expert.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: Literal["none", "always", "gated"] = "none"


class PackedExperts(NamedTuple):
    """Weights of this rank's E experts with hidden size H and intermediate size I, from `pack_experts`.

    counters: int32, number of finished programs of each column tile. The last program of a tile resets the tile's
        counter to 0. Concurrent launches must not share counters. None on a CPU.
    Other fields: see `pack_experts`.
    """

    w13: Tensor
    w2: Tensor
    scales13: Tensor | None
    scales2: Tensor | None
    counters: Tensor | None
    first_id: int
    num_all_experts: int

    @property
    def is_partial(self) -> bool:
        """Whether other ranks have experts too (expert parallelism)."""
        return self.w2.shape[0] < self.num_all_experts


class ChosenExperts(NamedTuple):
    """The k experts that `route` chose for each token.

    weights: float32 [T, k], factors by which the experts' results are multiplied.
    ids: int32 [T, k], contiguous. Indices among the experts of all ranks. A token's ids are distinct, unless its logits
        are NaN.
    """

    weights: Tensor
    ids: Tensor
