"""Implements root mean square normalisation (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.weights import WeightedModule, WeightSlot
from nanovllm_core.model import BuildContext
from nanovllm_kernels.elementwise import prepare_norm_weight, rms_norm


class RMSNorm(WeightedModule):
    """Root mean square normalisation over the last dimension.

    packed_weight: the weight in the layout that the kernels take; valid after `finish_loading`.
    zero_centred: whether checkpoints hold the weight minus 1. The weight is then float32, because adding 1 in 16 bits
        would round the weight.
    own_elements: elements of the weight that this rank needs; None for all.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        build: BuildContext,
        *,
        zero_centred: bool = False,
        own_elements: slice | None = None,
    ):
        super().__init__(build)
        self._shape = (size,)
        self._own_elements = slice(0, size) if own_elements is None else own_elements
        size = self._own_elements.stop - self._own_elements.start
        self.eps = eps
        self._parallel = build.parallel
        self.weight = torch.empty(size, device=self.device) if zero_centred else self.allocate(size)
        self.packed_weight = self.weight
        self._zero_centred = zero_centred

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, size]."""
        return rms_norm(x, self.packed_weight, self.eps, self.dtype)

    def add_partials(self, stream: ResidualStream) -> "tuple[Tensor, Tensor, RMSNorm | None]":
        """Add the ranks' partial results to a residual stream, and return the input of the next layer.

        Returns (residual stream [T, size], input [T, size], norm). The next layer must apply `norm` to the input.
        `norm` is None if the input is already normalised.
        """
        parallel = self._parallel
        if stream.partial is None or parallel.splits_requests:
            residual = stream.complete(parallel)
            return residual, residual, self
        if parallel.communicator is None:
            raise ValueError("the residual stream has partial sums, but there is only one rank")
        residual, rows = parallel.communicator.all_reduce_norm(
            stream.partial, stream.residual, self.packed_weight, self.eps, self.dtype
        )
        return residual, rows, None

    def add_partials_and_gather_requests(self, stream: ResidualStream) -> "tuple[Tensor, Tensor, RMSNorm | None]":
        """Like `add_partials`, for a feed-forward layer.

        If ranks have different requests, each rank's feed-forward layer computes the rows of all ranks. The input is
        then [ranks * T, size], see `ParallelContext.gather_requests`.
        """
        residual, rows, norm = self.add_partials(stream)
        if norm is None or not self._parallel.splits_requests:
            return residual, rows, norm
        return residual, self._parallel.gather_requests(norm.forward(rows)), None

    def normalize(self, stream: ResidualStream) -> Tensor:
        """Add the ranks' partial results to a residual stream, and return the normalised stream [T, size]."""
        _, rows, norm = self.add_partials(stream)
        return rows if norm is None else norm.forward(rows)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slot that loads the weight."""
        yield f"{layer_name}.weight", WeightSlot(self._shape, self._copy_weight)

    def _copy_weight(self, weight: Tensor) -> object:
        weight = weight[self._own_elements]
        return self.weight.copy_(weight.float() + 1.0 if self._zero_centred else weight)

    def randomize(self, generator: torch.Generator) -> None:
        """Set the weight to ones."""
        del generator
        self.weight.fill_(1.0)

    def finish_loading(self) -> None:
        """Pack the weight for the kernels."""
        self.packed_weight = prepare_norm_weight(self.weight)
