import itertools
import os

import pytest
import torch
from torch.nn import functional

from nanovllm_kernels import gemm
from nanovllm_kernels.gemm import block_fp8, tiles
from nanovllm_kernels.gemm import block_fp8_reference as reference
from nanovllm_kernels.gemm.block_fp8 import BlockFP8Weight, quantize_blocks

OPS = torch.ops.nanovllm
# Hopper sums e4m3 products with about 14 bits (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3.2).
# The interpreter sums with 24 bits.
TOLERANCE = {torch.float32: 1e-5 if os.environ.get("TRITON_INTERPRET") == "1" else 3e-4, torch.bfloat16: 8e-3}


def make_weight(num_rows, width, device, block_rows=128):
    """Return a random weight in the layout of `empty_weight`."""
    data, scales = quantize_blocks(torch.randn(num_rows, width, device=device) * 0.1)
    num_groups = scales.shape[1]
    padded_scales = torch.full((-(-num_rows // block_rows), -(-num_groups // 4) * 4), torch.nan, device=device)
    padded_scales[:, :num_groups] = torch.rand((padded_scales.shape[0], num_groups), device=device) * 1e-3 + 1e-4
    counters = torch.zeros(tiles.num_fp8_counters(num_rows), dtype=torch.int32, device=device)
    return BlockFP8Weight(data, padded_scales[:, :num_groups], block_rows, counters)


def round_inputs(x):
    return reference.dequantize_groups(*reference.quantize_groups(x)).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (3, 300), (5, 48), (2, 1300), (0, 256)])
def test_groups_are_quantised_like_the_reference(device, dtype, num_rows, width):
    x = torch.randn(num_rows, width + 16, device=device).to(dtype)[:, :width]
    x[1:2, :128] = 0
    expected, expected_scales = reference.quantize_groups(x)
    found, scales = OPS.quantize_groups(x)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert scales.t().is_contiguous()


@pytest.mark.parametrize(("num_rows", "width"), [(1, 256), (3, 300), (2, 1300)])
def test_normed_groups_match_norm(device, num_rows, width):
    from nanovllm_kernels.gemm import triton_block_fp8

    x, norm = torch.randn(num_rows, width, device=device) * 30, torch.rand(width, device=device) + 0.5
    found = reference.dequantize_groups(*triton_block_fp8.quantize_groups(x, norm, 1e-5))
    normed = functional.rms_norm(x, (width,), norm, 1e-5)
    # The tolerance is half a step of e4m3.
    torch.testing.assert_close(found, normed, rtol=0.07, atol=1e-2)
    assert (found - round_inputs(normed)).norm() < 1e-2 * normed.norm()


def check(
    num_rows, num_columns, width, dtype, device, *, norm, bias, residual, gated, block_rows=128, residual_dtype=None
):
    """residual_dtype: dtype of `x` and of the residual. None: `dtype`."""

    def draw(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype)

    num_weight_rows = num_columns * (2 if gated else 1)
    x, weight = (
        draw(num_rows, width + 16, dtype=residual_dtype or dtype)[:, :width],
        make_weight(num_weight_rows, width, device, block_rows),
    )
    norm_weight, bias_vector = draw(width), draw(num_weight_rows)
    added = draw(num_rows, num_columns, dtype=residual_dtype or dtype)
    rounded_x = round_inputs(functional.rms_norm(x.float(), (width,), norm_weight.float(), 1e-5) if norm else x)
    expected = rounded_x @ block_fp8.dequantize(weight).double().T
    if bias:
        expected += bias_vector.double()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = functional.silu(gate) * up
    if residual:
        expected += added.double()
    arguments = (
        x,
        norm_weight if norm else None,
        1e-5,
        *weight,
        bias_vector if bias else None,
        added if residual else None,
        gated,
    )
    actual = OPS.block_fp8_linear(*arguments)
    assert not weight.counters.any()
    assert actual.dtype == (added.dtype if residual else dtype)
    assert actual.shape == expected.shape
    tolerance = TOLERANCE[dtype]
    if norm:
        # The kernels round the norm differently than the reference. A few values then become another e4m3 value.
        tolerance = 1e-2
    assert (actual.double() - expected).norm() <= tolerance * (expected.norm() + expected.numel() ** 0.5)


@pytest.mark.parametrize(("num_rows", "dtype"), [(5, torch.float32), (1, torch.bfloat16)])
def test_norm_gate_bias_and_residual_match_reference(device, num_rows, dtype):
    for norm, gated, residual in itertools.product((False, True), repeat=3):
        check(num_rows, 96, 300, dtype, device, norm=norm, bias=residual, residual=residual, gated=gated)


def test_float32_residual_stream_matches_reference(device):
    for norm, residual in ((True, False), (False, True)):
        settings = {"norm": norm, "bias": False, "residual": residual, "gated": norm}
        check(3, 64, 256, torch.bfloat16, device, **settings, residual_dtype=torch.float32)


@pytest.mark.parametrize(("num_columns", "width"), [(1, 8), (37, 100), (200, 130), (72, 513)])
@pytest.mark.parametrize("block_rows", [128, 8])
def test_odd_sizes_match_reference(device, num_columns, width, block_rows):
    for num_rows, gated in ((2, False), (20, True)):
        settings = {"norm": False, "bias": True, "residual": True, "gated": gated}
        check(num_rows, num_columns, width, torch.float32, device, **settings, block_rows=block_rows)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_split_product_matches_reference(device, num_rows):
    for gated in (False, True):
        config = tiles.block_fp8_config(num_rows, 64, 17, gated=gated, may_split=True)
        assert config.num_splits == 4
        settings = {"norm": gated, "bias": True, "residual": True, "gated": gated}
        check(num_rows, 64, 17 * 128, torch.float32, device, **settings)


def test_split_product_is_deterministic(device):
    x, weight = torch.randn(3, 17 * 128, device=device), make_weight(64, 17 * 128, device)
    first, second = (OPS.block_fp8_linear(x, None, 0.0, *weight, None, None, False) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_rows", [70, 130])
def test_many_rows_match_reference(device, num_rows):
    settings = {"norm": False, "bias": False, "residual": False, "gated": False}
    check(num_rows, 136, 200, torch.float32, device, **settings)


def test_zero_rows_give_empty_result(device):
    weight = make_weight(64, 128, device)
    out = OPS.block_fp8_linear(torch.empty(0, 128, device=device), None, 0.0, *weight, None, None, False)
    assert out.shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16, 17, 32, 64, 100, 128, 129, 131, 500, 2048])
def test_large_products_match_reference(device, num_rows):
    for num_columns, width in [(4096, 4096), (1024, 2048), (2112, 7168), (7168, 2048), (14336, 4096)]:
        for gated in (False, True):
            settings = {"norm": gated, "bias": True, "residual": not gated, "gated": gated}
            check(num_rows, num_columns, width, torch.bfloat16, device, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 48, 300])
def test_overlapping_launches_in_a_graph_see_finished_inputs(device, num_rows):
    torch.manual_seed(0)
    width = 1024
    norm_weight = torch.ones(width, device=device, dtype=torch.bfloat16)
    weights = [(make_weight(4 * width, width, device), make_weight(width, 2 * width, device)) for _ in range(32)]
    start = torch.randn(num_rows, width, device=device).to(torch.bfloat16)

    def run(*, synchronized):
        x = start
        for up, down in weights:
            hidden = gemm.norm_gate_up(x, norm_weight, 1e-5, up)
            if synchronized:
                torch.cuda.synchronize()
            x = gemm.linear(hidden, down, None, x)
            if synchronized:
                torch.cuda.synchronize()
        return x

    expected = run(synchronized=True)
    assert torch.equal(run(synchronized=False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(synchronized=False)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
