"""Quantised weights: which modules have them, and how a checkpoint's blocks get into a layer that holds several.

This room must not know which layers there are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.layers.weights import INITIAL_STD, Slot, copy_share
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight, empty_weight, quantize_blocks

# Of a random weight so many rows are drawn at once.
ROWS_DRAWN = 4096


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """Linear weights are e4m3, with a float32 scale a block of 128 x 128 beside them (`weight_scale_inv`).

    kept: modules that are not: a name, or the beginning or the end of one, as `modules_to_not_convert` has them.
    """

    kept: tuple[str, ...] = ()

    def keeps(self, name: str) -> bool:
        """Whether the module of that name stays as it is."""
        return any(name == kept or name.startswith(f"{kept}.") or name.endswith(kept) for kept in self.kept)


def quantization_of(quantization: BlockFP8 | None, prefix: str, *names: str) -> BlockFP8 | None:
    """How the modules `names` of `prefix`, which are multiplied as one, are quantised, if at all.

    Raises ValueError when some of them are and others aren't.
    """
    if quantization is None:
        return None
    kept = [f"{prefix}.{name}" for name in names if quantization.keeps(f"{prefix}.{name}")]
    if not kept:
        return quantization
    if len(kept) == len(names):
        return None
    rest = next(f"{prefix}.{name}" for name in names if f"{prefix}.{name}" not in kept)
    raise ValueError(f"{kept[0]} is not quantised, but {rest} is: this model multiplies by both at once")


def joint_weight(starts: list[int], shares: list[int], width: int, device: torch.device) -> BlockFP8Weight:
    """Room for parts of `shares` rows each, of which the first is row `starts[i]` of the checkpoint's tensor.

    Rows of one block of 128 stay under one scale; where parts or starts are no multiples of 128, a block is cut.
    """
    begins = [sum(shares[:index]) for index in range(len(shares))]
    return empty_weight(sum(shares), width, math.gcd(GROUP, *begins, *starts), device)


def block_slots(
    name: str, shape: tuple[int, int], weight: BlockFP8Weight, rows: slice, mine: slice, columns: slice
) -> Iterator[tuple[str, Slot]]:
    """Slots for the weight [N, K] of the module `name` and for its scales.

    rows: of `weight`, where its share goes. mine, columns: what of the whole is this share; columns from a multiple of
    128 on.
    """
    yield f"{name}.weight", Slot(shape, copy_share(weight.data[rows], mine, columns), DTYPE)
    size = weight.block_rows
    target = weight.scales[rows.start // size : -(-rows.stop // size)]
    blocks = torch.arange(mine.start, mine.stop, size) // GROUP
    groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))

    def copy(scales: Tensor) -> object:
        return target.copy_(scales[blocks.to(scales.device), groups])

    yield f"{name}.weight_scale_inv", Slot((-(-shape[0] // GROUP), -(-shape[1] // GROUP)), copy)


def randomize_blocks(weight: BlockFP8Weight, generator: torch.Generator) -> None:
    """Fill `weight` with what normal numbers come to when they are quantised."""
    size = weight.block_rows
    for begin in range(0, weight.data.shape[0], ROWS_DRAWN):
        numbers = weight.data[begin : begin + ROWS_DRAWN]
        drawn = torch.empty(numbers.shape, device=numbers.device).normal_(0.0, INITIAL_STD, generator=generator)
        data, scales = quantize_blocks(drawn)
        numbers.copy_(data)
        target = weight.scales[begin // size : -(-(begin + len(numbers)) // size)]
        target.copy_(scales.repeat_interleave(GROUP // size, 0)[: len(target)])
