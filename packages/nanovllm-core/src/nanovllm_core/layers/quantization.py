"""Finds the modules with block FP8 weights, and allocates and loads these weights."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm_core.layers.weights import INITIAL_STD, WeightSlot, make_share_copier
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm.block_fp8 import GROUP, BlockFP8Weight, empty_weight, quantize_blocks

# Maximum number of rows of a random weight that are drawn at once, which bounds memory.
MAX_RANDOM_ROWS = 4096


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """A model's format of linear weights: 8-bit floats (e4m3), with a float32 scale per block of 128 x 128.

    excluded_modules: full names, name prefixes or name suffixes of modules that are not quantised.
    """

    excluded_modules: tuple[str, ...] = ()

    def excludes(self, name: str) -> bool:
        """Whether the module `name` is not quantised."""
        return any(
            name == excluded or name.startswith(f"{excluded}.") or name.endswith(excluded)
            for excluded in self.excluded_modules
        )


def find_quantization(quantization: BlockFP8 | None, prefix: str, *names: str) -> BlockFP8 | None:
    """Find the quantisation that the modules `names` in module `prefix` share; None for no quantisation.

    Raises ValueError if only some of the modules are quantised.
    """
    if quantization is None:
        return None
    module_names = [f"{prefix}.{name}" for name in names]
    unquantized = [name for name in module_names if quantization.excludes(name)]
    if not unquantized:
        return quantization
    if len(unquantized) == len(names):
        return None
    quantized_name = next(name for name in module_names if name not in unquantized)
    raise ValueError(
        f"{unquantized[0]} is not quantised, but {quantized_name} is: this model fuses both into one matmul, so "
        "quantise both or neither"
    )


def allocate_fused_weight(
    source_starts: list[int], part_sizes: list[int], num_columns: int, device: torch.device
) -> BlockFP8Weight:
    """Allocate a weight that will hold this rank's rows of several tensors in the checkpoint, concatenated.

    A scale covers 128 rows. It covers fewer rows if this rank's rows of a tensor do not start at a multiple of 128,
    either in the checkpoint or in the allocated weight.

    source_starts, part_sizes: index of this rank's first row and number of this rank's rows in each tensor.
    """
    target_starts = [sum(part_sizes[:index]) for index in range(len(part_sizes))]
    block_rows = math.gcd(GROUP, *target_starts, *source_starts)
    return empty_weight(sum(part_sizes), num_columns, block_rows, device)


def block_fp8_slots(
    name: str, shape: tuple[int, int], weight: BlockFP8Weight, rows: slice, source_rows: slice, columns: slice
) -> Iterator[tuple[str, WeightSlot]]:
    """Yield slots that load `rows` of `weight`, and the scales of these rows, from the checkpoint's module `name`.

    source_rows, columns: part of the checkpoint's weight to copy. `columns` must start at a multiple of 128.
    """
    yield f"{name}.weight", WeightSlot(shape, make_share_copier(weight.data[rows], source_rows, columns), DTYPE)
    block_rows = weight.block_rows
    target_scales = weight.scales[rows.start // block_rows : -(-rows.stop // block_rows)]
    source_blocks = torch.arange(source_rows.start, source_rows.stop, block_rows) // GROUP
    column_blocks = slice(columns.start // GROUP, -(-columns.stop // GROUP))

    def copy_scales(scales: Tensor) -> object:
        return target_scales.copy_(scales[source_blocks.to(scales.device), column_blocks])

    yield f"{name}.weight_scale_inv", WeightSlot((-(-shape[0] // GROUP), -(-shape[1] // GROUP)), copy_scales)


def randomize_block_fp8(weight: BlockFP8Weight, generator: torch.Generator) -> None:
    """Fill `weight` with quantised normal numbers."""
    block_rows = weight.block_rows
    for start in range(0, weight.data.shape[0], MAX_RANDOM_ROWS):
        data = weight.data[start : start + MAX_RANDOM_ROWS]
        values = torch.empty(data.shape, device=data.device).normal_(0.0, INITIAL_STD, generator=generator)
        quantized, scales = quantize_blocks(values)
        data.copy_(quantized)
        target_scales = weight.scales[start // block_rows : -(-(start + len(data)) // block_rows)]
        target_scales.copy_(scales.repeat_interleave(GROUP // block_rows, 0)[: len(target_scales)])
