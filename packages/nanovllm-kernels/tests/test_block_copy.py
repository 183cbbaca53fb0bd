import pytest
import torch
from block_caches import make_caches

from nanovllm_kernels.block_copy import BlockParts, gather_blocks, scatter_blocks


def test_a_row_has_the_bytes_of_the_block_in_every_cache():
    caches = make_caches("cpu")
    parts = BlockParts(caches)
    rows = torch.empty((2, parts.row_bytes), dtype=torch.uint8)
    gather_blocks(parts, torch.tensor([4, 0]), rows)
    for row, block in enumerate((4, 0)):
        expected = torch.cat([cache[block].contiguous().flatten().view(torch.uint8) for cache in caches])
        assert torch.equal(rows[row], expected)


def test_scattered_rows_restore_the_blocks_and_leave_others_alone():
    caches = make_caches("cpu")
    originals = [cache.clone() for cache in caches]
    parts = BlockParts(caches)
    rows = torch.empty((3, parts.row_bytes), dtype=torch.uint8)
    gather_blocks(parts, torch.tensor([1, 2, 3]), rows)
    scatter_blocks(parts, torch.tensor([5, 3, 4]), rows)
    for cache, original in zip(caches, originals, strict=True):
        expected = original[[0, 1, 2, 2, 3, 1, 6]]
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_words_are_as_wide_as_all_sizes_and_addresses_allow():
    buffer = torch.zeros(1 << 10, dtype=torch.uint8)
    wide, narrow = buffer[:512].view(8, 64), buffer[512:560].view(8, 6)
    assert BlockParts([wide]).word_dtype == torch.int64
    assert BlockParts([wide, narrow]).word_dtype == torch.int16
    assert BlockParts([wide, buffer[1:513].view(8, 64)]).word_dtype == torch.int8


def test_caches_whose_blocks_are_not_contiguous_are_rejected():
    with pytest.raises(ValueError, match="must be contiguous"):
        BlockParts([torch.zeros(4, 6, 8).transpose(1, 2)])


@pytest.mark.parametrize(("num_rows", "width_difference"), [(1, 0), (2, 1)])
def test_rows_of_another_shape_are_rejected(num_rows, width_difference):
    parts = BlockParts(make_caches("cpu"))
    rows = torch.empty((num_rows, parts.row_bytes + width_difference), dtype=torch.uint8)
    with pytest.raises(ValueError, match="rows must be"):
        gather_blocks(parts, torch.tensor([1, 2]), rows)
