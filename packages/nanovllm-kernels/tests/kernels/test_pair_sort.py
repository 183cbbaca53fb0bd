"""Tests the sort of (token, expert) pairs by expert."""

import pytest
import torch
from torch import Tensor

from nanovllm_kernels.moe import policy


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
