"""Block FP8 in plain torch: the reference for the kernels' tests, and the CPU path.

Products of e4m3 values are exact in float32, so other orders of summation differ by rounding only.
"""

import torch
from torch import Tensor

from nanovllm_kernels import fp8
from nanovllm_kernels.gemm.block_fp8_weight import GROUP, BlockFP8Weight

# Weight elements converted to float32 at once: they fit a core's cache.
DEQUANTIZED_ELEMENTS = 1 << 19


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_groups`."""
    num_rows, depth = x.shape
    num_groups = -(-depth // GROUP)
    wide = x.float()
    if depth % GROUP:
        wide = torch.nn.functional.pad(wide, (0, num_groups * GROUP - depth))
    wide = wide.reshape(num_rows, num_groups, GROUP)
    magnitudes = wide.abs().amax(-1).clamp_(min=fp8.MIN_GROUP_MAGNITUDE)
    factors, scales = _compute_scales(magnitudes)
    numbers = (wide * factors.unsqueeze(-1)).to(fp8.DTYPE).view(num_rows, num_groups * GROUP)
    return numbers[:, :depth].contiguous(), scales.t().contiguous().t()


def _compute_scales(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Return 448 / magnitudes, which scales the values to e4m3's range, and its factors.

    Each is rounded once: with a scalar operand torch would divide in two steps.
    """
    limit = torch.full_like(magnitudes, fp8.MAX_E4M3)
    return limit / magnitudes, magnitudes / limit


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_blocks`."""
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % GROUP, 0, -rows % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, -1, GROUP)
    magnitudes = blocks.abs().amax((1, 3)).clamp_(min=fp8.MIN_GROUP_MAGNITUDE)
    factors, scales = _compute_scales(magnitudes)
    numbers = (blocks * factors[:, None, :, None]).to(fp8.DTYPE).view(padded.shape)
    return numbers[:rows, :width].contiguous(), scales


def dequantize_groups(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the values that `quantize_groups` rounded to: float32 [T, K]."""
    # `fp8.widen` would lose NaN.
    return _apply_scales(numbers.float(), scales)


def dequantize_blocks(numbers: Tensor, scales: Tensor, block_rows: int = GROUP) -> Tensor:
    """Dequantise a weight e4m3 [N, K] with one scale per block of `block_rows` x 128: float32 [N, K]."""
    return _apply_scales(fp8.widen(numbers, torch.float32), scales.repeat_interleave(block_rows, 0)[: numbers.shape[0]])


def _apply_scales(wide: Tensor, scales: Tensor) -> Tensor:
    """Multiply float32 `wide` [N, K] by `scales` [N, ceil(K / 128)] in place."""
    for index, columns in enumerate(wide.split(GROUP, 1)):
        columns.mul_(scales[:, index : index + 1])
    return wide


def project(numbers: Tensor, scales: Tensor, weight: BlockFP8Weight) -> Tensor:
    """Multiply quantised rows by the transpose of a quantised weight [N, K]: float32 [T, N]."""
    data, weight_scales, block_rows, _ = weight
    rows = dequantize_groups(numbers, scales)
    out = rows.new_empty((rows.shape[0], data.shape[0]))
    num_columns = max(1, DEQUANTIZED_ELEMENTS // (data.shape[1] * block_rows)) * block_rows
    for begin in range(0, data.shape[0], num_columns):
        columns = slice(begin, begin + num_columns)
        column_scales = weight_scales[begin // block_rows : (begin + num_columns) // block_rows]
        torch.mm(rows, dequantize_blocks(data[columns], column_scales, block_rows).t(), out=out[:, columns])
    return out
