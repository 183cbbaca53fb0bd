"""Tests mixtures of experts in plain torch against loops over tokens in float64."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels import fp8
from nanovllm_kernels.elementwise import norm_parts, prepare_norm_weight
from nanovllm_kernels.gemm import block_fp8
from nanovllm_kernels.moe import ChosenExperts, PackedExperts, Routing, fused_experts, pack_experts, policy, route
from nanovllm_kernels.platform import DeviceInfo


def route_naively(logits: Tensor, routing: Routing, bias: Tensor | None) -> list[dict[int, float]]:
    """Return each token's weights by expert."""
    found = []
    for row in logits.double():
        gate = None
        if routing.shared == "gated":
            row, gate = row[:-1], row[-1].item()
        scores = row.softmax(-1) if routing.scoring == "softmax" else row.sigmoid()
        choice = (scores if bias is None else scores + bias.double()).tolist()
        size = len(choice) // routing.num_groups
        groups = [range(begin, begin + size) for begin in range(0, len(choice), size)]
        groups.sort(key=lambda group: -sum(sorted(choice[i] for i in group)[-2:]))
        eligible = [i for group in groups[: routing.top_groups] for i in group]
        chosen = sorted(eligible, key=lambda i: -choice[i])[: routing.top_k]
        total = sum(scores[i].item() for i in chosen) if routing.renormalize else 1.0
        found.append({i: scores[i].item() / total * routing.scale for i in chosen})
        if routing.shared != "none":
            found[-1][len(choice)] = 1.0 if gate is None else 1 / (1 + math.exp(-gate))
    return found


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 5),
    groups=st.sampled_from([(1, 1, 8), (4, 2, 3), (2, 2, 6), (8, 3, 1), (3, 1, 5)]),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    with_bias=st.booleans(),
    shared=st.sampled_from(["none", "always", "gated"]),
    seed=st.integers(0, 1 << 20),
)
def test_route_matches_float64(num_tokens, groups, scoring, renormalize, scale, with_bias, shared, seed):
    num_groups, top_groups, size = groups
    generator = torch.Generator().manual_seed(seed)
    num_logits = num_groups * size + (shared == "gated")
    logits = torch.randn((num_tokens, num_logits), generator=generator) * 2
    bias = torch.randn(num_groups * size, generator=generator) if with_bias else None
    top_k = 1 + seed % (top_groups * size)
    routing = Routing(top_k, scoring, renormalize, num_groups, top_groups, scale, shared)
    weights, ids = route(logits, routing, bias)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (num_tokens, top_k + (shared != "none"))
    if shared != "none":
        assert (ids[:, -1] == num_groups * size).all()
    for expected, own_weights, own_ids in zip(
        route_naively(logits, routing, bias), weights.tolist(), ids.tolist(), strict=True
    ):
        found = dict(zip(own_ids, own_weights, strict=True))
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=1e-5)


