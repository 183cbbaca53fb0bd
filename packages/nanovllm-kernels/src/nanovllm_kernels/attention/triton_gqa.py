"""Paged grouped-query attention in Triton, for requests with any number of queries, from a work list.

A tile holds some query positions of one request times the query heads of one key-value head, so that keys and values
are read once per group. A program attends for one part of the list; `merge_parts` merges tiles that span parts
(Dao et al. 2023, split-KV).
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.attention.triton_tile import LOG2_E, attend_range
from nanovllm_kernels.attention.triton_tile_fp8 import attend_fp8_range
from nanovllm_kernels.attention.triton_work_list import load_part, load_segment, merge_parts
from nanovllm_kernels.attention.work_list import WorkList
from nanovllm_kernels.platform import can_overlap_launches


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    work: WorkList,
    scale: float,
    out: Tensor,
    *,
    wide: bool,
) -> None:
    """Attend for the requests of `work` and write their rows of `out`.

    wide: the list was planned with `tiles.tile_config(..., wide=wide)`.
    """
    _, num_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    group = num_heads // num_kv_heads
    size = tiles.number_size(q.element_size(), kv_cache.element_size())
    config = tiles.tile_config(head_dim, size, group, wide=wide)
    block_q = config.block_m // group
    overlap = can_overlap_launches(q.device)
    partial = q.new_empty((2 * work.num_parts, num_kv_heads, config.block_m, head_dim), dtype=torch.float32)
    lse = q.new_empty((2 * work.num_parts, num_kv_heads, config.block_m), dtype=torch.float32)
    _attend[(num_kv_heads, work.num_parts)](
        q,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        seq_lens,
        query_start_loc,
        *work,
        out,
        partial,
        lse,
        scale * LOG2_E,
        q.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=tiles.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_Q=block_q,
        FULL_BLOCKS=wide,
        QUANTIZED=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=overlap,
    )
    merge_parts(partial, lse, query_start_loc, work, group, block_q, out)


# Arguments that change between steps are not specialised on: a step must never cause a compilation.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend(
    q_ptr,
    kv_ptr,
    scales_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_starts_ptr,
    tiles_ptr,
    parts_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    q_stride_token,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    FULL_BLOCKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend for one part of the work list and the query heads of one key-value head.

    FULL_BLOCKS: run blocks that all queries see without a mask. For a decode's few blocks one loop is faster.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    part_begin, part_end, first_tile, end_tile = load_part(tile_starts_ptr, parts_ptr, part)
    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    # disable_licm: addresses kept across tiles would take registers from the products.
    for tile in tl.range(first_tile, end_tile, disable_licm=True):
        first_block, end_block, slot = load_segment(tile_starts_ptr, tile, part, part_begin, part_end)
        request = tl.load(tiles_ptr + 2 * tile)
        first_query = tl.load(tiles_ptr + 2 * tile + 1)
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        context = tl.load(seq_lens_ptr + request) - query_len
        queries = first_query + rows // GROUP
        row_mask = (rows < BLOCK_Q * GROUP) & (queries < query_len)
        mask = row_mask[:, None] & dim_mask[None, :]
        tokens = (query_start + queries).to(tl.int64)
        q_ptrs = q_ptr + tokens[:, None] * q_stride_token + heads[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptrs, mask=mask, other=0.0)
        begin = first_block * BLOCK_N
        # A tile sees the tokens up to its last query.
        end = tl.minimum(end_block * BLOCK_N, context + tl.minimum(first_query + BLOCK_Q, query_len))
        full_end = tl.minimum(end, (context + first_query + 1) // BLOCK_N * BLOCK_N)
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        if QUANTIZED:
            acc, running_max, running_sum = attend_fp8_range(
                q,
                kv_ptr + kv_head * HEAD_DIM,
                scales_ptr + kv_head * PAGE_SIZE,
                table_ptr,
                context + queries,
                dims,
                dim_mask,
                begin,
                full_end,
                end,
                scale_log2,
                NUM_KV_HEADS,
                HEAD_DIM,
                PADDED_DIM,
                PAGE_SIZE,
                BLOCK_M,
                BLOCK_N,
                FULL_BLOCKS,
            )
        else:
            acc, running_max, running_sum = attend_range(
                q,
                kv_ptr + kv_head * HEAD_DIM,
                table_ptr,
                context + queries,
                dims,
                dim_mask,
                begin,
                full_end,
                end,
                scale_log2,
                NUM_KV_HEADS,
                HEAD_DIM,
                PADDED_DIM,
                PAGE_SIZE,
                BLOCK_M,
                BLOCK_N,
                FULL_BLOCKS,
            )
        # Early queries of a tile may see no key of a later part.
        safe_sum = tl.where(running_sum > 0, running_sum, 1.0)
        acc = acc / safe_sum[:, None]
        if slot < 0:
            places = (tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
            tl.store(out_ptr + places[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            places = (slot.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + rows
            tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
            lse = tl.where(running_sum > 0, running_max + tl.log2(safe_sum), float("-inf"))
            tl.store(lse_ptr + places, lse, mask=row_mask)
