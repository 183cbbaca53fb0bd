"""Tests the division by which FP8 kernels scale a group."""

import pytest
import torch

from nanovllm_kernels import fp8

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triton_fp8 = pytest.importorskip("nanovllm_kernels.triton_fp8")


@triton.jit
def _store_factors(magnitudes_ptr, factors_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(factors_ptr + offsets, triton_fp8.divide_max_e4m3_by(tl.load(magnitudes_ptr + offsets)))


@pytest.mark.parametrize("magnitude", [fp8.MIN_GROUP_MAGNITUDE, 1.0, 1e30])
def test_quotient_rounds_like_torch_for_every_significand(magnitude, device):
    exponent = torch.tensor(magnitude).view(torch.int32).item() >> 23
    magnitudes = (torch.arange(1 << 23, dtype=torch.int32, device=device) + (exponent << 23)).view(torch.float32)
    quotients = torch.empty_like(magnitudes)
    block = 1024 if magnitudes.is_cuda else 1 << 20
    _store_factors[(len(magnitudes) // block,)](magnitudes, quotients, block)
    assert torch.equal(quotients, torch.full_like(magnitudes, fp8.MAX_E4M3) / magnitudes)
