"""Multiplies each head of a token by the head's matrix on CUDA, for a number of tokens that only the device knows.

Latent attention uses this product to project queries into the latent space, and to project results back.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ProductTile(NamedTuple):
    """Configures a matrix product in tiles of `block_m` rows, `block_n` columns and depth `block_k`."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Tiles by element size in bytes.
PRODUCT_TILES = {2: ProductTile(128, 128, 128, 8, 3), 4: ProductTile(32, 32, 32, 4, 2)}
# Approximate number of programs of a launch. Each program computes several tiles in turn.
NUM_PROGRAMS = 528


def project_heads(x: Tensor, weight: Tensor, num_projected: Tensor, out: Tensor) -> None:
    """Write `x[t, h] @ weight[h]` into `out[t, h]` for tokens t < `num_projected`. Rows of later tokens stay as is.

    x: [T, H, K], stride 1 in K, other strides any.
    weight: [H, K, N], any strides. num_projected: int32 [1].
    out: [T, H, N], stride 1 in N, other strides any.
    """
    num_tokens, num_heads, depth = x.shape
    output_dim = out.shape[2]
    tile = PRODUCT_TILES[x.element_size()]
    column_tiles, token_tiles = triton.cdiv(output_dim, tile.block_n), triton.cdiv(num_tokens, tile.block_m)
    token_programs = min(token_tiles, triton.cdiv(NUM_PROGRAMS, column_tiles * num_heads))
    _project_heads[(column_tiles, num_heads, token_programs)](
        x,
        weight,
        num_projected,
        out,
        num_tokens,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        K=depth,
        N=output_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


# Do not let Triton specialise on arguments that change between steps: a step must never compile a kernel.
@triton.jit(do_not_specialize=["num_tokens", "out_stride_head"])
def _project_heads(
    x_ptr,
    weight_ptr,
    num_projected_ptr,
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
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N columns of one head, in a loop over blocks of BLOCK_M tokens."""
    head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    x_ptr += head * x_stride_head
    weight_ptr += head * weight_stride_head + columns[None, :] * weight_stride_n
    out_ptr += head * out_stride_head + columns[None, :]
    num_projected = tl.minimum(tl.load(num_projected_ptr), num_tokens)
    # If K is at most BLOCK_K, the weight stays in registers, and loads of tokens overlap the products.
    if K <= BLOCK_K:
        weight_mask = (ks < K)[:, None] & (columns < N)[None, :]
        weight = tl.load(weight_ptr + ks[:, None] * weight_stride_k, mask=weight_mask, other=0.0)
        for first_token in tl.range(tl.program_id(2) * BLOCK_M, num_projected, tl.num_programs(2) * BLOCK_M):
            tokens = (first_token + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
            x_mask = (tokens < num_projected) & (ks < K)[None, :]
            x = tl.load(x_ptr + tokens * x_stride_token + ks[None, :], mask=x_mask, other=0.0)
            sums = tl.dot(x, weight, input_precision="ieee")
            out_mask = (tokens < num_projected) & (columns < N)[None, :]
            tl.store(out_ptr + tokens * out_stride_token, sums.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        for first_token in tl.range(tl.program_id(2) * BLOCK_M, num_projected, tl.num_programs(2) * BLOCK_M):
            tokens = (first_token + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for first_k in tl.range(0, K, BLOCK_K):
                x_mask = (tokens < num_projected) & (first_k + ks < K)[None, :]
                x = tl.load(x_ptr + tokens * x_stride_token + (first_k + ks)[None, :], mask=x_mask, other=0.0)
                weight_mask = (first_k + ks < K)[:, None] & (columns < N)[None, :]
                weight = tl.load(weight_ptr + (first_k + ks)[:, None] * weight_stride_k, mask=weight_mask, other=0.0)
                sums = tl.dot(x, weight, sums, input_precision="ieee")
            out_mask = (tokens < num_projected) & (columns < N)[None, :]
            tl.store(out_ptr + tokens * out_stride_token, sums.to(out_ptr.dtype.element_ty), mask=out_mask)
