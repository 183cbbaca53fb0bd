"""Computes absorbed attention (directly over latents) of a work list on CUDA, for requests with any number of queries.

A tile holds the queries of many heads at a few positions of one request. These heads share the loads of latents.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.attention.mla.triton_absorbed_tile import attend_range, load_queries
from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.attention_batch import PagedRequests
from nanovllm_kernels.attention.plan.work_list import WorkList
from nanovllm_kernels.attention.triton_softmax import LOG2_E
from nanovllm_kernels.attention.triton_split_kv import (
    PartialResults,
    allocate_partial_results,
    load_part,
    load_segment,
    load_tile,
    merge_parts,
    store_tile,
)
from nanovllm_kernels.platform import can_overlap_launches, describe_device


def attend_to_latents(
    q_latent: Tensor,
    q_rope: Tensor,
    requests: PagedRequests,
    work: WorkList,
    scale: float,
    out: Tensor,
    *,
    many_queries: bool,
) -> None:
    """Compute attention of the requests of `work`, and write their rows of `out`.

    q_latent: contiguous [H, T, L].
    q_rope: [T, H, R], the last dimension contiguous.
    out: contiguous [T, H, L].
    many_queries: the value that was passed to `tile_configs.latent_tile_config` when the work list was planned.
    """
    num_heads, _, latent_dim = q_latent.shape
    element_bytes = tile_configs.tile_element_bytes(q_latent.element_size(), requests.kv_cache.element_size())
    config = tile_configs.latent_tile_config(num_heads, element_bytes, many_queries=many_queries)
    tile_heads = tile_configs.latent_tile_heads(num_heads, config)
    num_head_blocks = triton.cdiv(num_heads, tile_heads)
    partial = allocate_partial_results(work, num_head_blocks, config.block_m, latent_dim, q_latent.device)
    if _supports_gluon(q_latent, q_rope, requests.kv_cache):
        from nanovllm_kernels.attention.mla import gluon_absorbed

        gluon_absorbed.attend(q_latent, q_rope, requests, work, scale, out, partial)
    else:
        _attend(q_latent, q_rope, requests, work, scale, out, partial, config)
    merge_parts(partial, requests.query_start_loc, work, tile_heads, config.block_m // tile_heads, out)


def _supports_gluon(q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor) -> bool:
    """Return whether `gluon_absorbed` supports these shapes and dtypes on this device."""
    num_heads, _, latent_dim = q_latent.shape
    return (
        num_heads % tile_configs.GLUON_TILE_HEADS == 0
        and (latent_dim, q_rope.shape[2]) == (512, 64)
        and (q_latent.element_size(), kv_cache.element_size()) == (2, 2)
        and kv_cache.shape[1] in (16, 32, 64)
        and describe_device(q_latent.device).capability == (9, 0)
    )


def _attend(
    q_latent: Tensor,
    q_rope: Tensor,
    requests: PagedRequests,
    work: WorkList,
    scale: float,
    out: Tensor,
    partial: PartialResults,
    config: tile_configs.TileConfig,
) -> None:
    """Compute each part of `work`. Write results of whole tiles to `out`, and partial results to `partial`."""
    kv_cache, kv_scales, block_tables, seq_lens, query_start_loc = requests
    num_heads, num_tokens, latent_dim = q_latent.shape
    rope_dim, tile_heads = q_rope.shape[2], tile_configs.latent_tile_heads(num_heads, config)
    overlap = can_overlap_launches(q_latent.device)
    _attend_latents[(triton.cdiv(num_heads, tile_heads), work.num_parts)](
        q_latent,
        q_rope,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        seq_lens,
        query_start_loc,
        *work,
        out,
        *partial,
        scale * LOG2_E,
        num_tokens,
        q_rope.stride(0),
        q_rope.stride(1),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        LATENT_DIM=latent_dim,
        PADDED_LATENT_DIM=max(16, tile_configs.next_power_of_2(latent_dim)),
        ROPE_DIM=rope_dim,
        PADDED_ROPE_DIM=max(16, tile_configs.next_power_of_2(rope_dim)),
        PAGE_SIZE=kv_cache.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILE_HEADS=tile_heads,
        BLOCK_Q=config.block_m // tile_heads,
        QUANTIZED=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        launch_pdl=overlap,
    )


# Triton does not specialise on arguments that change between steps, because a step must never cause a compilation.
@triton.jit(
    do_not_specialize=["table_stride", "num_tokens"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend_latents(
    q_latent_ptr,
    q_rope_ptr,
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
    num_tokens,
    rope_stride_token,
    rope_stride_head,
    table_stride,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PADDED_LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PADDED_ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one part of the work list for one block of TILE_HEADS heads.

    BLOCK_M: rows per tile. BLOCK_N: latents per block. BLOCK_Q: query positions per tile.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head_block = tl.program_id(0)
    part = tl.program_id(1)
    part_start, part_end, first_tile, end_tile = load_part(tile_first_blocks_ptr, parts_ptr, part)
    rows = tl.arange(0, BLOCK_M)
    heads = head_block * TILE_HEADS + rows % TILE_HEADS
    dims = tl.arange(0, PADDED_LATENT_DIM)
    rope_dims = tl.arange(0, PADDED_ROPE_DIM)
    query_sources = (q_latent_ptr, q_rope_ptr, num_tokens, rope_stride_token, rope_stride_head)
    # Disable loop-invariant code motion (licm): hoisted addresses would occupy registers that the products need.
    for tile in tl.range(first_tile, end_tile, disable_licm=True):
        first_block, end_block, partial_slot = load_segment(tile_first_blocks_ptr, tile, part, part_start, part_end)
        request, first_query, query_start, query_len, context_len = load_tile(
            tiles_ptr, seq_lens_ptr, query_start_loc_ptr, tile
        )
        queries = first_query + rows // TILE_HEADS
        row_mask = (queries < query_len) & (heads < NUM_HEADS)
        tokens = (query_start + queries).to(tl.int64)
        query = load_queries(
            query_sources, tokens, heads, row_mask, dims, rope_dims, scale_log2, LATENT_DIM, ROPE_DIM, QUANTIZED
        )
        end = tl.minimum(end_block * BLOCK_N, context_len + tl.minimum(first_query + BLOCK_Q, query_len))
        cache = (kv_ptr, scales_ptr, block_tables_ptr + request.to(tl.int64) * table_stride)
        bounds = (first_block * BLOCK_N, end)
        softmax_state = attend_range(
            query, cache, context_len + queries, *bounds, LATENT_DIM, ROPE_DIM, PAGE_SIZE, BLOCK_N, QUANTIZED
        )
        out_rows = tokens * NUM_HEADS + heads
        out_pointers = (out_ptr, partial_out_ptr, partial_lse_ptr)
        store_tile(
            out_pointers, softmax_state, partial_slot, head_block, out_rows, row_mask, tl.num_programs(0), LATENT_DIM
        )
