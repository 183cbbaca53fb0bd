"""Linear layers that are split over ranks by output (column) or by input (row), as in Megatron-LM.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, allocate_fused_weight, block_fp8_slots, randomize_block_fp8
from nanovllm_core.layers.weights import WeightedModule, WeightSlot, fill_normal, make_share_copier
from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import own_slice
from nanovllm_kernels.gemm import PackedWeight, linear, norm_linear, pack_linear
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight


class LinearPart(NamedTuple):
    """A linear layer that a ColumnParallelLinear fuses. name: name in the checkpoint without the parent's path."""

    name: str
    out_features: int
    bias: bool = False


class _Linear(WeightedModule):
    """A layer with one weight, in block FP8 or in the model's dtype."""

    weight: PackedWeight | BlockFP8Weight

    def randomize(self, generator: torch.Generator) -> None:
        """Draw a normal weight. The bias stays 0."""
        if isinstance(self.weight, BlockFP8Weight):
            randomize_block_fp8(self.weight, generator)
        else:
            fill_normal(self.weight.data, generator)

    def finish_loading(self) -> None:
        """Pack the weight for the matmul of this device."""
        if isinstance(self.weight, PackedWeight):
            self.weight = pack_linear(self.weight.data)

    def _weight_slots(
        self, name: str, shape: tuple[int, int], rows: slice, source_rows: slice, columns: slice
    ) -> Iterator[tuple[str, WeightSlot]]:
        """Yield slots that load tensors of the checkpoint's module `name`.

        rows: rows of this weight that the slots fill.
        source_rows: rows of the module's weight to copy.
        columns: columns of the module's weight to copy.
        """
        if isinstance(self.weight, BlockFP8Weight):
            yield from block_fp8_slots(name, shape, self.weight, rows, source_rows, columns)
        else:
            yield f"{name}.weight", WeightSlot(shape, make_share_copier(self.weight.data[rows], source_rows, columns))


class ColumnParallelLinear(_Linear):
    """Linear layers (parts) with the same input, fused into one matmul. Each rank computes an even share of each part.

    Raises ValueError if the ranks can't share a part evenly.

    parts: the fused layers, which are siblings of this module in the checkpoint.
    quantization: format of all weights; None for the model's dtype.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[LinearPart, ...],
        build: BuildContext,
        *,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__(build)
        self._parts = parts
        self._in_features = in_features
        self._parallel = build.parallel
        self._part_sizes = [build.parallel.split_evenly(part.out_features, part.name) for part in parts]
        if quantization is None:
            self.weight = PackedWeight(self.allocate(sum(self._part_sizes), in_features), in_onednn_layout=False)
        else:
            source_starts = [build.parallel.rank * size for size in self._part_sizes]
            self.weight = allocate_fused_weight(source_starts, self._part_sizes, in_features, build.device)
        # The fused bias is 0 for a part without a bias.
        self.bias = self.allocate(sum(self._part_sizes)).zero_() if any(part.bias for part in parts) else None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Apply all parts to norm(x) and concatenate their outputs. x: [T, in_features]. norm: None for no norm."""
        if norm is None:
            return linear(x, self.weight, self.bias)
        return norm_linear(x, norm.packed_weight, norm.eps, self.weight, self.bias)

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load the weights, the scales of quantised weights, and the biases."""
        prefix = name[: name.rfind(".") + 1]
        columns = slice(0, self._in_features)
        start = 0
        for part, size in zip(self._parts, self._part_sizes, strict=True):
            rows = slice(start, start + size)
            own_rows = own_slice(self._parallel, size)
            shape = (part.out_features, self._in_features)
            yield from self._weight_slots(f"{prefix}{part.name}", shape, rows, own_rows, columns)
            if part.bias and self.bias is not None:
                yield f"{prefix}{part.name}.bias", WeightSlot(shape[:1], make_share_copier(self.bias[rows], own_rows))
            start += size


class RowParallelLinear(_Linear):
    """A linear layer. The ranks share the input features evenly. Every rank returns the full result.

    Raises ValueError if the ranks can't share the input features or the FP8 blocks (GROUP x GROUP) evenly.

    quantization: format of the weight; None for the model's dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        build: BuildContext,
        *,
        bias: bool = False,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__(build)
        self._parallel = build.parallel
        self._shape = (out_features, in_features)
        self._in_features_per_rank = build.parallel.split_evenly(in_features, "in_features")
        self._stored_bias = self.allocate(out_features).zero_() if bias else None
        if quantization is None:
            self.weight = PackedWeight(self.allocate(out_features, self._in_features_per_rank), in_onednn_layout=False)
        elif build.parallel.size > 1 and self._in_features_per_rank % GROUP:
            num_ranks = build.parallel.size
            raise ValueError(
                f"in_features is {in_features}, but {num_ranks} ranks can't split its FP8 blocks of {GROUP}"
            )
        else:
            self.weight = allocate_fused_weight([0], [out_features], self._in_features_per_rank, build.device)
        # The ranks' results are summed, so only one rank may add the bias.
        self.bias = self._stored_bias if build.parallel.rank == 0 else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps x, this rank's share of [T, in_features], to [T, out_features] and adds `residual`.

        residual: may be overwritten; None for no residual.
        """
        # The ranks' results are summed, so only one rank may add the residual.
        own_residual = residual if self._parallel.rank == 0 else None
        partial_sum = linear(x, self.weight, self.bias, own_residual)
        return self._parallel.all_reduce(partial_sum if residual is None else partial_sum.to(residual.dtype))

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load the weight, the scales of a quantised weight, and the bias."""
        columns = own_slice(self._parallel, self._in_features_per_rank)
        rows = slice(0, self._shape[0])
        yield from self._weight_slots(name, self._shape, rows, rows, columns)
        if self._stored_bias is not None:
            yield f"{name}.bias", WeightSlot(self._shape[:1], self._stored_bias.copy_)
