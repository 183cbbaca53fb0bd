"""Launches the CuTe DSL kernel of paged decode on Hopper: supported shapes, workspace and compilation.

The grid depends only on the device and the number of key-value heads, so that one CUDA graph serves any lengths.
Importing this module imports CUTLASS (the extra `cutedsl`), which takes seconds.
"""

import functools
import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from nanovllm_kernels import fp8
from nanovllm_kernels.attention.cute_kernel import DecodeKernel
from nanovllm_kernels.attention.cute_merge import num_slots
from nanovllm_kernels.attention.cute_tile import TILE_ROWS, Shape
from nanovllm_kernels.platform import describe_device

HOPPER = (9, 0)
LOG2_E = math.log2(math.e)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = {torch.bfloat16: BFloat16, torch.float16: Float16}
# Warps and stages by head size: rings of about 192 KiB. The fastest measured on an H200, by up to 10%.
RINGS = {64: (16, 3), 128: (8, 3), 256: (6, 2)}
# The same for FP8 caches, whose slots have half the size. Heads of 64 would not fill a row of shared memory.
FP8_RINGS = {128: (12, 4), 256: (6, 4)}


class Workspace(NamedTuple):
    """Global memory through which CTAs exchange partial results, see `cute_merge.Exchange`. Counters are zero at rest.

    Launches that may run at the same time must not share one.
    """

    partial: Tensor
    stats: Tensor
    counters: Tensor


def can_decode(
    head_dim: int, group: int, page_size: int, dtype: torch.dtype, cached: torch.dtype, device: torch.device
) -> bool:
    """Whether `paged_decode` has a kernel for this shape.

    group: query heads per key-value head. dtype: of the queries. cached: dtype of the cache.
    """
    in_fp8 = cached == fp8.DTYPE
    return (
        describe_device(device).capability == HOPPER
        and head_dim in (FP8_RINGS if in_fp8 else RINGS)
        and 1 <= group <= (TILE_ROWS // 2 if in_fp8 else TILE_ROWS)
        and page_size in PAGE_SIZES
        and dtype in DTYPES
        and (in_fp8 or cached == dtype)
    )


def make_workspace(
    max_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> Workspace:
    """Allocate a workspace for at most `max_requests` requests: a few megabytes, independent of lengths."""
    of_parts, of_groups = num_slots(_num_parts(num_kv_heads, device))
    rows = (of_parts + of_groups) * num_heads
    return Workspace(
        partial=torch.empty(rows * head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(rows * 2, dtype=torch.float32, device=device),
        counters=torch.zeros((of_groups + max_requests) * num_kv_heads, dtype=torch.int32, device=device),
    )


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    workspace: Workspace,
    out: Tensor,
) -> None:
    """Grouped-query attention (Ainslie et al. 2023) of one query per request over its pages, if `can_decode`.

    q: [>= B, Hq, D], float16 or bfloat16; row b is request b's query; a token's heads are contiguous.
    kv_cache: contiguous [N, P, 2 * Hkv, D], q's dtype or float8_e4m3fn; each slot holds the key heads, then the value
        heads. This step's keys and values are already written.
    kv_scales: see the package's `paged_attention`.
    block_tables: int32 [B, max_blocks], rows contiguous; entries past a request's length are not read.
    seq_lens: int32 [B], tokens of each request; a request with 0 tokens gets zeros. scale: positive.
    workspace: see `make_workspace`. out: contiguous [>= B, Hq, D] in q's dtype; B rows are written.

    The first call for a shape compiles, for about a second, and cannot be captured.
    """
    num_heads, head_dim = q.shape[1:]
    num_blocks, page_size, num_cached, _ = kv_cache.shape
    num_kv_heads = num_cached // 2
    dtype = DTYPES[q.dtype]
    cached, ring = (dtype, RINGS[head_dim]) if kv_scales is None else (Uint8, FP8_RINGS[head_dim])
    launch = compile_decode(Shape(dtype, cached, head_dim, num_heads // num_kv_heads, page_size, *ring))
    launch(
        _pointer(dtype, q, 4),
        _pointer(cached, kv_cache, 128),
        _pointer(Uint8, kv_cache if kv_scales is None else kv_scales, 16),
        _pointer(Int32, block_tables, 4),
        _pointer(Int32, seq_lens, 4),
        _pointer(dtype, out, 16),
        _pointer(Float32, workspace.partial, 16),
        _pointer(Float32, workspace.stats, 8),
        _pointer(Int32, workspace.counters, 4),
        seq_lens.shape[0],
        num_blocks * page_size,
        num_kv_heads,
        q.stride(0),
        block_tables.stride(0),
        _num_parts(num_kv_heads, q.device),
        scale * LOG2_E,
        cuda.CUstream(torch.cuda.current_stream(q.device).cuda_stream),
    )


@functools.cache
def compile_decode(shape: Shape, options: str = ""):
    """Compile the kernel. options: of the compiler; with "--gpu-arch sm_90a" it needs no GPU."""
    kinds = [(shape.dtype, 4), (shape.cached, 128), (Uint8, 16), (Int32, 4), (Int32, 4), (shape.dtype, 16)]
    kinds += [(Float32, 16), (Float32, 8), (Int32, 4)]
    pointers = [make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align) for dtype, align in kinds]
    numbers = [Int32(0)] * 6
    return cute.compile(DecodeKernel(shape), *pointers, *numbers, Float32(0.0), cuda.CUstream(0), options=options)


def _num_parts(num_kv_heads: int, device: torch.device) -> int:
    """Return the number of parts of a key-value head's work: one CTA per SM, so that all CTAs run at once."""
    return max(1, describe_device(device).num_sms // num_kv_heads)


def _pointer(dtype, tensor: Tensor, align: int):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)
