"""Copies blocks of paged caches to rows of bytes, and back. A row holds one block of all layers' caches.

The functions need not be torch operators, because compiled code and CUDA graphs never contain these functions.
"""

import torch
from torch import Tensor

from nanovllm_kernels.block_copy import block_copy_reference
from nanovllm_kernels.block_copy.block_parts import BlockParts

__all__ = ["BlockParts", "gather_blocks", "scatter_blocks"]


def gather_blocks(parts: BlockParts, blocks: Tensor, rows: Tensor) -> None:
    """Copy block number blocks[i] (int64 [n]) of every cache to rows[i] (contiguous uint8 [n, row_bytes])."""
    _copy_blocks(parts, blocks, rows, writes_caches=False)


def scatter_blocks(parts: BlockParts, blocks: Tensor, rows: Tensor) -> None:
    """Copy rows[i] to block number blocks[i] of every cache: the inverse of `gather_blocks`. Blocks must not repeat."""
    _copy_blocks(parts, blocks, rows, writes_caches=True)


def _copy_blocks(parts: BlockParts, blocks: Tensor, rows: Tensor, *, writes_caches: bool) -> None:
    expected = (len(blocks), parts.row_bytes)
    if rows.shape != expected or rows.dtype != torch.uint8 or not rows.is_contiguous():
        actual = f"{rows.dtype} {list(rows.shape)} with strides {rows.stride()}"
        raise ValueError(f"rows must be contiguous uint8 {list(expected)}, not {actual}")
    if rows.is_cuda:
        from nanovllm_kernels.block_copy import triton_block_copy

        triton_block_copy.copy_blocks(parts, parts.chunks, blocks, rows, writes_caches=writes_caches)
    elif writes_caches:
        block_copy_reference.scatter_blocks(parts.caches, blocks, rows)
    else:
        block_copy_reference.gather_blocks(parts.caches, blocks, rows)
