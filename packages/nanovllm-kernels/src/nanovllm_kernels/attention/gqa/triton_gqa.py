"""Computes paged grouped-query attention of a work list in Triton, for requests with any number of queries.

A tile holds consecutive queries of one request, for the query heads of one key-value head. The work list cuts each
tile's keys into blocks, concatenates the blocks of all tiles, and cuts this sequence into parts. A part may span
several tiles. A program computes one part for one key-value head.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.attention.gqa.triton_gqa_tile import attend_range
from nanovllm_kernels.attention.gqa.triton_gqa_tile_fp8 import attend_fp8_range
from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.attention_batch import PagedRequests
from nanovllm_kernels.attention.plan.work_list import WorkList
from nanovllm_kernels.attention.triton_softmax import LOG2_E
from nanovllm_kernels.attention.triton_split_kv import (
    allocate_partial_results,
    load_part,
    load_segment,
    load_tile,
    merge_parts,
    store_tile,
)
from nanovllm_kernels.platform import can_overlap_launches


def attend_to_pages(
    q: Tensor, requests: PagedRequests, work: WorkList, scale: float, out: Tensor, *, many_queries: bool
) -> None:
    """Compute attention for the requests of the work list `work`, and write the results to `out`.

    many_queries: must equal the argument of `tile_configs.gqa_tile_config` that gave the tile size of the work list.
    """
    _, num_heads, head_dim = q.shape
    kv_cache, kv_scales, block_tables, seq_lens, query_start_loc = requests
    page_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    group_size = num_heads // num_kv_heads
    element_bytes = tile_configs.tile_element_bytes(q.element_size(), kv_cache.element_size())
    config = tile_configs.gqa_tile_config(head_dim, element_bytes, group_size, many_queries=many_queries)
    block_q = config.block_m // group_size  # Query positions per tile.
    can_overlap = can_overlap_launches(q.device)
    partial_results = allocate_partial_results(work, num_kv_heads, config.block_m, head_dim, q.device)
    _attend[(num_kv_heads, work.num_parts)](
        q,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        seq_lens,
        query_start_loc,
        *work,
        out,
        *partial_results,
        scale * LOG2_E,
        q.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(16, tile_configs.next_power_of_2(head_dim)),
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_Q=block_q,
        UNMASKED_LOOP=many_queries,
        QUANTIZED=kv_scales is not None,
        OVERLAP=can_overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=can_overlap,
    )
    merge_parts(partial_results, query_start_loc, work, group_size, block_q, out)


# Triton does not specialise on arguments that change between steps, because a step must never cause a compilation.
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
    tile_first_blocks_ptr,
    tiles_ptr,
    parts_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    scale_log2,
    q_stride_token,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one part of the work list, for the query heads of one key-value head.

    tile_first_blocks_ptr, tiles_ptr, parts_ptr: tensors of `WorkList`.
    UNMASKED_LOOP: whether a first loop, without masks, visits keys that all rows see. One loop is faster for decodes.
    QUANTIZED: whether the cache is FP8. OVERLAP: whether to use programmatic dependent launch.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    part_start, part_end, first_tile, end_tile = load_part(tile_first_blocks_ptr, parts_ptr, part)
    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    dims = tl.arange(0, PADDED_DIM)
    # disable_licm: addresses that stayed in registers across tiles would leave too few registers for the products.
    for tile in tl.range(first_tile, end_tile, disable_licm=True):
        # `partial_slot`: index in the partial results to store at, or -1 if this part has all blocks of the tile.
        first_block, end_block, partial_slot = load_segment(tile_first_blocks_ptr, tile, part, part_start, part_end)
        request, first_query, query_start, query_len, context_len = load_tile(
            tiles_ptr, seq_lens_ptr, query_start_loc_ptr, tile
        )
        queries = first_query + rows // GROUP_SIZE
        row_mask = (rows < BLOCK_Q * GROUP_SIZE) & (queries < query_len)
        tokens = (query_start + queries).to(tl.int64)
        q_ptrs = q_ptr + tokens[:, None] * q_stride_token + heads[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptrs, mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        begin = first_block * BLOCK_N
        # A tile sees the keys up to the position of the tile's last query.
        end = tl.minimum(end_block * BLOCK_N, context_len + tl.minimum(first_query + BLOCK_Q, query_len))
        unmasked_end = tl.minimum(end, (context_len + first_query + 1) // BLOCK_N * BLOCK_N)
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        range_args = (table_ptr, context_len + queries, begin, unmasked_end, end)
        k_ptr = kv_ptr + kv_head * HEAD_DIM
        if QUANTIZED:
            k_scales_ptr = scales_ptr + kv_head * PAGE_SIZE
            softmax_state = attend_fp8_range(
                q,
                k_ptr,
                k_scales_ptr,
                *range_args,
                scale_log2,
                NUM_KV_HEADS,
                HEAD_DIM,
                PAGE_SIZE,
                BLOCK_N,
                UNMASKED_LOOP,
            )
        else:
            softmax_state = attend_range(
                q, k_ptr, *range_args, scale_log2, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, UNMASKED_LOOP
            )
        out_rows = tokens * (NUM_KV_HEADS * GROUP_SIZE) + heads
        out_pointers = (out_ptr, partial_out_ptr, partial_lse_ptr)
        store_tile(out_pointers, softmax_state, partial_slot, kv_head, out_rows, row_mask, NUM_KV_HEADS, HEAD_DIM)
