"""Products of every token's heads with one matrix per head on CUDA, for a number of tokens known only to the device.

Latent attention projects queries into the latent space and results back with these. Prompts whole in a step need
neither, but the host does not know their number when it replays a graph.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention.tiles import HEADS_PROGRAMS, HEADS_TILE


def project_heads(x: Tensor, weight: Tensor, count: Tensor, out: Tensor) -> None:
    """Write `x[t, h] @ weight[h]` into `out[t, h]` for tokens t < `count`; rows of later tokens are undefined.

    x: [T, H, K], stride 1 in K. weight: [H, K, N]. count: int32 [1]. out: [T, H, N], stride 1 in N. Other strides: any.
    """
    num_tokens, num_heads, depth = x.shape
    columns = out.shape[2]
    tile = HEADS_TILE[x.element_size()]
    column_tiles, token_tiles = triton.cdiv(columns, tile.block_n), triton.cdiv(num_tokens, tile.block_m)
    token_programs = min(token_tiles, triton.cdiv(HEADS_PROGRAMS, column_tiles * num_heads))
    _project_heads[(column_tiles, num_heads, token_programs)](
        x,
        weight,
        count,
        out,
        num_tokens,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        K=depth,
        COLUMNS=columns,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


# Arguments that change between steps are not specialised on: a step must never cause a compilation.
@triton.jit(do_not_specialize=["num_tokens", "out_stride_head"])
def _project_heads(
    x_ptr,
    weight_ptr,
    count_ptr,
    out_ptr,
    num_tokens,
    x_stride_token,
    x_stride_head,
    weight_stride_head,
    weight_stride_k,
    weight_stride_n,
    out_stride_token,
    out_stride_head,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one tile of a head's columns for one tile of tokens after another."""
    head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_ptr += head * x_stride_head
    weight_ptr += head * weight_stride_head + columns[None, :] * weight_stride_n
    out_ptr += head * out_stride_head + columns[None, :]
    count = tl.minimum(tl.load(count_ptr), num_tokens)
    # If K fits one tile, the weight stays in registers, and loads of tokens overlap the products.
    if K <= BLOCK_K:
        inside = (ks < K)[:, None] & (columns < COLUMNS)[None, :]
        weight = tl.load(weight_ptr + ks[:, None] * weight_stride_k, mask=inside, other=0.0)
        for begin in tl.range(tl.program_id(2) * BLOCK_M, count, tl.num_programs(2) * BLOCK_M):
            tokens = (begin + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
            mask = (tokens < count) & (ks < K)[None, :]
            x = tl.load(x_ptr + tokens * x_stride_token + ks[None, :], mask=mask, other=0.0)
            sums = tl.dot(x, weight, input_precision="ieee")
            mask = (tokens < count) & (columns < COLUMNS)[None, :]
            tl.store(out_ptr + tokens * out_stride_token, sums.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        for begin in tl.range(tl.program_id(2) * BLOCK_M, count, tl.num_programs(2) * BLOCK_M):
            tokens = (begin + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for first in tl.range(0, K, BLOCK_K):
                mask = (tokens < count) & (first + ks < K)[None, :]
                x = tl.load(x_ptr + tokens * x_stride_token + (first + ks)[None, :], mask=mask, other=0.0)
                mask = (first + ks < K)[:, None] & (columns < COLUMNS)[None, :]
                weight = tl.load(weight_ptr + (first + ks)[:, None] * weight_stride_k, mask=mask, other=0.0)
                sums = tl.dot(x, weight, sums, input_precision="ieee")
            mask = (tokens < count) & (columns < COLUMNS)[None, :]
            tl.store(out_ptr + tokens * out_stride_token, sums.to(out_ptr.dtype.element_ty), mask=mask)
