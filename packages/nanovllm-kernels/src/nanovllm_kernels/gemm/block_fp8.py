"""Computes linear layers with e4m3 weights and one float32 scale per block of 128 x 128.

Each row of the input is quantised in groups of GROUP (128) elements along K.
Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.elementwise import rms_norm, silu_and_mul
from nanovllm_kernels.fp8 import DTYPE
from nanovllm_kernels.gemm import block_fp8_reference as reference
from nanovllm_kernels.gemm import tiles
from nanovllm_kernels.gemm.block_fp8_weight import GROUP, BlockFP8Weight
from nanovllm_kernels.platform import describe_device, has_fp8

__all__ = [
    "GROUP",
    "BlockFP8Weight",
    "dequantize",
    "empty_weight",
    "linear",
    "norm_gate_up",
    "norm_linear",
    "quantize_blocks",
    "quantize_groups",
]

# For cuBLAS, the number of input rows, and the number of scales along K, must be multiples of this number.
SCALES_MULTIPLE = 4
# For cuBLAS, the number of output columns must be a multiple of this number.
COLUMNS_MULTIPLE = 16


def empty_weight(num_rows: int, depth: int, block_rows: int, device: torch.device) -> BlockFP8Weight:
    """Allocate a weight with one scale per block of `block_rows` x 128. Raises ValueError on a GPU without FP8."""
    if device.type == "cuda" and not has_fp8():
        raise ValueError("block FP8 weights need a GPU that multiplies FP8: Ada, Hopper or newer")
    num_groups = -(-depth // GROUP)
    padded_groups = -(-num_groups // SCALES_MULTIPLE) * SCALES_MULTIPLE
    scales = torch.zeros((-(-num_rows // block_rows), padded_groups), dtype=torch.float32, device=device)
    data = torch.empty((num_rows, depth), dtype=DTYPE, device=device)
    counters = None
    if device.type == "cuda":
        counters = torch.zeros(tiles.num_fp8_counters(num_rows), dtype=torch.int32, device=device)
    return BlockFP8Weight(data, scales.narrow(1, 0, num_groups), block_rows, counters)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows `x` [T, K] to e4m3 in groups of 128. A group's scale is its largest magnitude / 448, never 0.

    Returns: float8_e4m3fn [T, K], contiguous, and float32 scales [T, ceil(K / 128)], stored column by column. If a
        group has a non-finite element, some values of the group are NaN.
    """
    return _quantize_groups_op(x) if x.is_cuda else reference.quantize_groups(x)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [N, K] to e4m3 with one scale per block of 128 x 128.

    Returns: e4m3 values [N, K], and float32 scales [ceil(N / 128), ceil(K / 128)], as in DeepSeek's checkpoints.
    """
    return reference.quantize_blocks(weight)


def dequantize(weight: BlockFP8Weight) -> Tensor:
    """Return the weight in float32 [N, K]."""
    return reference.dequantize_blocks(weight.data, weight.scales, weight.block_rows)


def linear(x: Tensor, weight: BlockFP8Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Quantise `x` [T, K], multiply by the transpose of `weight` [N, K], and add `bias` [N] and `residual` [T, N].

    Rounds the result to the dtype of `residual`, or of `x` without a residual. cuBLAS first rounds the product to bf16.
    `residual` may be overwritten.
    """
    if x.is_cuda:
        return _block_fp8_linear_op(x, None, 0.0, *weight, bias, residual, False)
    sums = reference.project(*quantize_groups(x), weight)
    if bias is not None:
        sums += bias
    return sums.to(x.dtype) if residual is None else residual.add_(sums)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: BlockFP8Weight, bias: Tensor | None = None
) -> Tensor:
    """Return `linear` of `rms_norm(x)`: [T, K] -> [T, N]. On CUDA the result has the dtype of `norm_weight`."""
    if x.is_cuda:
        return _block_fp8_linear_op(x, norm_weight, eps, *weight, bias, None, False)
    return linear(rms_norm(x, norm_weight, eps), weight, bias)


def norm_gate_up(
    x: Tensor, norm_weight: Tensor, eps: float, weight: BlockFP8Weight, bias: Tensor | None = None
) -> Tensor:
    """Return `silu_and_mul` of `norm_linear`: [T, K] -> [T, I]. weight: [2 I, K], the gate's rows first."""
    if x.is_cuda:
        return _block_fp8_linear_op(x, norm_weight, eps, *weight, bias, None, True)
    return silu_and_mul(norm_linear(x, norm_weight, eps, weight, bias))


