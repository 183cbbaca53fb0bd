"""Copies blocks in plain torch."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def gather_blocks(caches: Sequence[Tensor], blocks: Tensor, rows: Tensor) -> None:
    """See the package's `gather_blocks`."""
    for cache, part in _pair_with_rows(caches, rows):
        part.copy_(cache.index_select(0, blocks))


def scatter_blocks(caches: Sequence[Tensor], blocks: Tensor, rows: Tensor) -> None:
    """See the package's `scatter_blocks`."""
    for cache, part in _pair_with_rows(caches, rows):
        cache.index_copy_(0, blocks, part)


def _pair_with_rows(caches: Sequence[Tensor], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs (cache as bytes [num_blocks, num_bytes], the cache's part of the rows [n, num_bytes])."""
    first_byte = 0
    for cache in caches:
        num_bytes = cache[0].numel() * cache.itemsize
        yield cache.flatten(1).view(torch.uint8), rows[:, first_byte : first_byte + num_bytes]
        first_byte += num_bytes
