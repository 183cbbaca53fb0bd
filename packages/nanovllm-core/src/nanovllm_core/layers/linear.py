"""Linear layers that are split over ranks by output (column) or by input (row), as in Megatron-LM.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, allocate_fused_weight, block_fp8_slots, randomize_block_fp8
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.weights import WeightedModule, WeightSlot, fill_normal, make_share_copier
from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import ParallelContext, own_slice
from nanovllm_kernels.gemm import PackedWeight, linear, norm_linear, pack_linear
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight


class LinearPart(NamedTuple):
    """One of the linear layers that a ColumnParallelLinear fuses.

    name: name in the checkpoint without the parent's path.
    num_groups: number of equal groups of output rows, such as heads. A rank gets whole groups, see
        `ParallelContext.own_groups`. None: the ranks split the rows evenly.
    splits_groups: matters if there are more ranks than groups. True: the ranks split all rows evenly. False: several
        ranks have the same group.
    """

    name: str
    out_features: int
    bias: bool = False
    num_groups: int | None = None
    splits_groups: bool = False

    def own_rows(self, parallel: ParallelContext) -> slice:
        """The indices of this rank's rows. The slice may end after the layer's last row: additional rows are zeros.

        Raises ValueError if the ranks can't share the rows.
        """
        if self.num_groups is None or (self.splits_groups and parallel.size > self.num_groups):
            return own_slice(parallel, parallel.split_evenly(self.out_features, self.name))
        groups, group_size = parallel.own_groups(self.num_groups, self.name), self.out_features // self.num_groups
        return slice(groups.start * group_size, groups.stop * group_size)


class _Linear(WeightedModule):
    """A layer with one weight, in block FP8 or in the model's dtype."""

    weight: PackedWeight | BlockFP8Weight

    def randomize(self, generator: torch.Generator) -> None:
        """Draw the weight from a normal distribution. The bias stays 0."""
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

        source_rows, columns: part of the module's weight to copy.
        """
        if isinstance(self.weight, BlockFP8Weight):
            yield from block_fp8_slots(name, shape, self.weight, rows, source_rows, columns)
        else:
            yield f"{name}.weight", WeightSlot(shape, make_share_copier(self.weight.data[rows], source_rows, columns))


class ColumnParallelLinear(_Linear):
    """Linear layers (parts) with the same input, fused into one matmul. Each rank computes its rows of each part.

    Raises ValueError if the ranks can't share a part.

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
        self._own_rows = [part.own_rows(build.parallel) for part in parts]
        part_sizes = [rows.stop - rows.start for rows in self._own_rows]
        padded = [part for part, rows in zip(parts, self._own_rows, strict=True) if rows.stop > part.out_features]
        if quantization is None:
            self.weight = PackedWeight(self.allocate(sum(part_sizes), in_features), in_onednn_layout=False)
            if padded:
                self.weight.data.zero_()
        elif padded:
            part = padded[0]
            raise ValueError(
                f"{part.name} has {part.num_groups} groups of heads, which {build.parallel.size} ranks can't split "
                f"evenly in block FP8: use a number of ranks that divides {part.num_groups}"
            )
        else:
            source_starts = [rows.start for rows in self._own_rows]
            self.weight = allocate_fused_weight(source_starts, part_sizes, in_features, build.device)
        # The fused bias is 0 for a part without a bias.
        self.bias = self.allocate(sum(part_sizes)).zero_() if any(part.bias for part in parts) else None

    def forward(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Apply all parts to norm(x) and concatenate their outputs. x: [T, in_features]. norm: None for no norm."""
        if norm is None:
            return linear(x, self.weight, self.bias)
        return norm_linear(x, norm.packed_weight, norm.eps, self.weight, self.bias)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load the weights, the scales of quantised weights, and the biases."""
        prefix = layer_name[: layer_name.rfind(".") + 1]
        columns = slice(0, self._in_features)
        start = 0
        for part, own_rows in zip(self._parts, self._own_rows, strict=True):
            rows = slice(start, start + own_rows.stop - own_rows.start)
            shape = (part.out_features, self._in_features)
            yield from self._weight_slots(f"{prefix}{part.name}", shape, rows, own_rows, columns)
            if part.bias and self.bias is not None:
                yield f"{prefix}{part.name}.bias", WeightSlot(shape[:1], make_share_copier(self.bias[rows], own_rows))
            start = rows.stop


class RowParallelLinear(_Linear):
    """A linear layer whose result is added to the residual stream. Each rank has a share of the input features.

    Raises ValueError if the ranks can't share the input features or the FP8 blocks (GROUP x GROUP) evenly.

    name: name of the layer in the checkpoint, for the error.
    own_columns: input features of this rank; None for an even share. The slice may end after `in_features`: the
        weights of the additional features are zeros.
    quantization: format of the weight; None for the model's dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        build: BuildContext,
        *,
        name: str = "a row-parallel layer",
        own_columns: slice | None = None,
        bias: bool = False,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__(build)
        self._parallel = build.parallel
        self._shape = (out_features, in_features)
        if own_columns is None:
            own_columns = own_slice(
                build.parallel, build.parallel.split_evenly(in_features, f"the input size of {name}")
            )
        self._own_columns = own_columns
        num_columns = own_columns.stop - own_columns.start
        self._stored_bias = self.allocate(out_features).zero_() if bias else None
        if quantization is None:
            self.weight = PackedWeight(self.allocate(out_features, num_columns), in_onednn_layout=False)
            if own_columns.stop > in_features:
                self.weight.data.zero_()
        elif own_columns.stop > in_features or any(
            edge % GROUP for edge in {own_columns.start, own_columns.stop} - {in_features}
        ):
            raise ValueError(
                f"the input size of {name} is {in_features}, but {build.parallel.size} ranks can't split its FP8 "
                f"blocks of {GROUP}: use fewer ranks"
            )
        else:
            self.weight = allocate_fused_weight([0], [out_features], num_columns, build.device)
        # The ranks' results are summed, so only one rank may add the bias.
        self.bias = self._stored_bias if build.parallel.rank == 0 else None

    def forward(self, x: Tensor, stream: ResidualStream) -> ResidualStream:
        """Add the result [T, out_features] to `stream`. x: this rank's share of [T, in_features]."""
        return stream.add(self._parallel, lambda base: self.add_partial(x, base))

    def add_partial(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        """Return this rank's term of the sum over ranks, plus `base` [T, out_features]. May overwrite `base`."""
        return linear(x, self.weight, self.bias, base)

    def weight_slots(self, layer_name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Yield the slots that load the weight, the scales of a quantised weight, and the bias."""
        rows = slice(0, self._shape[0])
        yield from self._weight_slots(layer_name, self._shape, rows, rows, self._own_columns)
        if self._stored_bias is not None:
            yield f"{layer_name}.bias", WeightSlot(self._shape[:1], self._stored_bias.copy_)
