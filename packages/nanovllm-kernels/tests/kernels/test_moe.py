"""Tests the kernels of experts against plain torch."""

import pytest
import torch
from torch import Tensor

from nanovllm_kernels.gemm import block_fp8
from nanovllm_kernels.moe import (
    ChosenExperts,
    PackedExperts,
    _fused_experts_op,
    moe_reference,
    policy,
)
from nanovllm_kernels.platform import describe_device, has_cuda

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def check_experts(
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    width: int,
    top_k: int,
    dtype: torch.dtype,
    device: str,
    *,
    residual: torch.dtype | None = None,
    quantized: bool = False,
    favourite: bool = False,
    shared: bool = False,
) -> Tensor:
    """Compare with the reference, with `x` a view of longer rows, and return the kernels' result.

    favourite: all tokens choose the same experts. shared: each token's last expert is the last of all.
    """
    generator = torch.Generator(device).manual_seed(num_tokens * 31 + width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x = draw(num_tokens, hidden_size + 16).to(dtype)[:, :hidden_size]
    w13, w2 = draw(num_experts, 2 * width, hidden_size) * 0.2, draw(num_experts, hidden_size, width) * 0.2
    scales13 = scales2 = None
    if quantized:
        gates = [block_fp8.quantize_blocks(half) for weight in w13 for half in weight.chunk(2)]
        w13 = torch.stack([numbers for numbers, _ in gates]).view(num_experts, 2 * width, hidden_size)
        scales13 = torch.stack([scales for _, scales in gates]).unflatten(0, (num_experts, 2))
        downs = [block_fp8.quantize_blocks(weight) for weight in w2]
        w2, scales2 = (torch.stack(parts) for parts in zip(*downs, strict=True))
    else:
        w13, w2 = w13.to(dtype), w2.to(dtype)
    scores = draw(num_tokens, num_experts - shared)
    weights, ids = scores.topk(top_k - shared, -1)
    if shared:
        weights = torch.cat((weights, draw(num_tokens, 1)), -1)
        ids = torch.cat((ids, torch.full_like(ids[:, :1], num_experts - 1)), -1)
    ids = (ids[:1].expand(num_tokens, -1) if favourite else ids).int().contiguous()
    added = None if residual is None else draw(num_tokens, hidden_size).to(residual)
    counters = torch.zeros(policy.num_counters(hidden_size), dtype=torch.int32, device=device)
    arguments = (w13, w2, scales13, scales2)
    results = [_fused_experts_op(x, *arguments, counters, weights, ids, added) for _ in range(2)]
    assert torch.equal(*results)
    assert not counters.any()
    assert results[0].dtype == (x.dtype if residual is None else residual)
    wide = None if added is None else added.double()
    if quantized:
        experts = PackedExperts(*arguments, None)
        expected = moe_reference.fused_experts(x.float(), experts, ChosenExperts(weights, ids), None)
        expected = expected + (0 if added is None else added.float())
    else:
        experts = PackedExperts(w13.double(), w2.double(), None, None, None)
        expected = moe_reference.fused_experts(x.double(), experts, ChosenExperts(weights, ids), wide)
    # An e4m3 value that is rounded the other way differs by 1/8; such values are rare.
    tolerance = TOLERANCE[dtype] + (0.02 if quantized else 0.0)
    assert (results[0].double() - expected).norm() < tolerance * expected.norm()
    return results[0]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "width"),
    [(1, 4, 1, 32, 24), (2, 16, 3, 40, 80), (3, 5, 3, 32, 24), (3, 5, 3, 40, 80), (20, 6, 2, 32, 24)],
)
def test_few_tokens_match_reference(num_tokens, num_experts, top_k, hidden_size, width, device):
    dtype, residual = (torch.float16, torch.float32) if width == 24 else (torch.float32, None)
    check_experts(num_tokens, num_experts, hidden_size, width, top_k, dtype, device, residual=residual)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 14), (1, 40), (3, 12), (3, 40)])
@pytest.mark.parametrize("quantized", [False, True])
def test_few_tokens_with_shared_expert_match_reference(num_tokens, num_experts, quantized, device):
    """11 experts per token, as in Qwen3-Next: not a power of two."""
    check_experts(
        *(num_tokens, num_experts, 32, 24, 11, torch.float32, device),
        residual=torch.float32 if num_tokens > 1 else None,
        quantized=quantized,
        shared=True,
    )


@pytest.fixture
def few_are_fewer(monkeypatch):
    monkeypatch.setattr(policy, "MAX_UNSORTED_TOKENS", 2)
    monkeypatch.setattr(policy, "MAX_UNSORTED_FP8_TOKENS", 2)


