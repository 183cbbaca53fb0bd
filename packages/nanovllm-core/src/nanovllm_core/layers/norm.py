"""Normalisation layers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanovllm_core.layers.weights import WeightedModule, WeightSlot
from nanovllm_core.model import BuildContext
from nanovllm_kernels.elementwise import pack_norm, rms_norm


class RMSNorm(WeightedModule):
    """Root mean square normalisation over the last dimension (Zhang and Sennrich 2019).

    packed: the weight in the form that the kernels read fastest; set by `finish_loading`.
    zero_centred: checkpoints hold the weight minus 1. Then the weight is float32, so that the sum is not rounded.
    """

    def __init__(self, size: int, eps: float, build: BuildContext, *, zero_centred: bool = False):
        super().__init__(build)
        self.eps = eps
        self.weight = torch.empty(size, device=self.device) if zero_centred else self.allocate(size)
        self.packed = self.weight
        self._zero_centred = zero_centred

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return rms_norm(x, self.packed, self.eps, self.dtype)

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        """The weight, whole on every rank."""
        yield f"{name}.weight", WeightSlot(tuple(self.weight.shape), self._copy_weight)

    def _copy_weight(self, weight: Tensor) -> object:
        return self.weight.copy_(weight.float() + 1.0 if self._zero_centred else weight)

    def randomize(self, generator: torch.Generator) -> None:
        """Set the weight to ones."""
        del generator
        self.weight.fill_(1.0)

    def finish_loading(self) -> None:
        """Pack the weight where that is faster."""
        self.packed = pack_norm(self.weight)
