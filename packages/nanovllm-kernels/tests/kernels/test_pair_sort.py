"""Tests the sort of (token, expert) pairs by expert, and the gather of rows in sorted order."""

import pytest
import torch
from torch import Tensor

from nanovllm_kernels import fp8
from nanovllm_kernels.moe import policy


def check_pair_sort(ids: Tensor, num_experts: int, block_m: int, first_id: int | None = None) -> None:
    """first_id: id of the rank's first expert. None: the rank has all experts."""
    from nanovllm_kernels.moe import triton_sort

    order, starts, tiles = (each.cpu() for each in triton_sort.sort_pairs(ids, num_experts, block_m, first_id))
    experts = ids.flatten().cpu() - (first_id or 0)
    own_pairs = ((experts >= 0) & (experts < num_experts)).nonzero().flatten()
    order = order[: len(own_pairs)]
    assert torch.equal(order.long().sort().values, own_pairs)
    assert torch.equal(experts[order], experts[own_pairs].sort().values)
    ends = torch.bincount(experts[own_pairs], minlength=num_experts).cumsum(0).tolist()
    assert starts.tolist() == [0, *ends]
    expected = [[e, first_pair] for e, end in enumerate(ends) for first_pair in range(starts[e], end, block_m)]
    assert tiles[: 1 + len(expected)].tolist()[1:] == expected
    assert tiles[0, 0] == len(expected)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("num_tokens", [1, 10, 16, 31, 33, 64])
@pytest.mark.parametrize("num_experts", [3, 16])
@pytest.mark.parametrize("block_m", [4, 16])
def test_pairs_are_sorted_and_tiled(num_tokens, num_experts, block_m, device):
    ids = torch.rand((num_tokens, num_experts - 1), device=device).argsort(1)[:, :2].int()
    check_pair_sort(torch.cat((ids, torch.full_like(ids[:, :1], num_experts - 1)), 1), num_experts, block_m)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("num_tokens", [1, 10, 16, 33, 64])
@pytest.mark.parametrize(("first_id", "num_experts"), [(0, 8), (5, 1), (8, 9), (17, 3)])
def test_only_pairs_of_own_experts_are_sorted(num_tokens, first_id, num_experts, device):
    ids = torch.rand((num_tokens, 17), device=device).argsort(1)[:, :3].int().contiguous()
    check_pair_sort(ids, num_experts, 4, first_id)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k"), [(513, 11), (256, 8)])
@pytest.mark.parametrize("num_tokens", [64, 256, 1024, 8192])
def test_many_pairs_are_sorted_and_tiled(num_tokens, num_experts, top_k):
    ids = torch.rand((num_tokens, num_experts), device="cuda").topk(top_k, 1).indices.int()
    for block_m in (16, policy.GLUON_TILE_ROWS):
        check_pair_sort(ids, num_experts, block_m)
        check_pair_sort(ids, num_experts // 4, block_m, num_experts // 2)


@pytest.mark.parametrize("first_id", [None, 0, 4, 12])
def test_gathered_rows_follow_the_order_of_pairs(first_id, device):
    from nanovllm_kernels.moe import gluon_grouped, triton_sort

    num_tokens, top_k, depth, num_experts = 50, 3, 384, 12 if first_id is None else 4
    x = torch.randn(num_tokens, depth, device=device).to(fp8.DTYPE)
    x_scales, weights = torch.rand(num_tokens, 3, device=device), torch.rand(num_tokens, top_k, device=device)
    ids = torch.rand(num_tokens, 12, device=device).argsort(1)[:, :top_k].int().contiguous()
    pairs = triton_sort.sort_pairs(ids, num_experts, policy.GLUON_TILE_ROWS, first_id)
    rows = torch.full((num_tokens * top_k, depth), torch.nan, device=device).to(fp8.DTYPE)
    row_scales = torch.full((3, len(rows)), torch.nan, device=device)
    row_weights = torch.full((len(rows),), torch.nan, device=device)
    gluon_grouped._gather_rows[(-(-len(rows) // gluon_grouped.GATHER_ROWS),)](
        *(x, x_scales, weights, pairs.order, rows, row_scales, row_weights, len(rows), len(rows)),
        *(x.stride(0), *x_scales.stride(), pairs.starts, num_experts),
        PARTIAL=first_id is not None,
        K=depth,
        TOP_K=top_k,
        PADDED_GROUPS=4,
        ROWS=gluon_grouped.GATHER_ROWS,
        BLOCK=256,
        OVERLAP=False,
    )
    num_pairs = int(pairs.starts[num_experts])
    own_pairs = pairs.order[:num_pairs].long()
    tokens = own_pairs // top_k
    assert torch.equal(rows[:num_pairs].float(), x[tokens].float())
    assert torch.equal(row_scales[:, :num_pairs], x_scales[tokens].T)
    assert torch.equal(row_weights[:num_pairs], weights.flatten()[own_pairs])
    assert rows[num_pairs:].float().isnan().all()
    assert row_scales[:, num_pairs:].isnan().all()
    assert row_weights[num_pairs:].isnan().all()
