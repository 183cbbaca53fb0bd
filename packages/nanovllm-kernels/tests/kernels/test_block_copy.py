import pytest
import torch
from block_caches import make_caches

from nanovllm_kernels.block_copy import BlockParts, block_copy_reference, triton_block_copy
from nanovllm_kernels.block_copy.block_parts import CHUNK_WORDS


def copy_blocks(parts, blocks, rows, *, writes_caches):
    triton_block_copy.copy_blocks(parts, parts.make_chunks(), blocks, rows, writes_caches=writes_caches)


def test_blocks_are_copied_to_rows_and_back(device):
    caches = make_caches(device)
    parts, blocks = BlockParts(caches), torch.tensor([6, 0, 3], device=device)
    rows, expected = torch.empty((2, 3, parts.row_bytes), dtype=torch.uint8, device=device)
    copy_blocks(parts, blocks, rows, writes_caches=False)
    block_copy_reference.gather_blocks(caches, blocks, expected)
    assert torch.equal(rows, expected)

    copies = [cache.clone() for cache in caches]
    targets = torch.tensor([1, 5, 2], device=device)
    copy_blocks(parts, targets, rows, writes_caches=True)
    block_copy_reference.scatter_blocks(copies, targets, rows)
    for cache, copy in zip(caches, copies, strict=True):
        assert torch.equal(cache.view(torch.uint8), copy.view(torch.uint8))


def test_no_block_is_copied_for_an_empty_list(device):
    parts = BlockParts(make_caches(device))
    empty = torch.empty(0, dtype=torch.int64, device=device)
    copy_blocks(parts, empty, torch.empty((0, parts.row_bytes), dtype=torch.uint8, device=device), writes_caches=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_blocks_beyond_two_to_the_31_elements_are_copied(dtype, device, tmp_path):
    """On a CPU, the cache is a sparse file: only used blocks take memory."""
    block_elements = CHUNK_WORDS + 8
    num_blocks = (1 << 31) // block_elements + 3
    if device == "cuda":
        cache = torch.zeros((num_blocks, block_elements), dtype=dtype, device=device)
    else:
        num_elements = num_blocks * block_elements
        cache = torch.from_file(str(tmp_path / "cache"), shared=True, size=num_elements, dtype=dtype).view(
            num_blocks, -1
        )
    last = num_blocks - 1
    cache[last] = torch.arange(block_elements, device=device).to(dtype)
    parts = BlockParts([cache])
    rows = torch.empty((1, parts.row_bytes), dtype=torch.uint8, device=device)
    copy_blocks(parts, torch.tensor([last], device=device), rows, writes_caches=False)
    assert torch.equal(rows[0].view(dtype), cache[last])
    copy_blocks(parts, torch.tensor([last - 1], device=device), rows, writes_caches=True)
    assert torch.equal(cache[last - 1], cache[last])
    assert not cache[last - 2].any()
