"""Linear layers whose weights are split over ranks, by output (column) or by input (row) as in Megatron-LM.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053. This room must not know what the features mean.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.weights import Slot, WeightedModule, copy_share, fill_normal
from nanovllm_core.model import BuildContext
from nanovllm_kernels.gemm import PackedWeight, linear, norm_linear, pack_linear


class Part(NamedTuple):
    """One of the linears that a ColumnParallelLinear does at once: its name in the checkpoint and what it gives."""

    name: str
    out_features: int
    bias: bool = False


class ColumnParallelLinear(WeightedModule):
    """Several linears of one input in one matmul: [T, in_features] -> [T, sum of every part's share].

    Each rank has an even share of every part's outputs. The checkpoint knows the parts as siblings of this module.
    Raises ValueError when the ranks can't share a part evenly.
    """

    def __init__(self, in_features: int, parts: tuple[Part, ...], build: BuildContext):
        super().__init__(build)
        self._parts = parts
        self._in_features = in_features
        self._rank = build.parallel.rank
        self._shares = [build.parallel.share(part.out_features, part.name) for part in parts]
        self.weight = PackedWeight(self.allocate(sum(self._shares), in_features), blocked=False)
        # Parts without a bias share the vector of those that have one, and add nothing.
        self.bias = self.allocate(sum(self._shares)).zero_() if any(part.bias for part in parts) else None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """The parts' outputs, one after another, of x or of what `norm` makes of it: [T, in_features] -> [T, out]."""
        if norm is None:
            return linear(x, self.weight, self.bias)
        return norm_linear(x, norm.packed, norm.eps, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """One weight, and where it has one a bias, a part."""
        prefix = name[: name.rfind(".") + 1]
        weight = self.weight.data
        begin = 0
        for part, share in zip(self._parts, self._shares, strict=True):
            rows = slice(begin, begin + share)
            mine = slice(self._rank * share, (self._rank + 1) * share)
            shape = (part.out_features, self._in_features)
            yield f"{prefix}{part.name}.weight", Slot(shape, copy_share(weight[rows], mine))
            if part.bias and self.bias is not None:
                yield f"{prefix}{part.name}.bias", Slot(shape[:1], copy_share(self.bias[rows], mine))
            begin += share

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights; biases are 0."""
        fill_normal(self.weight.data, generator)

    def finish(self) -> None:
        """Pack the weight where that pays."""
        self.weight = pack_linear(self.weight.data)


class RowParallelLinear(WeightedModule):
    """A linear whose input is split over ranks: [T, share of in_features] -> [T, out_features], the same on every rank.

    Raises ValueError when the ranks can't share the input evenly.
    """

    def __init__(self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False):
        super().__init__(build)
        self._parallel = build.parallel
        self._shape = (out_features, in_features)
        self._share = build.parallel.share(in_features, "in_features")
        self._stored_bias = self.allocate(out_features).zero_() if bias else None
        self.weight = PackedWeight(self.allocate(out_features, self._share), blocked=False)
        # Added on one rank only, since the ranks' results are summed.
        self.bias = self._stored_bias if build.parallel.rank == 0 else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, share of in_features] -> [T, out_features], plus `residual` of that shape, which may be overwritten."""
        # Like the bias, a residual that every rank holds is added on one only.
        mine = residual if self._parallel.rank == 0 else None
        part = linear(x, self.weight, self.bias, mine)
        # A product alone need not have the residual's dtype.
        return self._parallel.all_reduce(part if residual is None else part.to(residual.dtype))

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """The weight, and the bias if there is one."""
        mine = slice(self._parallel.rank * self._share, (self._parallel.rank + 1) * self._share)
        yield f"{name}.weight", Slot(self._shape, copy_share(self.weight.data, slice(None), mine))
        if self._stored_bias is not None:
            yield f"{name}.bias", Slot(self._shape[:1], self._stored_bias.copy_)

    def randomize(self, generator: torch.Generator) -> None:
        """Normal weights; the bias is 0."""
        fill_normal(self.weight.data, generator)

    def finish(self) -> None:
        """Pack the weight where that pays."""
        self.weight = pack_linear(self.weight.data)
