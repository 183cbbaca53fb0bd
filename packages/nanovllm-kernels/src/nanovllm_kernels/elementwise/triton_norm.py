"""RMSNorm on CUDA. Each row is read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.platform import can_overlap_launches

# Minimum number of elements per program, including padding. Several short rows share a program.
ELEMENTS_PER_PROGRAM = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See the package's `rms_norm`."""
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    row_size = x.shape[-1]
    rows_per_token = 1 if x.dim() == 2 else x.shape[1]
    num_rows = x.shape[0] * rows_per_token
    block = triton.next_power_of_2(row_size)
    rows_per_program = max(1, ELEMENTS_PER_PROGRAM // block)
    overlap = can_overlap_launches(x.device)
    _rms_norm[(triton.cdiv(num_rows, rows_per_program),)](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        ROWS_PER_TOKEN=rows_per_token,
        ROW_SIZE=row_size,
        BLOCK=block,
        ROWS=rows_per_program,
        OVERLAP=overlap,
        num_warps=_num_warps(block * rows_per_program),
        launch_pdl=overlap,
    )
    return out


def norm_parts(
    x: Tensor, sizes: list[int], first_weight: Tensor, second_weight: Tensor, eps: float, mean_squares: Tensor | None
) -> None:
    """See the package's `norm_parts`."""
    block = triton.next_power_of_2(max(sizes))
    overlap = can_overlap_launches(x.device)
    _norm_parts[(x.shape[0], 2)](
        x,
        first_weight,
        second_weight,
        mean_squares,
        x.stride(0),
        eps,
        FIRST_SIZE=sizes[0],
        SECOND_SIZE=sizes[1],
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=_num_warps(block),
        launch_pdl=overlap,
    )


def compute_mean_squares(x: Tensor, sizes: list[int]) -> Tensor:
    """See the package's `compute_mean_squares`."""
    block = triton.next_power_of_2(max(sizes))
    overlap = can_overlap_launches(x.device)
    out = torch.empty((x.shape[0], 2), device=x.device)
    _compute_mean_squares[(x.shape[0], 2)](
        x,
        out,
        x.stride(0),
        FIRST_SIZE=sizes[0],
        SECOND_SIZE=sizes[1],
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=_num_warps(block),
        launch_pdl=overlap,
    )
    return out


def _num_warps(num_elements: int) -> int:
    """Return the number of warps: one per 256 elements (eight per thread), at least 1 and at most 16."""
    return max(1, min(16, triton.next_power_of_2(num_elements) // 256))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    stride_token,
    stride_head,
    eps,
    ROWS_PER_TOKEN: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    program_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (program_rows < num_rows)[:, None] & (columns < ROW_SIZE)[None, :]
    row_starts = (program_rows // ROWS_PER_TOKEN) * stride_token + (program_rows % ROWS_PER_TOKEN) * stride_head
    x = tl.load(x_ptr + row_starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < ROW_SIZE, other=0.0).to(tl.float32)
    norm_factor = tl.rsqrt(tl.sum(x * x, 1) / ROW_SIZE + eps)
    out = x * norm_factor[:, None] * weight[None, :]
    tl.store(out_ptr + program_rows[:, None] * ROW_SIZE + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_parts(
    x_ptr,
    first_weight_ptr,
    second_weight_ptr,
    mean_squares_ptr,
    stride_token,
    eps,
    FIRST_SIZE: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x_ptr += tl.program_id(0).to(tl.int64) * stride_token
    if mean_squares_ptr is not None:
        mean_squares_ptr += 2 * tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        _norm_in_place(x_ptr, first_weight_ptr, mean_squares_ptr, columns, eps, FIRST_SIZE, 0)
    else:
        _norm_in_place(x_ptr + FIRST_SIZE, second_weight_ptr, mean_squares_ptr, columns, eps, SECOND_SIZE, 1)


@triton.jit
def _compute_mean_squares(
    x_ptr,
    out_ptr,
    stride_token,
    FIRST_SIZE: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x_ptr += tl.program_id(0).to(tl.int64) * stride_token
    out_ptr += 2 * tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        tl.store(out_ptr, _mean_square(_load_row(x_ptr, columns, FIRST_SIZE), FIRST_SIZE))
    else:
        tl.store(out_ptr + 1, _mean_square(_load_row(x_ptr + FIRST_SIZE, columns, SECOND_SIZE), SECOND_SIZE))


@triton.jit
def _load_row(x_ptr, columns, ROW_SIZE: tl.constexpr):
    return tl.load(x_ptr + columns, mask=columns < ROW_SIZE, other=0.0).to(tl.float32)


@triton.jit
def _mean_square(x, ROW_SIZE: tl.constexpr):
    return tl.sum(x * x, 0) / ROW_SIZE


@triton.jit
def _norm_in_place(x_ptr, weight_ptr, mean_squares_ptr, columns, eps, ROW_SIZE: tl.constexpr, PART: tl.constexpr):
    x = _load_row(x_ptr, columns, ROW_SIZE)
    weight = _load_row(weight_ptr, columns, ROW_SIZE)
    mean_square = _mean_square(x, ROW_SIZE)
    if mean_squares_ptr is not None:
        mean_square = tl.load(mean_squares_ptr + PART)
    out = x * tl.rsqrt(mean_square + eps) * weight
    tl.store(x_ptr + columns, out.to(x_ptr.dtype.element_ty), mask=columns < ROW_SIZE)
