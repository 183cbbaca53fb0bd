"""Tests the kernels of mixtures of experts against plain torch, with all options."""

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from nanovllm_kernels.elementwise import norm_parts, rms_norm
from nanovllm_kernels.gemm import block_fp8
from nanovllm_kernels.moe import (
    ChosenExperts,
    PackedExperts,
    Routing,
    _fused_experts_op,
    _route_op,
    moe_reference,
    policy,
)
from nanovllm_kernels.platform import describe_device, has_cuda

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def check_route(logits: Tensor, routing: Routing, bias: Tensor | None, *, near_ties: bool = False) -> None:
    """near_ties: scores may differ by less than their rounding, so that either expert may come first."""
    weights, ids = _route_op(logits, bias, *astuple(routing))
    expected_weights, expected_ids = moe_reference.route(logits, routing, bias)
    if near_ties:
        check_order(logits, routing, bias, ids, expected_ids)
    else:
        assert torch.equal(ids, expected_ids)
    same = (ids == expected_ids).all(1)
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=1e-7)


def check_order(logits: Tensor, routing: Routing, bias: Tensor | None, ids: Tensor, expected_ids: Tensor) -> None:
    """Assert that the ids are as expected, except where scores are equal up to rounding."""
    routed = logits[:, :-1] if routing.shared == "gated" else logits
    scores = routed.softmax(-1) if routing.scoring == "softmax" else routed.sigmoid()
    choice = scores if bias is None else scores + bias
    found, wanted = (choice.gather(1, each[:, : routing.top_k].long()) for each in (ids, expected_ids))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    assert (ids.sort(1).values.diff() > 0).all()
    assert torch.equal(ids[:, routing.top_k :], expected_ids[:, routing.top_k :])
    assert (ids == expected_ids).all(1).double().mean() > 0.999


@pytest.mark.parametrize(
    "routing",
    [
        Routing(2, "softmax", renormalize=False),
        Routing(3, "softmax"),
        Routing(1, "sigmoid", scale=2.5),
        Routing(8, "sigmoid", num_groups=4, top_groups=2),
        Routing(5, "sigmoid", num_groups=2, top_groups=1, scale=2.5),
        Routing(4, "softmax", num_groups=8, top_groups=5),
        Routing(3, "softmax", shared="gated"),
        Routing(2, "sigmoid", shared="always", scale=2.5),
        Routing(4, "sigmoid", num_groups=4, top_groups=2, shared="gated", renormalize=False),
        Routing(8, "sigmoid", num_groups=4, top_groups=2, shared="always"),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_experts", [24, 64])
def test_route_matches_reference(routing, num_experts, device):
    # The logits differ in bf16 too.
    order = torch.rand((3, num_experts + 5), device=device).argsort(-1)
    logits = ((order - 10) / 8).to(torch.bfloat16 if num_experts == 24 else torch.float32)
    logits = logits[:, : num_experts + (routing.shared == "gated")]
    bias = torch.rand(num_experts, device=device) * 0.01
    check_route(logits, routing, bias)
    if routing.num_groups == 1:
        check_route(logits, routing, None)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [128, 256, 512])
@pytest.mark.parametrize("num_tokens", [1, 5000])
def test_large_route_matches_reference(num_tokens, num_experts, device):
    logits, bias = torch.randn(num_tokens, num_experts, device=device), torch.randn(num_experts, device=device)
    for routing in (Routing(8), Routing(10, "sigmoid"), Routing(8, "sigmoid", True, 8, 4, 2.5)):
        check_route(logits, routing, bias, near_ties=True)
    check_route(logits[:, :-1], Routing(10, shared="always"), None, near_ties=True)
    check_route(logits, Routing(10, shared="gated"), None, near_ties=True)


def test_nan_logits_give_valid_expert_ids(device):
    logits = torch.full((2, 20), torch.nan, device=device)
    logits[1] = torch.arange(20, device=device) / 4
    for groups in ((1, 1), (4, 2)):
        _, ids = _route_op(logits, None, 3, "sigmoid", True, *groups, 1.0, "always")
        assert ((ids[0, :3] >= 0) & (ids[0, :3] < 20)).all()
        assert ids[1].tolist() == [19, 18, 17, 20]


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


@pytest.fixture
def small_parts(monkeypatch):
    from nanovllm_kernels.moe import triton_sort

    sizes = {"MAX_SINGLE_PART_PAIRS": 32, "SMALL_PART_PAIRS": 32, "MAX_SMALL_PARTS": 3}
    sizes |= {"LARGE_PART_PAIRS": 64, "PARTS_PER_LOAD": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(triton_sort, name, size)


def check_sorted(ids: Tensor, num_experts: int, block_m: int) -> None:
    from nanovllm_kernels.moe import triton_sort

    order, starts, tiles = (each.cpu() for each in triton_sort.sort_pairs(ids, num_experts, block_m))
    flat = ids.flatten().cpu()
    assert torch.equal(order.sort().values, torch.arange(len(flat), dtype=torch.int32))
    assert torch.equal(flat[order], flat.sort().values)
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0).tolist()
    assert starts.tolist() == [0, *ends]
    expected = [[e, place] for e, end in enumerate(ends) for place in range(starts[e], end, block_m)]
    assert tiles[: 1 + len(expected)].tolist()[1:] == expected
    assert tiles[0, 0] == len(expected)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("num_tokens", [1, 10, 16, 31, 33, 64])
@pytest.mark.parametrize("num_experts", [3, 16])
@pytest.mark.parametrize("block_m", [4, 16])
def test_pairs_are_sorted_and_tiled(num_tokens, num_experts, block_m, device):
    """With one, few and many parts; the last expert has every token."""
    ids = torch.rand((num_tokens, num_experts - 1), device=device).argsort(1)[:, :2].int()
    check_sorted(torch.cat((ids, torch.full_like(ids[:, :1], num_experts - 1)), 1), num_experts, block_m)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k"), [(513, 11), (256, 8)])
@pytest.mark.parametrize("num_tokens", [64, 256, 1024, 8192])
def test_many_pairs_are_sorted_and_tiled(num_tokens, num_experts, top_k):
    ids = torch.rand((num_tokens, num_experts), device="cuda").topk(top_k, 1).indices.int()
    for block_m in (16, policy.SPECIALIZED_TILE_ROWS):
        check_sorted(ids, num_experts, block_m)


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


@pytest.mark.parametrize(("sizes", "width"), [((48, 16), 100), ((96, 32), 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_norm_parts_matches_two_norms(sizes, width, dtype, device):
    x = torch.randn((3, width + 8), device=device).to(dtype)[:, :width]
    first, second = (torch.randn(size, device=device).to(dtype) for size in sizes)
    expected = x.clone()
    begin, end = sizes[0], sum(sizes)
    expected[:, :begin] = rms_norm(x[:, :begin], first, 1e-5)
    expected[:, begin:end] = rms_norm(x[:, begin:end], second, 1e-5)
    torch.ops.nanovllm.norm_parts(x, list(sizes), first, second, 1e-5)
    torch.testing.assert_close(x, expected, rtol=1e-3, atol=1e-5)
    assert norm_parts(x, sizes, (first, second), 1e-5) is None
