"""Tests block FP8 on the CPU against float64: quantisation and products."""

import pytest
import torch
from torch.nn import functional

from nanovllm_kernels.elementwise import prepare_norm_weight
from nanovllm_kernels.gemm import block_fp8
from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight, quantize_blocks, quantize_groups


def expand(scales, rows, columns, shape):
    """Return one scale per element."""
    return scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def dequantize(weight):
    return weight.data.double() * expand(weight.scales, weight.block_rows, 128, weight.data.shape)


def rounding_limit(numbers):
    """Return the largest error of rounding to e4m3, with a relative margin of 2^-22 for the scaling."""
    half_steps = (numbers.abs().clamp(min=2**-6).frexp().exponent - 5).double().exp2()
    return half_steps + numbers.abs() * 2**-22


def make_weight(rows, width, block_rows=128):
    data, scales = quantize_blocks(torch.randn(rows, width) * 0.1)
    if block_rows != 128:
        scales = torch.rand(-(-rows // block_rows), scales.shape[1]) * 1e-3
    return BlockFP8Weight(data, scales, block_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (3, 300), (7, 48), (0, 256)])
def test_groups_are_rounded_to_nearest(dtype, num_rows, width):
    x = (torch.randn(num_rows, width) * torch.rand(num_rows, 1).mul(20).sub(10).exp2()).to(dtype)
    numbers, scales = quantize_groups(x)
    assert numbers.dtype == torch.float8_e4m3fn
    assert numbers.shape == x.shape
    assert numbers.is_contiguous()
    assert scales.shape == (num_rows, -(-width // 128))
    assert scales.t().is_contiguous()
    for index, group in enumerate(x.float().split(128, 1)):
        torch.testing.assert_close(scales[:, index], group.abs().amax(1) / 448 if num_rows else scales[:, index])
    scaled = x.double() / expand(scales, 1, 128, x.shape)
    assert ((numbers.double() - scaled).abs() <= rounding_limit(scaled)).all()


def test_zero_groups_stay_zero_and_non_finite_elements_become_nan():
    x = torch.zeros(3, 256)
    x[1, 7], x[2, 200] = torch.nan, torch.inf
    numbers, scales = quantize_groups(x)
    product = numbers.double() * expand(scales, 1, 128, x.shape)
    assert not product[0].any()
    assert product[1, 7].isnan()
    assert product[2, 200].isnan()
    assert not product[1, 128:].any()
    assert not product[2, :128].any()


@pytest.mark.parametrize("shape", [(128, 256), (300, 200), (5, 7)])
def test_blocks_are_rounded_to_nearest(shape):
    weight = torch.randn(shape)
    numbers, scales = quantize_blocks(weight)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    scaled = weight.double() / expand(scales, 128, 128, shape)
    assert torch.isclose(scaled.abs().max(), torch.tensor(448.0).double())
    assert ((numbers.double() - scaled).abs() <= rounding_limit(scaled)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width", "block_rows"), [(256, 256, 128), (300, 200, 128), (96, 48, 32), (20, 130, 4)]
)
@pytest.mark.parametrize("with_bias_and_residual", [True, False])
def test_linear_matches_float64_of_quantised_inputs(
    dtype, rows, width, block_rows, with_bias_and_residual, monkeypatch
):
    # Process the weight in several steps.
    monkeypatch.setattr(block_fp8.reference, "DEQUANTIZED_ELEMENTS", 64 * width)
    weight = make_weight(rows, width, block_rows)
    x = torch.randn(5, width).to(dtype)
    bias, residual = (torch.randn(rows).to(dtype), torch.randn(5, rows)) if with_bias_and_residual else (None, None)
    numbers, scales = quantize_groups(x)
    expected = (numbers.double() * expand(scales, 1, 128, x.shape)) @ dequantize(weight).T
    if bias is not None and residual is not None:
        expected += bias.double() + residual.double()
    actual = block_fp8.linear(x, weight, bias, None if residual is None else residual.clone())
    assert actual.dtype == (torch.float32 if with_bias_and_residual else dtype)
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_norm_and_gate_match_separate_operators():
    x, norm, weight = torch.randn(4, 200), torch.rand(200) + 0.5, make_weight(2 * 96, 200)
    normed = functional.rms_norm(x, (200,), norm, 1e-5)
    expected = block_fp8.linear(normed, weight)
    # The fused norm rounds differently, which may change the later rounding to e4m3.
    tolerances = {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(
        block_fp8.norm_linear(x, prepare_norm_weight(norm), 1e-5, weight), expected, **tolerances
    )
    gate, up = expected.chunk(2, 1)
    actual = block_fp8.norm_gate_up(x, prepare_norm_weight(norm), 1e-5, weight)
    torch.testing.assert_close(actual, functional.silu(gate) * up, **tolerances)
