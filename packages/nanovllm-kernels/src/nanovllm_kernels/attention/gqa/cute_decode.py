"""Compiles and launches the CuTe DSL kernel of paged decode on Hopper.

A tile holds consecutive queries of a request, which share the loads of keys and values. The grid depends only on the
device and the number of key-value heads, so that one CUDA graph serves any lengths.
Importing this module imports CUTLASS (the extra `cutedsl`), and takes seconds.
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
from nanovllm_kernels.attention.gqa.cute_decode_kernel import DecodeKernel
from nanovllm_kernels.attention.gqa.cute_merge import count_slots
from nanovllm_kernels.attention.gqa.cute_tile import TILE_ROWS, DecodeShape
from nanovllm_kernels.platform import describe_device

HOPPER = (9, 0)  # CUDA compute capability.
LOG2_E = math.log2(math.e)
PAGE_SIZES = (16, 32, 64, 128)  # Supported page sizes, in tokens.
CUTLASS_DTYPES = {torch.bfloat16: BFloat16, torch.float16: Float16}


class RingSize(NamedTuple):
    """Ring buffers of a CTA in shared memory: one per warp, of `num_stages` x 16 tokens."""

    num_warps: int
    num_stages: int


# Ring sizes by head size. Rings of about 192 KiB per CTA were the fastest on an H200.
RING_SIZES = {64: RingSize(16, 3), 128: RingSize(8, 3), 256: RingSize(6, 2)}
# Ring sizes for FP8 caches. FP8 heads of 64 would not fill a row of shared memory.
FP8_RING_SIZES = {128: RingSize(12, 4), 256: RingSize(6, 4)}


class DecodeWorkspace(NamedTuple):
    """Global memory through which CTAs exchange results. `cute_merge.ResultExchange` describes the fields.

    Counters are zero before and after each launch. Launches that may run at the same time must not share a workspace.
    """

    partial_out: Tensor
    partial_stats: Tensor
    counters: Tensor


class QueryTiles(NamedTuple):
    """Holds the tiles of B requests, R tiles per request. A tile may have no queries.

    visible_lens: int32 [B * R], number of tokens that the tile's last query sees, 0 for a tile without queries.
    queries: int32 [B * R, 2], pairs (row of the tile's first query, number of queries).
    """

    visible_lens: Tensor
    queries: Tensor


def supports_decode(
    head_dim: int, group_size: int, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether `paged_decode` has a kernel for this shape.

    group_size: query heads per key-value head.
    dtype: dtype of the queries.
    """
    is_fp8 = cache_dtype == fp8.DTYPE
    return (
        describe_device(device).capability == HOPPER
        and head_dim in (FP8_RING_SIZES if is_fp8 else RING_SIZES)
        and max_tile_queries(group_size, cache_dtype) >= 1
        and page_size in PAGE_SIZES
        and dtype in CUTLASS_DTYPES
        and (is_fp8 or cache_dtype == dtype)
    )


def max_tile_queries(group_size: int, cache_dtype: torch.dtype) -> int:
    """Return the maximum number of queries in a tile; 0 if a tile has too few rows for one query."""
    return (TILE_ROWS // 2 if cache_dtype == fp8.DTYPE else TILE_ROWS) // group_size


def plan_tiles(seq_lens: Tensor, query_start_loc: Tensor, max_query_len: int, tile_queries: int) -> QueryTiles:
    """Divide the queries of B requests into tiles, on the device.

    seq_lens: int32 [B], number of tokens of each request.
    query_start_loc: int32 [B + 1], index of each request's first query in the step, then the number of queries.
    tile_queries: maximum number of queries of a tile.
    """
    num_tiles = -(-max_query_len // tile_queries)
    starts, query_lens = query_start_loc[:-1, None], query_start_loc.diff()[:, None]
    first_queries = torch.arange(0, num_tiles * tile_queries, tile_queries, dtype=torch.int32, device=seq_lens.device)
    num_queries = (query_lens - first_queries).clamp_(0, tile_queries)
    visible_lens = torch.where(num_queries > 0, seq_lens[:, None] - query_lens + first_queries + num_queries, 0)
    return QueryTiles(visible_lens.view(-1), torch.stack((starts + first_queries, num_queries), 2).view(-1, 2))


def allocate_workspace(
    max_tiles: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, *, tile_queries: int = 1
) -> DecodeWorkspace:
    """Allocate a workspace for at most `max_tiles` tiles of any lengths. tile_queries: maximum queries of a tile."""
    num_part_slots, num_group_slots = count_slots(_num_parts(num_kv_heads, device))
    num_rows = (num_part_slots + num_group_slots) * num_heads * tile_queries
    return DecodeWorkspace(
        partial_out=torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
        partial_stats=torch.empty(num_rows * 2, dtype=torch.float32, device=device),
        counters=torch.zeros((num_group_slots + max_tiles) * num_kv_heads, dtype=torch.int32, device=device),
    )


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    out: Tensor,
    *,
    tiles: Tensor | None = None,
) -> None:
    """Compute grouped-query attention (Ainslie et al. 2023) of few queries per request. Requires `supports_decode`.

    q: [T, Hq, D], float16 or bfloat16. Heads are contiguous, rows have any stride.
    kv_cache: contiguous [N, P, 2 * Hkv, D], q's dtype or float8_e4m3fn; each slot holds the key heads, then the value
        heads. This step's keys and values are already written.
    kv_scales: uint8 [N, 2 * Hkv, P], contiguous, for a float8_e4m3fn cache (see `fp8`), else None.
    block_tables: int32 [B, max_blocks], rows contiguous; entries past a request's length are not read.
    seq_lens: int32 [B], number of tokens of each request. If `tiles` is not None: int32 [B * R],
        `QueryTiles.visible_lens`.
    scale: positive factor of the query-key products.
    out: contiguous [T, Hq, D] in q's dtype.
    tiles: `QueryTiles.queries`; tiles have up to `max_tile_queries` queries. None: row b is the only query of
        request b. A request with 0 tokens then gets zeros.

    The first call for a shape compiles the kernel, and cannot be captured in a CUDA graph.
    """
    num_heads, head_dim = q.shape[1:]
    num_blocks, page_size, heads_per_slot, _ = kv_cache.shape
    num_kv_heads = heads_per_slot // 2
    dtype = CUTLASS_DTYPES[q.dtype]
    cache_dtype, ring_size = (dtype, RING_SIZES[head_dim]) if kv_scales is None else (Uint8, FP8_RING_SIZES[head_dim])
    group_size, has_tile_list = num_heads // num_kv_heads, tiles is not None
    tile_queries = max_tile_queries(group_size, kv_cache.dtype) if has_tile_list else 1
    launch = compile_decode(
        DecodeShape(dtype, cache_dtype, head_dim, group_size, has_tile_list, tile_queries, page_size, *ring_size)
    )
    launch(
        _make_pointer(dtype, q, 4),
        _make_pointer(cache_dtype, kv_cache, 128),
        _make_pointer(Uint8, kv_cache if kv_scales is None else kv_scales, 16),
        _make_pointer(Int32, block_tables, 4),
        _make_pointer(Int32, seq_lens, 4),
        _make_pointer(Int32, seq_lens if tiles is None else tiles, 4),
        _make_pointer(dtype, out, 16),
        _make_pointer(Float32, workspace.partial_out, 16),
        _make_pointer(Float32, workspace.partial_stats, 8),
        _make_pointer(Int32, workspace.counters, 4),
        seq_lens.shape[0],
        num_blocks * page_size,
        num_kv_heads,
        q.stride(0),
        block_tables.stride(0),
        seq_lens.shape[0] // block_tables.shape[0],
        _num_parts(num_kv_heads, q.device),
        scale * LOG2_E,
        cuda.CUstream(torch.cuda.current_stream(q.device).cuda_stream),
    )


@functools.cache
def compile_decode(shape: DecodeShape, options: str = ""):
    """Compile the kernel. options: compiler flags; "--gpu-arch sm_90a" compiles without a GPU."""
    pointer_types = [(shape.dtype, 4), (shape.cache_dtype, 128), (Uint8, 16), (Int32, 4), (Int32, 4), (Int32, 4)]
    pointer_types += [(shape.dtype, 16), (Float32, 16), (Float32, 8), (Int32, 4)]
    pointers = [
        make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=alignment) for dtype, alignment in pointer_types
    ]
    integers = [Int32(0)] * 7
    return cute.compile(DecodeKernel(shape), *pointers, *integers, Float32(0.0), cuda.CUstream(0), options=options)


def _num_parts(num_kv_heads: int, device: torch.device) -> int:
    """Return the largest number of parts per key-value head with which all CTAs run at once, one per SM."""
    return max(1, describe_device(device).num_sms // num_kv_heads)


def _make_pointer(dtype, tensor: Tensor, alignment: int):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=alignment)
