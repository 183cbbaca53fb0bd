"""Linear layers whose weights are e4m3 with one float32 scale a block of 128 x 128, as DeepSeek-V3 publishes them.

DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3. What is multiplied by them is quantised on its way:
each row in groups of 128 along K, each with a scale of its own. Sums are float32. This room must not know which layer
a weight belongs to.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import rms_norm, silu_and_mul
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm import block_fp8_reference as reference
from nanovllm_kernels.platform import has_fp8

GROUP = reference.GROUP
# cuBLAS reads a weight's scales in fours along K.
SCALES_STEP = 4


class BlockFP8Weight(NamedTuple):
    """A quantised weight [N, K]: numbers times scales.

    data: float8_e4m3fn [N, K], contiguous. scales: float32 [ceil(N / block_rows), ceil(K / 128)], one a block of
    `block_rows` rows and 128 columns. block_rows: 128, or less where rows of several blocks of 128 were put together.
    """

    data: Tensor
    scales: Tensor
    block_rows: int = GROUP


def empty_weight(num_rows: int, width: int, block_rows: int, device: torch.device) -> BlockFP8Weight:
    """Room for a weight [num_rows, width], its numbers and scales uninitialised, in the layout that runs fastest.

    Raises ValueError for a GPU that doesn't multiply e4m3.
    """
    if device.type == "cuda" and not has_fp8():
        raise ValueError("block FP8 weights need a GPU that multiplies FP8: Ada, Hopper or newer")
    groups = -(-width // GROUP)
    padded = -(-groups // SCALES_STEP) * SCALES_STEP
    scales = torch.zeros((-(-num_rows // block_rows), padded), dtype=torch.float32, device=device)
    data = torch.empty((num_rows, width), dtype=DTYPE, device=device)
    return BlockFP8Weight(data, scales.narrow(1, 0, groups), block_rows)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to e4m3 under a scale for each 128 of their numbers, the largest of which becomes +-448.

    x: [T, K]. Returns (float8_e4m3fn [T, K], contiguous, and float32 [T, ceil(K / 128)], stored group by group):
    `x` is about their product. A scale is the largest magnitude / 448, but never 0; a number that isn't finite makes
    NaN of its group or a part of it.
    """
    return reference.quantize_groups(x)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [N, K] to e4m3 under a scale for each block of 128 x 128.

    Returns (float8_e4m3fn [N, K], float32 [ceil(N / 128), ceil(K / 128)]), as checkpoints' `weight` and
    `weight_scale_inv`.
    """
    return reference.quantize_blocks(weight)


def dequantize(weight: BlockFP8Weight) -> Tensor:
    """Numbers times scales: float32 [N, K]."""
    return reference.dequantize_blocks(*weight)


def linear(x: Tensor, weight: BlockFP8Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """`x` [T, K], quantised, times the transpose of `weight` [N, K], plus `bias` [N] and `residual` [T, N].

    Rounded once, to the dtype of `residual`, without one to that of `x`. `residual` may be overwritten.
    """
    sums = reference.project(*quantize_groups(x), *weight)
    if bias is not None:
        sums += bias
    return sums.to(x.dtype) if residual is None else residual.add_(sums)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: BlockFP8Weight, bias: Tensor | None = None
) -> Tensor:
    """`linear` of `x` [T, K] after `rms_norm` with `norm_weight`, as made by `pack_norm`: [T, N]."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gate_up(
    x: Tensor, norm_weight: Tensor, eps: float, weight: BlockFP8Weight, bias: Tensor | None = None
) -> Tensor:
    """`silu_and_mul` of `norm_linear`: [T, K] -> [T, I] with a weight [2 I, K], the gate's rows first."""
    return silu_and_mul(norm_linear(x, norm_weight, eps, weight, bias))
