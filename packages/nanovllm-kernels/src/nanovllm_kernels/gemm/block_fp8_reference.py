"""Block FP8 in plain torch: the oracle of the kernels, and the CPU path.

Products of e4m3 numbers are exact in float32, so what differs from any other order of the same sums is their rounding.
"""

import torch
from torch import Tensor

from nanovllm_kernels import fp8

GROUP = 128
LARGEST = 448.0
# A group of zeros gets a scale too.
LEAST = 1e-10
# Of a weight's numbers so many are wide at once: they stay in a core's cache.
WIDE_ELEMENTS = 1 << 19


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_groups`."""
    num_rows, width = x.shape
    groups = -(-width // GROUP)
    wide = x.float()
    if width % GROUP:
        wide = torch.nn.functional.pad(wide, (0, groups * GROUP - width))
    wide = wide.reshape(num_rows, groups, GROUP)
    largest = wide.abs().amax(-1).clamp_(min=LEAST)
    inverse, scales = _scales(largest)
    numbers = (wide * inverse.unsqueeze(-1)).to(fp8.DTYPE).view(num_rows, groups * GROUP)
    return numbers[:, :width].contiguous(), scales.t().contiguous().t()


def _scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """What numbers of at most `largest` are to be multiplied by to end at 448, and what undoes it.

    Both are rounded once: by a scalar torch would divide in two steps.
    """
    limit = torch.full_like(largest, LARGEST)
    return limit / largest, largest / limit


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `block_fp8.quantize_blocks`."""
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % GROUP, 0, -rows % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, -1, GROUP)
    largest = blocks.abs().amax((1, 3)).clamp_(min=LEAST)
    inverse, scales = _scales(largest)
    numbers = (blocks * inverse[:, None, :, None]).to(fp8.DTYPE).view(padded.shape)
    return numbers[:rows, :width].contiguous(), scales


def dequantize_groups(numbers: Tensor, scales: Tensor) -> Tensor:
    """What `quantize_groups` rounded to: float32 [T, K]."""
    # `fp8.widen` would lose NaN.
    return _scale(numbers.float(), scales)


def dequantize_blocks(numbers: Tensor, scales: Tensor, block_rows: int = GROUP) -> Tensor:
    """A weight e4m3 [N, K] whose `scales` are one a block of `block_rows` x 128: float32 [N, K]."""
    return _scale(fp8.widen(numbers, torch.float32), scales.repeat_interleave(block_rows, 0)[: numbers.shape[0]])


def _scale(wide: Tensor, scales: Tensor) -> Tensor:
    """`wide` [N, K] times `scales` [N, ceil(K / 128)], in place."""
    for index, columns in enumerate(wide.split(GROUP, 1)):
        columns.mul_(scales[:, index : index + 1])
    return wide


def project(numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, block_rows: int) -> Tensor:
    """Quantised rows times the transpose of a quantised weight [N, K]: float32 [T, N]."""
    rows = dequantize_groups(numbers, scales)
    out = rows.new_empty((rows.shape[0], weight.shape[0]))
    step = max(1, WIDE_ELEMENTS // (weight.shape[1] * block_rows)) * block_rows
    for begin in range(0, weight.shape[0], step):
        part = slice(begin, begin + step)
        few_scales = weight_scales[begin // block_rows : (begin + step) // block_rows]
        torch.mm(rows, dequantize_blocks(weight[part], few_scales, block_rows).t(), out=out[:, part])
    return out
