"""Tests the kernel that chooses experts against plain torch."""

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from nanovllm_kernels.moe import Routing, _route_op, moe_reference


def check_route(logits: Tensor, routing: Routing, bias: Tensor | None, *, near_ties: bool = False) -> None:
    """near_ties: scores may differ by less than their rounding error."""
    weights, ids = _route_op(logits, bias, *astuple(routing))
    expected_weights, expected_ids = moe_reference.route(logits, routing, bias)
    if near_ties:
        check_order(logits, routing, bias, ids, expected_ids)
    else:
        assert torch.equal(ids, expected_ids)
    same = (ids == expected_ids).all(1)
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=1e-7)


def check_order(logits: Tensor, routing: Routing, bias: Tensor | None, ids: Tensor, expected_ids: Tensor) -> None:
    routed = logits[:, :-1] if routing.shared == "gated" else logits
    scores = routed.softmax(-1) if routing.scoring == "softmax" else routed.sigmoid()
    choice = scores if bias is None else scores + bias
    found_scores, expected_scores = (choice.gather(1, each[:, : routing.top_k].long()) for each in (ids, expected_ids))
    torch.testing.assert_close(found_scores, expected_scores, rtol=1e-6, atol=0.0)
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
    # The multiples of 1/8 differ in bf16 too.
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
