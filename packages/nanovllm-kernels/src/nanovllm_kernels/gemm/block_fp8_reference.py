"""Block FP8 in plain torch: the reference for the kernels' tests, and the CPU path.

Products of e4m3 values are exact in float32, so other orders of summation differ by rounding only.
"""

import torch
from torch import Tensor

from nanovllm_kernels import fp8

GROUP = 128
# Weight elements converted to float32 at once: they fit a core's cache.
WIDE_ELEMENTS = 1 << 19


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_groups`."""
    num_rows, width = x.shape
    groups = -(-width // GROUP)
    wide = x.float()
    if width % GROUP:
        wide = torch.nn.functional.pad(wide, (0, groups * GROUP - width))
    wide = wide.reshape(num_rows, groups, GROUP)
    largest = wide.abs().amax(-1).clamp_(min=fp8.MIN_GROUP_MAGNITUDE)
    inverse, scales = _scales(largest)
    numbers = (wide * inverse.unsqueeze(-1)).to(fp8.DTYPE).view(num_rows, groups * GROUP)
    return numbers[:, :width].contiguous(), scales.t().contiguous().t()


def _scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return 448 / largest, which scales the values to e4m3's range, and its inverse.

    Each is rounded once: with a scalar operand torch would divide in two steps.
    """
    limit = torch.full_like(largest, fp8.MAX_E4M3)
    return limit / largest, largest / limit


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_blocks`."""
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % GROUP, 0, -rows % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, -1, GROUP)
    largest = blocks.abs().amax((1, 3)).clamp_(min=fp8.MIN_GROUP_MAGNITUDE)
    inverse, scales = _scales(largest)
    numbers = (blocks * inverse[:, None, :, None]).to(fp8.DTYPE).view(padded.shape)
    return numbers[:rows, :width].contiguous(), scales


def dequantize_groups(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the values that `quantize_groups` rounded to: float32 [T, K]."""
    # `fp8.widen` would lose NaN.
    return _scale(numbers.float(), scales)


def dequantize_blocks(numbers: Tensor, scales: Tensor, block_rows: int = GROUP) -> Tensor:
    """Dequantise a weight e4m3 [N, K] with one scale per block of `block_rows` x 128: float32 [N, K]."""
    return _scale(fp8.widen(numbers, torch.float32), scales.repeat_interleave(block_rows, 0)[: numbers.shape[0]])


def _scale(wide: Tensor, scales: Tensor) -> Tensor:
    """Multiply `wide` [N, K] by `scales` [N, ceil(K / 128)] in place."""
    for index, columns in enumerate(wide.split(GROUP, 1)):
        columns.mul_(scales[:, index : index + 1])
    return wide


def project(numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, block_rows: int) -> Tensor:
    """Multiply quantised rows by the transpose of a quantised weight [N, K]: float32 [T, N]."""
    rows = dequantize_groups(numbers, scales)
    out = rows.new_empty((rows.shape[0], weight.shape[0]))
    step = max(1, WIDE_ELEMENTS // (weight.shape[1] * block_rows)) * block_rows
    for begin in range(0, weight.shape[0], step):
        part = slice(begin, begin + step)
        few_scales = weight_scales[begin // block_rows : (begin + step) // block_rows]
        torch.mm(rows, dequantize_blocks(weight[part], few_scales, block_rows).t(), out=out[:, part])
    return out
