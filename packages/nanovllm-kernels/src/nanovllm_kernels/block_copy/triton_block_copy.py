"""Copies blocks of all caches in one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.block_copy.block_parts import CHUNK_WORDS, BlockParts


def copy_blocks(parts: BlockParts, chunks: Tensor, blocks: Tensor, rows: Tensor, *, writes_caches: bool) -> None:
    """Copy blocks to rows, or rows to blocks if `writes_caches`. chunks: see `BlockParts`."""
    words = rows.view(parts.word_dtype)
    if len(blocks):
        _copy_blocks[(len(blocks), len(chunks))](
            chunks, blocks, words, words.stride(0), WRITES_CACHES=writes_caches, CHUNK_WORDS=CHUNK_WORDS, num_warps=8
        )


@triton.jit
def _copy_blocks(chunks_ptr, blocks_ptr, rows_ptr, row_stride, WRITES_CACHES: tl.constexpr, CHUNK_WORDS: tl.constexpr):
    """Copy one chunk of one block."""
    row = tl.program_id(0).to(tl.int64)
    chunk_ptr = chunks_ptr + tl.program_id(1) * 4
    address, block_stride = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    first_word, num_words = tl.load(chunk_ptr + 2), tl.load(chunk_ptr + 3)
    words = tl.arange(0, CHUNK_WORDS)
    in_chunk = words < num_words
    # All offsets are 64-bit: the product of a block's number and the stride may exceed 2^31.
    cache_ptr = address.to(rows_ptr.dtype) + tl.load(blocks_ptr + row) * block_stride + words
    row_ptr = rows_ptr + row * row_stride + first_word + words
    if WRITES_CACHES:
        tl.store(cache_ptr, tl.load(row_ptr, mask=in_chunk), mask=in_chunk)
    else:
        tl.store(row_ptr, tl.load(cache_ptr, mask=in_chunk), mask=in_chunk)
