"""Describes the parts of a block: each cache holds one part of every block."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Maximum number of words (see `BlockParts.word_dtype`) in a chunk. One program of the kernel copies one chunk.
CHUNK_WORDS = 2048
_WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class BlockParts:
    """Caches that each hold one part of every block. A row is the bytes of one block's parts, in the order of `caches`.

    caches: [num_blocks, ...] each, on one device, with contiguous blocks. Shapes and dtypes may differ.
    row_bytes: number of bytes of a row.
    word_dtype: dtype of words: the widest integer dtype, up to 8 bytes, in which all parts of blocks can be copied.
    chunks: int64 [n, 4], one tuple per chunk of a block: (address of the chunk in block 0, distance between
        consecutive blocks in words, index of the chunk's first word in a row, number of words). Empty on a CPU.

    Raises ValueError if the blocks of a cache are not contiguous.
    """

    def __init__(self, caches: Sequence[Tensor]):
        for cache in caches:
            if not cache[0].is_contiguous():
                raise ValueError(
                    f"each block of a cache must be contiguous, but the cache has strides {cache.stride()}"
                )
        self.caches = tuple(caches)
        self.row_bytes = sum(map(_block_bytes, caches))
        addresses_and_sizes = [
            (cache.data_ptr(), cache.stride(0) * cache.itemsize, _block_bytes(cache)) for cache in caches
        ]
        word_bytes = math.gcd(max(_WORD_DTYPES), *(number for numbers in addresses_and_sizes for number in numbers))
        self.word_dtype = _WORD_DTYPES[word_bytes]
        self.device = caches[0].device
        self.chunks = torch.empty((0, 4), dtype=torch.int64, device=self.device)
        if self.device.type == "cuda":
            self.chunks = self.make_chunks()

    def make_chunks(self) -> Tensor:
        """Return the value of `chunks` on CUDA."""
        word_bytes, chunks, first_word = self.word_dtype.itemsize, list[tuple[int, int, int, int]](), 0
        for cache in self.caches:
            stride, num_words = cache.stride(0) * cache.itemsize // word_bytes, _block_bytes(cache) // word_bytes
            for start in range(0, num_words, CHUNK_WORDS):
                address = cache.data_ptr() + start * word_bytes
                chunks.append((address, stride, first_word + start, min(CHUNK_WORDS, num_words - start)))
            first_word += num_words
        return torch.tensor(chunks, dtype=torch.int64).to(self.device)


def _block_bytes(cache: Tensor) -> int:
    return cache[0].numel() * cache.itemsize