@torch.library.custom_op("nanovllm::quantize_groups", mutates_args=())
def _quantize_groups_op(x: Tensor) -> tuple[Tensor, Tensor]:
    from nanovllm_kernels.gemm import triton_block_fp8

    return triton_block_fp8.quantize_groups(x if x.stride(1) == 1 else x.contiguous(), None, 0.0)


@_quantize_groups_op.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((-(-x.shape[1] // GROUP), x.shape[0]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=DTYPE), scales.t()


@torch.library.custom_op("nanovllm::block_fp8_linear", mutates_args=())
def _block_fp8_linear_op(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    data: Tensor,
    scales: Tensor,
    block_rows: int,
    counters: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """Normalize rows `x` [M, K], quantise, multiply by a weight [N, K], add `bias`, gate, and add `residual`.

    data, scales, block_rows, counters: fields of the weight. gated: see `norm_gate_up`.
    Returns: a tensor with the dtype of `residual`, else of `norm_weight`, else of `x`. If cuBLAS multiplies, it rounds
        the product to bf16 before the bias is added.
    """
    from nanovllm_kernels.gemm import triton_block_fp8

    weight = BlockFP8Weight(data, scales, block_rows, counters)
    out = _empty_out(x, norm_weight, data, residual, gated)
    num_rows = x.shape[0]
    if num_rows == 0:
        return out
    rows = x if x.stride(1) == 1 else x.contiguous()
    x_scales = None
    if norm_weight is not None or num_rows > tiles.MAX_FUSED_FP8_ROWS:
        rows, x_scales = triton_block_fp8.quantize_groups(rows, norm_weight, eps)
        product_dtype = out.dtype if residual is None else x.dtype
        if (
            not tiles.is_triton_fp8_faster(num_rows, data.shape[0])
            and product_dtype == torch.bfloat16
            and _cublas_supports(weight)
        ):
            sums = _multiply_with_cublas(rows, x_scales, weight)
            if bias is not None:
                sums += bias
            if gated:
                return silu_and_mul(sums)
            return sums if residual is None else residual + sums
    may_split = counters is not None
    config = tiles.block_fp8_config(num_rows, out.shape[1], scales.shape[1], gated=gated, may_split=may_split)
    triton_block_fp8.project(rows, x_scales, weight, bias, residual, out, config, gated=gated)
    return out


def _empty_out(x: Tensor, norm_weight: Tensor | None, data: Tensor, residual: Tensor | None, gated: bool) -> Tensor:
    columns = data.shape[0] // 2 if gated else data.shape[0]
    dtype = next(tensor.dtype for tensor in (residual, norm_weight, x) if tensor is not None)
    return x.new_empty((x.shape[0], columns), dtype=dtype)


_block_fp8_linear_op.register_fake(
    lambda x, norm_weight, _eps, data, _scales, _block_rows, _counters, _bias, residual, gated: _empty_out(
        x, norm_weight, data, residual, gated
    )
)


def _cublas_supports(weight: BlockFP8Weight) -> bool:
    """Whether cuBLAS supports this weight: on Hopper, with whole blocks, and with scales padded by `empty_weight`."""
    data, scales, block_rows, _ = weight
    num_columns, depth = data.shape
    has_whole_blocks = block_rows == GROUP and num_columns % COLUMNS_MULTIPLE == 0 and depth % GROUP == 0
    has_padded_scales = scales.stride() == (-(-scales.shape[1] // SCALES_MULTIPLE) * SCALES_MULTIPLE, 1)
    return has_whole_blocks and has_padded_scales and describe_device(data.device).capability == (9, 0)


def _multiply_with_cublas(rows: Tensor, x_scales: Tensor, weight: BlockFP8Weight) -> Tensor:
    """Multiply with cuBLAS. Returns bf16 [M, N]."""
    num_rows, scales = rows.shape[0], weight.scales
    num_padding = -num_rows % SCALES_MULTIPLE  # rows added for cuBLAS; their values are arbitrary
    if num_padding:
        rows = torch.cat((rows.view(torch.uint8), rows[:num_padding].view(torch.uint8))).view(DTYPE)
        x_scales = torch.cat((x_scales.t(), x_scales.t()[:, :num_padding]), 1).t()
    padded_groups = scales.stride(0)
    out = functional.scaled_mm(
        rows,
        weight.data.t(),
        x_scales,
        functional.ScalingType.BlockWise1x128,
        scales.as_strided((padded_groups, scales.shape[0]), (1, padded_groups)),
        functional.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return out[:num_rows]
