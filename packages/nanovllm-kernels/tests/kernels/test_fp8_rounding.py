"""Tests that all kernels round rows to the same FP8 bits as plain torch.

The weights have a single 1 per row, so that each result is one rounded input of the kernel.
"""

import pytest
import torch
from torch import Tensor

from nanovllm_kernels import fp8
from nanovllm_kernels.gemm import block_fp8_reference as reference
from nanovllm_kernels.gemm import tiles as gemm_tiles
from nanovllm_kernels.gemm.block_fp8 import GROUP
from nanovllm_kernels.moe import _fused_experts_op, policy

OPS = torch.ops.nanovllm
NUM_ROWS = 20
# silu(256) is 256 in float32.
GATE = 256.0


@pytest.fixture
def rows(device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10.0 ** torch.linspace(-4, 4, NUM_ROWS).unsqueeze(1)
    rows = torch.randn((NUM_ROWS, GROUP), generator=generator) * magnitudes
    rows[7] = 0.0
    return rows.to(device)


def round_to_fp8(rows: Tensor) -> Tensor:
    return reference.dequantize_groups(*(part.cpu() for part in reference.quantize_groups(rows.cpu()))).to(rows.device)


def one_hot_weight(num_rows: int, width: int, columns: Tensor, device: str) -> Tensor:
    weight = torch.zeros((num_rows, width), device=device)
    weight[torch.arange(len(columns)), columns] = 1.0
    return weight.to(fp8.DTYPE)


def test_quantize_groups_rounds_like_torch(rows):
    numbers, scales = OPS.quantize_groups(rows)
    expected, expected_scales = (part.to(rows.device) for part in reference.quantize_groups(rows.cpu()))
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("num_rows", [1, gemm_tiles.MAX_FUSED_FP8_ROWS, NUM_ROWS])
def test_block_fp8_linear_rounds_like_torch(rows, num_rows, device):
    weight = one_hot_weight(GROUP, GROUP, torch.arange(GROUP), device)
    scales, residual = torch.ones((1, 1), device=device), torch.zeros((num_rows, GROUP), device=device)
    found = OPS.block_fp8_linear(rows[:num_rows], None, 0.0, weight, scales, GROUP, None, None, residual, False)
    assert torch.equal(found, round_to_fp8(rows[:num_rows]))


@pytest.mark.parametrize("num_tokens", [1, policy.MAX_UNSORTED_FP8_TOKENS, NUM_ROWS])
def test_expert_kernels_round_like_torch(rows, num_tokens, device):
    """The three numbers of tokens select different kernels."""
    x = torch.cat((rows, torch.full_like(rows, GATE)), 1)[:num_tokens]
    gate = one_hot_weight(GROUP, 2 * GROUP, torch.full((GROUP,), GROUP), device)
    up = one_hot_weight(GROUP, 2 * GROUP, torch.arange(GROUP), device)
    down = one_hot_weight(2 * GROUP, GROUP, torch.arange(GROUP), device)
    w13, w2 = (
        torch.cat((gate.float(), up.float())).to(fp8.DTYPE).expand(2, -1, -1).contiguous(),
        torch.stack((down,) * 2),
    )
    scales13, scales2 = torch.ones((2, 2, 1, 2), device=device), torch.ones((2, 2, 1), device=device)
    counters = torch.zeros(policy.num_counters(2 * GROUP), dtype=torch.int32, device=device)
    weights = torch.ones((num_tokens, 1), device=device)
    ids = torch.arange(num_tokens, device=device).remainder(2).int().unsqueeze(1)
    found = _fused_experts_op(x, w13, w2, scales13, scales2, counters, 0, 2, weights, ids, None)
    gates = round_to_fp8(x[:, GROUP:])[:, :1]
    assert torch.equal(found[:, :GROUP], round_to_fp8(gates * round_to_fp8(x[:, :GROUP])))
