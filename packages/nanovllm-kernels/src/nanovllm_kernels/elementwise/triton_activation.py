"""Multiplies by a SiLU gate (SwiGLU) or by a sigmoid gate (of attention) on CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.platform import can_overlap_launches

BLOCK = 1024  # columns per program


def silu_and_mul(x: Tensor) -> Tensor:
    """See the package's `silu_and_mul`."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty((num_rows, width))
    overlap = can_overlap_launches(x.device)
    _silu_and_mul[(num_rows, triton.cdiv(width, BLOCK))](
        x, out, x.stride(0), WIDTH=width, BLOCK=BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return out


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See the package's `sigmoid_and_mul`."""
    num_rows, width = x.shape
    out = torch.empty_like(x)
    overlap = can_overlap_launches(x.device)
    _sigmoid_and_mul[(num_rows, triton.cdiv(width, BLOCK))](
        x, gate, out, gate.stride(0), WIDTH=width, BLOCK=BLOCK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
    )
    return out


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid_and_mul(
    x_ptr, gate_ptr, out_ptr, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    x = tl.load(x_ptr + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=mask)