def test_zero_scores_give_zero_weights():
    weights, _ = route(torch.full((1, 4), -1e4), Routing(2, "sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


def run_naively(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (own_weights, own_ids) in enumerate(zip(weights.double(), ids.tolist(), strict=True)):
        for weight, expert in zip(own_weights, own_ids, strict=True):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (w2[expert].double() @ (functional.silu(gate) * up))
    return out


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 20),
    num_experts=st.integers(1, 9),
    sizes=st.sampled_from([(8, 6), (33, 16), (16, 40)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    float32_x=st.booleans(),
    residual=st.sampled_from([None, "same", "float32"]),
    seed=st.integers(0, 1 << 20),
)
def test_fused_experts_match_float64(num_tokens, num_experts, sizes, dtype, float32_x, residual, seed):
    hidden_size, width = sizes
    torch.manual_seed(seed)
    w13, w2 = torch.randn(num_experts, 2 * width, hidden_size) * 0.3, torch.randn(num_experts, hidden_size, width) * 0.3
    w13, w2 = w13.to(dtype), w2.to(dtype)
    x = torch.randn(num_tokens, hidden_size).to(dtype)
    weights, ids = torch.rand(num_tokens, num_experts).topk(1 + seed % num_experts)
    expected = run_naively(x, w13, w2, weights, ids)
    x = x.float() if float32_x else x
    added = None
    if residual is not None:
        added = torch.randn(num_tokens, hidden_size).to(x.dtype if residual == "same" else torch.float32)
        expected += added.double()
    out = fused_experts(x, pack_experts(w13, w2), ChosenExperts(weights, ids.int()), added)
    assert out.dtype == (x.dtype if added is None else added.dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert (out.double() - expected).norm() < tolerance * (expected.norm() + 1)


def quantized_experts(num_experts: int, hidden_size: int, width: int) -> tuple[PackedExperts, Tensor, Tensor]:
    """Return random quantised experts and their dequantised weights."""
    w13, scales13, w2, scales2, plain13, plain2 = [], [], [], [], [], []
    for _ in range(num_experts):
        halves = [block_fp8.quantize_blocks(torch.randn(width, hidden_size) * 0.2) for _ in range(2)]
        down = block_fp8.quantize_blocks(torch.randn(hidden_size, width) * 0.2)
        w13.append(torch.cat([numbers for numbers, _ in halves]))
        scales13.append(torch.stack([scales for _, scales in halves]))
        w2.append(down[0])
        scales2.append(down[1])
        plain13.append(torch.cat([block_fp8.dequantize(block_fp8.BlockFP8Weight(*half)) for half in halves]))
        plain2.append(block_fp8.dequantize(block_fp8.BlockFP8Weight(*down)))
    packed = pack_experts(torch.stack(w13), torch.stack(w2), torch.stack(scales13), torch.stack(scales2))
    return packed, torch.stack(plain13), torch.stack(plain2)


@pytest.mark.parametrize(("hidden_size", "width"), [(40, 24), (130, 200)])
def test_block_fp8_experts_match_float64(hidden_size, width):
    experts, w13, w2 = quantized_experts(4, hidden_size, width)
    x = torch.randn(7, hidden_size)
    weights, ids = torch.rand(7, 4).topk(2)

    def rounded(rows: Tensor) -> Tensor:
        numbers, scales = block_fp8.quantize_groups(rows)
        return numbers.float() * scales.repeat_interleave(128, 1)[:, : rows.shape[1]]

    expected = torch.zeros(7, hidden_size)
    for token in range(7):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (rounded(x[token : token + 1]) @ w13[expert].T).chunk(2, -1)
            expected[token] += weight * (rounded(functional.silu(gate) * up) @ w2[expert].T)[0]
    torch.testing.assert_close(
        fused_experts(x, experts, ChosenExperts(weights, ids.int())), expected, rtol=1e-2, atol=1e-2
    )


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 12),
    num_experts=st.integers(2, 9),
    num_ranks=st.integers(2, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, fp8.DTYPE]),
    residual=st.sampled_from([None, "same", "float32"]),
    seed=st.integers(0, 1 << 20),
)
def test_results_of_ranks_add_up(num_tokens, num_experts, num_ranks, dtype, residual, seed):
    torch.manual_seed(seed)
    if dtype == fp8.DTYPE:
        w13, w2, scales13, scales2, *_ = quantized_experts(num_experts, 130, 40)[0]
    else:
        w13, w2 = torch.randn(num_experts, 32, 24).to(dtype) * 0.3, torch.randn(num_experts, 24, 16).to(dtype) * 0.3
        scales13 = scales2 = None
    tensors = w13, w2, scales13, scales2
    x = torch.randn(num_tokens, w2.shape[1]).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    weights, ids = torch.rand(num_tokens, num_experts).topk(1 + seed % num_experts)
    chosen = ChosenExperts(weights, ids.int())
    added = torch.zeros_like(x)
    if residual is not None:
        added = torch.randn(x.shape).to(x.dtype if residual == "same" else torch.float32)

    def run(experts: PackedExperts) -> Tensor:
        out = fused_experts(x, experts, chosen, None if residual is None else added.clone())
        assert out.dtype == added.dtype
        return out

    bounds = sorted({0, num_experts, *(1 + seed * rank % num_experts for rank in range(1, num_ranks))})
    total = torch.zeros(x.shape, dtype=torch.float64)
    for first, end in pairwise(bounds):
        own = [None if tensor is None else tensor[first:end] for tensor in tensors]
        result = run(pack_experts(*own, first_id=first, num_all_experts=num_experts))
        is_unused = ((ids < first) | (ids >= end)).all(1)
        assert torch.equal(result[is_unused], added[is_unused])
        total += result.double() - added.double()
    expected = run(pack_experts(*tensors)).double() - added.double()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert (total - expected).norm() < tolerance * (expected.norm() + 1)


@pytest.mark.parametrize(("first_id", "num_all_experts"), [(-1, 8), (5, 8), (1, None), (0, 3)])
def test_ids_of_a_rank_outside_all_experts_are_rejected(first_id, num_all_experts):
    with pytest.raises(ValueError, match=f"first_id={first_id}"):
        pack_experts(torch.randn(4, 8, 16), torch.randn(4, 16, 4), first_id=first_id, num_all_experts=num_all_experts)


def test_a_rank_without_experts_is_rejected():
    with pytest.raises(ValueError, match="at least one expert"):
        pack_experts(torch.randn(0, 8, 16), torch.randn(0, 16, 4), first_id=2, num_all_experts=4)


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 32, 33, 511, 512, 4096])
@pytest.mark.parametrize("quantized", [False, True])
def test_each_rank_chooses_the_kernel_of_all_experts(num_tokens, quantized, monkeypatch):
    hopper = DeviceInfo("Hopper", (9, 0), total_memory=0, num_sms=132, has_triton=True)
    monkeypatch.setattr(policy, "describe_device", lambda _: hopper)
    device, scales = torch.device("cuda"), torch.empty(1) if quantized else None
    w13, w2 = torch.empty(256, 2, 1), torch.empty(1).expand(256, 512, 128)
    whole = pack_experts(w13, w2, scales, scales)
    own = pack_experts(w13[:64], w2[:64], scales, scales, first_id=64, num_all_experts=256)
    kernels = {policy.choose_kernel(num_tokens, 8, each, torch.bfloat16, device) for each in (whole, own)}
    assert len(kernels) == 1
    assert ("specialized" in kernels) == (quantized and num_tokens >= 512)


