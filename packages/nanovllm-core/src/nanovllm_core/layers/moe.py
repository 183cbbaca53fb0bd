"""Mixtures of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): a router, all experts in two tensors.

Experts are split over ranks by their width. Experts that see every token are a family's business. This room must not
know how experts are chosen, only what is asked of each.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.weights import Slot, WeightedModule, fill_normal
from nanovllm_core.model import BuildContext
from nanovllm_kernels.gemm import PackedWeight, logits
from nanovllm_kernels.moe import Routing, fused_experts, route

__all__ = ["ExpertNames", "Experts", "Router", "Routing", "SparseMLP"]


class ExpertNames(NamedTuple):
    """What a checkpoint calls the three linears of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Router(WeightedModule):
    """Says which experts a token goes to: [T, hidden_size] -> weights float32 [T, k], ids int32 [T, k].

    The same on every rank. correction_bias: where the checkpoint has one, its name beside this module, that is,
    "gate.name" for a tensor within a module "gate" and "name" for one next to it.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        build: BuildContext,
        *,
        correction_bias: str | None = None,
    ):
        super().__init__(build)
        self._routing = routing
        self._bias_name = correction_bias
        # So few numbers decide so much that a CPU, whose bf16 products are rounded, keeps them in float32.
        dtype = build.dtype if build.device.type == "cuda" else torch.float32
        self.weight = torch.empty((num_experts, hidden_size), dtype=dtype, device=build.device)
        self.bias = None if correction_bias is None else torch.zeros(num_experts, device=build.device)
        self._packed = PackedWeight(self.weight, blocked=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] -> weights and ids, each [T, k]."""
        return route(logits(x, self._packed, self.weight), self._routing, self.bias)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The weight, and the bias if there is one, whole on every rank."""
        yield f"{name}.weight", Slot(tuple(self.weight.shape), self.weight.copy_)
        if self.bias is not None:
            yield f"{name[: name.rfind('.') + 1]}{self._bias_name}", Slot(tuple(self.bias.shape), self.bias.copy_)

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights; the bias is 0."""
        fill_normal(self.weight, generator)


class Experts(WeightedModule):
    """Gated feed-forward layers, of which each token goes through a few: [T, hidden_size] -> [T, hidden_size].

    Each rank has an even share of every expert's width. The checkpoint has three linears an expert, each copied
    straight to its place. Raises ValueError when the ranks can't share the width evenly.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        names: ExpertNames = ExpertNames(),  # noqa: B008 - immutable
    ):
        super().__init__(build)
        self._parallel = build.parallel
        self._names = names
        self._shape = (intermediate_size, hidden_size)
        self._share = build.parallel.share(intermediate_size, "the width of an expert")
        self.w13 = self.allocate(num_experts, 2 * self._share, hidden_size)
        self.w2 = self.allocate(num_experts, hidden_size, self._share)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None = None) -> Tensor:
        """The experts `ids` of x, weighted and summed, plus `residual` [T, hidden_size], which may be overwritten.

        weights, ids: as the router gives them.
        """
        # A residual that every rank holds is added on one only, since the ranks' results are summed.
        mine = residual if self._parallel.rank == 0 else None
        part = fused_experts(x, self.w13, self.w2, weights, ids, mine)
        return self._parallel.all_reduce(part if residual is None else part.to(residual.dtype))

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Three weights an expert."""
        width, hidden_size = self._shape
        for expert in range(self.w13.shape[0]):
            for half, part in enumerate((self._names.gate, self._names.up)):
                slot = Slot((width, hidden_size), partial(self._copy_rows, expert, half))
                yield f"{name}.{expert}.{part}.weight", slot
            slot = Slot((hidden_size, width), partial(self._copy_down, expert))
            yield f"{name}.{expert}.{self._names.down}.weight", slot

    def _copy_rows(self, expert: int, half: int, tensor: Tensor) -> None:
        rows = self.w13[expert].narrow(0, half * self._share, self._share)
        rows.copy_(tensor.narrow(0, self._parallel.rank * self._share, self._share))

    def _copy_down(self, expert: int, tensor: Tensor) -> None:
        self.w2[expert].copy_(tensor.narrow(1, self._parallel.rank * self._share, self._share))

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights."""
        fill_normal(self.w13, generator)
        fill_normal(self.w2, generator)


class SparseMLP(nn.Module):
    """A router and its experts in place of a gated feed-forward layer, named as most checkpoints do."""

    def __init__(self, gate: Router, experts: Experts):
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """Of x or of what `norm` makes of it, plus `residual`, which may be overwritten; all [T, hidden_size]."""
        if norm is not None:
            x = norm.forward(x)
        return self.experts.forward(x, *self.gate.forward(x), residual)
