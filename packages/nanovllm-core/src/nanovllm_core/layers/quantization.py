"""Block FP8 weights: which modules have them, and slots that load them, also into weights of fused modules."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.layers.weights import INITIAL_STD, Slot, copy_share
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight, empty_weight, quantize_blocks

# Rows of a random weight that are drawn at once, to bound memory.
ROWS_DRAWN = 4096


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """Linear weights in e4m3, with a float32 scale per block of 128 x 128 (`weight_scale_inv`).

    kept: modules that are not quantised (`modules_to_not_convert`): a name, or the beginning or the end of a name.
    """

    kept: tuple[str, ...] = ()

    def keeps(self, name: str) -> bool:
        """Whether the module of that name is not quantised."""
        return any(name == kept or name.startswith(f"{kept}.") or name.endswith(kept) for kept in self.kept)


def quantization_of(quantization: BlockFP8 | None, prefix: str, *names: str) -> BlockFP8 | None:
    """The quantisation of the modules `prefix.name`, which are fused into one matmul; None if they are not quantised.

    Raises ValueError if only some of them are quantised.
    """
    if quantization is None:
        return None
    kept = [f"{prefix}.{name}" for name in names if quantization.keeps(f"{prefix}.{name}")]
    if not kept:
        return quantization
    if len(kept) == len(names):
        return None
    rest = next(f"{prefix}.{name}" for name in names if f"{prefix}.{name}" not in kept)
    raise ValueError(
        f"{kept[0]} is not quantised, but {rest} is: this model fuses both into one matmul, so quantise both or neither"
    )


def joint_weight(starts: list[int], shares: list[int], width: int, device: torch.device) -> BlockFP8Weight:
    """An empty weight for several parts in one matmul.

    shares: rows of each part. starts: per part, the row of the checkpoint's tensor at which its share begins.
    width: columns.
    If shares or starts are no multiples of 128, scales cover fewer than 128 rows each.
    """
    begins = [sum(shares[:index]) for index in range(len(shares))]
    return empty_weight(sum(shares), width, math.gcd(GROUP, *begins, *starts), device)


def block_slots(
    name: str, shape: tuple[int, int], weight: BlockFP8Weight, rows: slice, source_rows: slice, columns: slice
) -> Iterator[tuple[str, Slot]]:
    """Slots for the weight [N, K] of the module `name` and for its scales.

    shape: [N, K] in the checkpoint.
    rows: rows of `weight` that are filled.
    source_rows, columns: this rank's part of the checkpoint's tensor. Columns begin at a multiple of 128.
    """
    yield f"{name}.weight", Slot(shape, copy_share(weight.data[rows], source_rows, columns), DTYPE)
    size = weight.block_rows
    target = weight.scales[rows.start // size : -(-rows.stop // size)]
    blocks = torch.arange(source_rows.start, source_rows.stop, size) // GROUP
    groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))

    def copy(scales: Tensor) -> object:
        return target.copy_(scales[blocks.to(scales.device), groups])

    yield f"{name}.weight_scale_inv", Slot((-(-shape[0] // GROUP), -(-shape[1] // GROUP)), copy)


def randomize_blocks(weight: BlockFP8Weight, generator: torch.Generator) -> None:
    """Fill `weight` with quantised normal numbers."""
    size = weight.block_rows
    for begin in range(0, weight.data.shape[0], ROWS_DRAWN):
        numbers = weight.data[begin : begin + ROWS_DRAWN]
        drawn = torch.empty(numbers.shape, device=numbers.device).normal_(0.0, INITIAL_STD, generator=generator)
        data, scales = quantize_blocks(drawn)
        numbers.copy_(data)
        target = weight.scales[begin // size : -(-(begin + len(numbers)) // size)]
        target.copy_(scales.repeat_interleave(GROUP // size, 0)[: len(target)])