@pytest.mark.parametrize("shared", ["none", "gated"])
@pytest.mark.parametrize("first_id", [0, 2])
def test_compiled_experts_match_eager_experts(first_id, shared):
    w13, w2, bias = torch.randn(7, 32, 16), torch.randn(7, 16, 16), torch.randn(6)
    routing = Routing(2, "sigmoid", num_groups=2, top_groups=1, shared=shared)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = route(logits, routing, bias)
        experts = pack_experts(w13[first_id:], w2[first_id:], first_id=first_id, num_all_experts=7)
        return fused_experts(x, experts, ChosenExperts(weights, ids), x)

    x, logits = torch.randn(5, 16), torch.randn(5, 6 + (shared == "gated"))
    expected = layer(x.clone(), logits)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, logits), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_parts_matches_two_norms(dtype):
    x, first, second = (torch.randn(shape).to(dtype) for shape in [(3, 20), (8,), (6,)])
    expected = torch.cat(
        (
            functional.rms_norm(x[:, :8].double(), (8,), first.double(), 1e-5),
            functional.rms_norm(x[:, 8:14].double(), (6,), second.double(), 1e-5),
            x[:, 14:].double(),
        ),
        -1,
    )
    for weights in ((first, second), (prepare_norm_weight(first), prepare_norm_weight(second))):
        found = x.clone()
        norm_parts(found, (8, 6), weights, 1e-5)
        torch.testing.assert_close(found.double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 1), (7, 128), (600, 8), (4096, 256), (9, 3)])
def test_max_tiles_covers_the_worst_case(num_pairs, num_experts):
    for block_m in (16, 128):
        # In the worst case, each other expert has one pair.
        others = min(num_experts - 1, num_pairs - 1)
        worst = others + -(-(num_pairs - others) // block_m)
        even = num_experts * -(-(num_pairs // num_experts) // block_m)
        assert policy.max_tiles(num_pairs, num_experts, block_m) >= max(worst, min(even, num_pairs))
