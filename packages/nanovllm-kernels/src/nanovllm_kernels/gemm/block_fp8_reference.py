"""Computes block FP8 products in plain torch: the reference for the kernels' tests, and the CPU path."""

import torch
from torch import Tensor

from nanovllm_kernels import fp8
from nanovllm_kernels.gemm.block_fp8_weight import GROUP, BlockFP8Weight

# Number of weight elements that are converted to float32 at once. These elements fit into a core's cache.
DEQUANTIZED_ELEMENTS = 1 << 19


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_groups`."""
    num_rows, depth = x.shape
    num_groups = -(-depth // GROUP)
    groups = x.float()
    if depth % GROUP:
        groups = torch.nn.functional.pad(groups, (0, num_groups * GROUP - depth))
    groups = groups.reshape(num_rows, num_groups, GROUP)
    factors, scales = _compute_scales(groups.abs().amax(-1))
    values = (groups * factors.unsqueeze(-1)).to(fp8.DTYPE).view(num_rows, num_groups * GROUP)
    return values[:, :depth].contiguous(), scales.t().contiguous().t()


def _compute_scales(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors 448 / magnitude, and scales magnitude / 448. magnitudes: the maxima of groups or blocks."""
    magnitudes = magnitudes.clamp(min=fp8.MIN_GROUP_MAGNITUDE)
    # A tensor as dividend makes torch round once. With a scalar, torch would round twice.
    return torch.full_like(magnitudes, fp8.MAX_E4M3) / magnitudes, magnitudes * (1.0 / fp8.MAX_E4M3)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_blocks`."""
    num_columns, depth = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -depth % GROUP, 0, -num_columns % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, -1, GROUP)
    factors, scales = _compute_scales(blocks.abs().amax((1, 3)))
    values = (blocks * factors[:, None, :, None]).to(fp8.DTYPE).view(padded.shape)
    return values[:num_columns, :depth].contiguous(), scales


def dequantize_groups(values: Tensor, scales: Tensor) -> Tensor:
    """Invert `quantize_groups`: float32 [T, K]."""
    # Do not use `fp8.widen`, which would lose NaN.
    return _apply_scales(values.float(), scales)


def dequantize_blocks(values: Tensor, scales: Tensor, block_rows: int = GROUP) -> Tensor:
    """Convert e4m3 `values` [N, K] with one scale per block of `block_rows` x 128 to float32."""
    return _apply_scales(fp8.widen(values, torch.float32), scales.repeat_interleave(block_rows, 0)[: values.shape[0]])


def _apply_scales(matrix: Tensor, scales: Tensor) -> Tensor:
    """Multiply float32 `matrix` [N, K] by `scales` [N, ceil(K / 128)] in place."""
    for index, columns in enumerate(matrix.split(GROUP, 1)):
        columns.mul_(scales[:, index : index + 1])
    return matrix


def project(values: Tensor, scales: Tensor, weight: BlockFP8Weight) -> Tensor:
    """Multiply rows from `quantize_groups` by the transpose of a weight [N, K]: float32 [T, N]."""
    data, weight_scales, block_rows, _ = weight
    rows = dequantize_groups(values, scales)
    out = rows.new_empty((rows.shape[0], data.shape[0]))
    columns_per_slice = max(1, DEQUANTIZED_ELEMENTS // (data.shape[1] * block_rows)) * block_rows
    for begin in range(0, data.shape[0], columns_per_slice):
        columns = slice(begin, begin + columns_per_slice)
        column_scales = weight_scales[begin // block_rows : (begin + columns_per_slice) // block_rows]
        torch.mm(rows, dequantize_blocks(data[columns], column_scales, block_rows).t(), out=out[:, columns])
    return out
