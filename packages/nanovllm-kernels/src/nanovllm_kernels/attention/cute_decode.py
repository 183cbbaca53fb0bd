"""Paged decode on Hopper through the CuTe DSL kernel of `cute_kernel`: which shapes it takes, its workspace, its launch.

The grid follows from the device and the number of key-value heads alone, and the lengths are read on the device, so that
one CUDA graph serves any of them. Importing this imports CUTLASS (the extra `cutedsl`), which takes seconds.
"""

import functools
import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import torch
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from nanovllm_kernels.attention.cute_kernel import DecodeKernel
from nanovllm_kernels.attention.cute_tile import TILE_ROWS, Shape, Tiling
from nanovllm_kernels.platform import describe

HOPPER = (9, 0)
PAGE_SIZES = (16, 32, 64)
DTYPES = {torch.bfloat16: BFloat16, torch.float16: Float16}
# Keyed by head size.
TILINGS = {
    64: Tiling(step=16, warps=4, stages=6, ctas_per_sm=2),
    128: Tiling(step=16, warps=4, stages=3, ctas_per_sm=2),
    256: Tiling(step=16, warps=4, stages=3, ctas_per_sm=1),
}
LOG2_E = math.log2(math.e)


class Workspace(NamedTuple):
    """What `paged_decode` writes between its CTAs. Not to be shared by launches that may run at the same time.

    partial: float32, unscaled outputs of the two requests that a share may hold a part of. stats: float32, the greatest
    score and the sum of weights of each of their rows. counters: int32 [requests * Hkv], zero before and after a launch.
    """

    partial: Tensor
    stats: Tensor
    counters: Tensor


def can_decode(head_dim: int, group: int, page_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `paged_decode` has a kernel for these heads, pages and numbers, `group` query heads to a key-value head."""
    return (
        describe(device).capability == HOPPER
        and head_dim in TILINGS
        and 1 <= group <= TILE_ROWS
        and page_size in PAGE_SIZES
        and dtype in DTYPES
    )


def make_workspace(
    max_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> Workspace:
    """A workspace for batches of at most `max_requests`, a few megabytes."""
    rows = 2 * num_heads * _num_parts(num_kv_heads, TILINGS[head_dim], device)
    return Workspace(
        partial=torch.empty(rows * head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(rows * 2, dtype=torch.float32, device=device),
        counters=torch.zeros(max_requests * num_kv_heads, dtype=torch.int32, device=device),
    )


def paged_decode(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float, workspace: Workspace
) -> Tensor:
    """Grouped-query attention (Ainslie et al. 2023) of one query a request, over its own pages.

    q: [B, Hq, D], float16 or bfloat16, the heads of a token next to each other. kv_cache: contiguous [N, P, 2 * Hkv, D]
        of the same dtype, of each slot the heads of the key, then those of the value, this step's already written.
    block_tables: int32 [B, max_blocks], rows contiguous; entries beyond a request's length are not read. seq_lens: int32
        [B]; a request of no tokens gets zeros. scale: positive. workspace: see `make_workspace`.
    Returns contiguous [B, Hq, D]. For shapes that `can_decode` refuses the behaviour is undefined. The first call for
    a kind of shape compiles, which a stream capture does not allow.
    """
    num_reqs, num_heads, head_dim = q.shape
    num_blocks, page_size, twice_kv_heads, _ = kv_cache.shape
    num_kv_heads = twice_kv_heads // 2
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    dtype = DTYPES[q.dtype]
    tiling = TILINGS[head_dim]
    launch = compile_decode(Shape(dtype, head_dim, num_heads // num_kv_heads, page_size, tiling))
    launch(
        _pointer(dtype, q, 4),
        _pointer(dtype, kv_cache, 128),
        _pointer(Int32, block_tables, 4),
        _pointer(Int32, seq_lens, 4),
        _pointer(dtype, out, 16),
        _pointer(Float32, workspace.partial, 16),
        _pointer(Float32, workspace.stats, 8),
        _pointer(Int32, workspace.counters, 4),
        num_reqs,
        num_blocks * page_size,
        num_kv_heads,
        q.stride(0),
        block_tables.stride(0),
        _num_parts(num_kv_heads, tiling, q.device),
        scale * LOG2_E,
        cuda.CUstream(torch.cuda.current_stream(q.device).cuda_stream),
    )
    return out


@functools.cache
def compile_decode(shape: Shape, arch: str | None = None):
    """The compiled kernel, for the GPU at hand or for `arch` ("sm_90a"), which needs none."""
    pointers = [
        make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=align)
        for kind, align in (
            (shape.dtype, 4),
            (shape.dtype, 128),
            (Int32, 4),
            (Int32, 4),
            (shape.dtype, 16),
            (Float32, 16),
            (Float32, 8),
            (Int32, 4),
        )
    ]
    return cute.compile(
        DecodeKernel(shape),
        *pointers,
        *[Int32(0)] * 6,
        Float32(0.0),
        cuda.CUstream(0),
        options=f"--gpu-arch {arch}" if arch else "",
    )


def _num_parts(num_kv_heads: int, tiling: Tiling, device: torch.device) -> int:
    """Into how many shares the work of a key-value head is cut: all CTAs of a launch run at once."""
    return max(1, describe(device).num_sms * tiling.ctas_per_sm // num_kv_heads)


def _pointer(dtype, tensor: Tensor, align: int):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)
