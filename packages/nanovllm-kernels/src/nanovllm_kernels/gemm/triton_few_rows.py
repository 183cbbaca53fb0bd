"""Multiplies a few rows by a weight on CUDA, with norm, gate and residual in one kernel.

Loads of the weight take most of the time. The lanes of a warp split the sum over K, without tensor cores. With
programmatic dependent launch, the kernel loads weights before the previous kernel ends. A kernel that writes weights
must therefore not let the next kernel start early.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.gemm.tiles import few_rows_config, padded_rows
from nanovllm_kernels.platform import can_overlap_launches


def project_few_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
) -> None:
    """Normalize rows `x` [M, K], multiply by `weight`, add `bias`, gate, add `residual`, and write `out` [M, N].

    weight: [N, K]. If `gated`: [2 N, K], rows of the gate, then of the up projection.
    """
    num_rows, depth = x.shape
    num_columns = out.shape[1]
    config = few_rows_config(num_rows, num_columns, depth, gated=gated)
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    _project_few_rows[(triton.cdiv(num_columns, config.block_n),)](
        x,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        num_rows,
        num_columns,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        K=depth,
        ROWS=padded_rows(num_rows),  # a power of two
        BLOCK_N=config.block_n,
        NUM_VECTORS=32 * config.num_warps,  # vectors along K per iteration: one per thread
        VECTOR=16 // weight.element_size(),  # elements that a thread loads at once
        NORM=norm_weight is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        launch_pdl=overlap,
    )


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _project_few_rows(
    x_ptr,
    norm_weight_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    num_columns,
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BLOCK_N columns of all rows. Each of NUM_VECTORS vector positions has own sums until the loop ends."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    ks = (tl.arange(0, NUM_VECTORS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :])[:, None, None, :]
    x_ptr += rows[None, :, None, None].to(tl.int64) * x_stride
    row_mask = (rows < num_rows)[None, :, None, None]
    up_ptr = weight_ptr + num_columns.to(tl.int64) * K  # weight of the up projection, if GATED
    tile = _load_tile(weight_ptr, columns, num_columns, 0, K, NUM_VECTORS, VECTOR)
    if GATED:
        up_tile = _load_tile(up_ptr, columns, num_columns, 0, K, NUM_VECTORS, VECTOR)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros((NUM_VECTORS, ROWS, BLOCK_N), tl.float32)
    up_sums = tl.zeros((NUM_VECTORS, ROWS, BLOCK_N), tl.float32)
    squares = tl.zeros((NUM_VECTORS, ROWS, 1), tl.float32)
    for first_k in range(0, K, NUM_VECTORS * VECTOR):
        x = tl.load(x_ptr + first_k + ks, mask=row_mask & (first_k + ks < K), other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(x * x, 3)
            x *= tl.load(norm_weight_ptr + first_k + ks, mask=first_k + ks < K, other=0.0).to(tl.float32)
        next_tile = _load_next_tile(tile, weight_ptr, columns, num_columns, first_k, K, NUM_VECTORS, VECTOR)
        if GATED:
            next_up_tile = _load_next_tile(up_tile, up_ptr, columns, num_columns, first_k, K, NUM_VECTORS, VECTOR)
            up_sums += tl.sum(x * up_tile.to(tl.float32), 3)
            up_tile = next_up_tile
        sums += tl.sum(x * tile.to(tl.float32), 3)
        tile = next_tile
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps) if NORM else 1.0
    columns = columns[None, :]
    out = _finish_sums(sums, scale, bias_ptr, columns, num_columns, BIAS)
    if GATED:
        up = _finish_sums(up_sums, scale, bias_ptr + num_columns, columns, num_columns, BIAS)
        out = out * tl.sigmoid(out) * up
    mask = (rows < num_rows)[:, None] & (columns < num_columns)
    rows = rows[:, None].to(tl.int64)
    if RESIDUAL:
        out += tl.load(residual_ptr + rows * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * num_columns + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_tile(
    weight_ptr, columns, num_columns, first_k, K: tl.constexpr, NUM_VECTORS: tl.constexpr, VECTOR: tl.constexpr
):
    """Load the weights of `columns` from `first_k` on: [NUM_VECTORS, 1, columns, VECTOR], 0 outside the weight."""
    # Vectors are the first dimension, so that Triton gives neighbouring lanes neighbouring vectors.
    ks = first_k + tl.arange(0, NUM_VECTORS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    ks = ks[:, None, None, :]
    columns = columns[None, None, :, None]
    return tl.load(weight_ptr + columns.to(tl.int64) * K + ks, mask=(columns < num_columns) & (ks < K), other=0.0)


@triton.jit
def _load_next_tile(
    tile, weight_ptr, columns, num_columns, first_k, K: tl.constexpr, NUM_VECTORS: tl.constexpr, VECTOR: tl.constexpr
):
    """Load the tile that follows the tile at `first_k`. If one tile holds all of K, return `tile`."""
    if K > NUM_VECTORS * VECTOR:
        tile = _load_tile(weight_ptr, columns, num_columns, first_k + NUM_VECTORS * VECTOR, K, NUM_VECTORS, VECTOR)
    return tile


@triton.jit
def _finish_sums(sums, scale, bias_ptr, columns, num_columns, BIAS: tl.constexpr):
    """Sum over the vectors, multiply by `scale` and add the bias. sums: [NUM_VECTORS, rows, columns]."""
    out = tl.sum(sums, 0) * scale
    if BIAS:
        out += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    return out
