"""Implements root mean square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanovllm_core.layers.weights import WeightedModule, WeightSlot
from nanovllm_core.model import BuildContext
from nanovllm_kernels.elementwise import prepare_norm_weight, rms_norm


class RMSNorm(WeightedModule):
    """Root mean square normalisation over the last dimension.

    packed_weight: the weight in the layout that the kernels take; valid after `finish_loading`.
    zero_centred: whether checkpoints hold the weight minus 1. The weight is then float32, because adding 1 in 16 bits
        would round the weight.
    """

    def __init__(self, size: int, eps: float, build: BuildContext, *, zero_centred: bool = False):
        super().__init__(build)
        self.eps = eps
        self.weight = torch.empty(size, device=self.device) if zero_centred else self.allocate(size)
        self.packed_weight = self.weight
        self._zero_centred = zero_centred

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return rms_norm(x, self.packed_weight, self.eps, self.dtype)

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slot that loads the weight."""
        yield f"{name}.weight", WeightSlot(tuple(self.weight.shape), self._copy_weight)

    def _copy_weight(self, weight: Tensor) -> object:
        return self.weight.copy_(weight.float() + 1.0 if self._zero_centred else weight)

    def randomize(self, generator: torch.Generator) -> None:
        """Set the weight to ones."""
        del generator
        self.weight.fill_(1.0)

    def finish_loading(self) -> None:
        """Pack the weight for the kernels."""
        self.packed_weight = prepare_norm_weight(self.weight)