@pytest.mark.usefixtures("few_are_fewer")
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(5, 20, 2), (15, 2, 2), (24, 1, 1), (40, 2, 2), (70, 2, 2)], ids=str
)
def test_many_tokens_match_reference(num_tokens, num_experts, top_k, device):
    check_experts(num_tokens, num_experts, 48, 40, top_k, torch.float16, device)
    if num_tokens < 20:
        check_experts(num_tokens, num_experts, 48, 40, top_k, torch.float32, device, residual=torch.float32)


@pytest.mark.usefixtures("few_are_fewer")
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(3, 17, 9), (40, 5, 3)])
@pytest.mark.parametrize("quantized", [False, True])
def test_many_tokens_with_shared_expert_match_reference(num_tokens, num_experts, top_k, quantized, device):
    """The shared expert follows 2 ** n others, and has more than one tile of rows."""
    sizes = num_tokens, num_experts, 48, 40, top_k
    check_experts(*sizes, torch.float32, device, residual=torch.float32, quantized=quantized, shared=True)


def test_many_tokens_of_one_expert_match_reference(device):
    check_experts(policy.MAX_UNSORTED_TOKENS + 80, 4, 32, 24, 1, torch.float16, device, favourite=True)


@pytest.mark.usefixtures("small_parts")
def test_many_tiles_and_parts_match_reference(device, monkeypatch):
    from nanovllm_kernels.moe import triton_grouped

    monkeypatch.setattr(triton_grouped, "SUM_BLOCK_COLUMNS", 16)
    check_experts(100, 4, 32, 24, 2, torch.float16, device)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_fp8_few_tokens_match_reference(num_tokens, device):
    check_experts(num_tokens, 3, 130, 40, 2, torch.float32, device, quantized=True)


@pytest.mark.parametrize(("tile", "top_k", "shared"), [(1024, 3, False), (8192, 3, True), (8192, 5, True)])
def test_fp8_one_token_with_partial_tiles_matches_reference(tile, top_k, shared, device, monkeypatch):
    """Columns and groups of both products are no multiples of their tiles."""
    monkeypatch.setattr(policy, "MAX_MATVEC_TILE_ELEMENTS", tile)
    sizes = 1, 6, 330, 134, top_k
    check_experts(*sizes, torch.float16, device, quantized=True, residual=torch.float32, shared=shared)


@pytest.mark.usefixtures("few_are_fewer")
@pytest.mark.parametrize(("num_tokens", "favourite"), [(1, False), (2, True), (7, False), (70, True), (140, False)])
def test_fp8_many_tokens_match_reference(num_tokens, favourite, device):
    residual = torch.float32 if favourite else None
    hidden_size, width = (130, 40) if num_tokens > 10 else (200, 144) if favourite or num_tokens > 2 else (48, 40)
    check_experts(
        *(num_tokens, 3, hidden_size, width, 2, torch.float32, device),
        residual=residual,
        quantized=True,
        favourite=favourite,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda() or describe_device(torch.device("cuda")).capability != (9, 0), reason="needs Hopper")
@pytest.mark.parametrize(("num_experts", "hidden_size", "width", "top_k"), [(17, 768, 384, 4), (9, 256, 128, 3)])
@pytest.mark.parametrize("favourite", [False, True])
@pytest.mark.parametrize("num_tokens", [9, 200, 1000, 8192])
def test_specialized_kernel_equals_plain_kernel(
    num_tokens, favourite, num_experts, hidden_size, width, top_k, device, monkeypatch
):
    """The results are equal bit for bit."""
    found = []
    for least in (0, 1 << 30):
        monkeypatch.setattr(policy, "MIN_SPECIALIZED_AVERAGE_ROWS", least)
        sizes = num_tokens, num_experts, hidden_size, width, top_k
        found.append(check_experts(*sizes, torch.bfloat16, device, quantized=True, favourite=favourite))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 64, 65, 200, 1000, 4000])
@pytest.mark.parametrize(
    ("num_experts", "hidden_size", "width", "top_k", "shared"),
    [(128, 2048, 768, 8, False), (513, 2048, 512, 11, True), (64, 3072, 1536, 8, False), (65, 7168, 2048, 9, True)],
)
def test_large_experts_match_reference(num_tokens, num_experts, hidden_size, width, top_k, shared, quantized, device):
    sizes = num_tokens, num_experts, hidden_size, width, top_k
    check_experts(*sizes, torch.bfloat16, device, quantized=quantized, shared=shared)
