"""Absorbed latent attention over pages on CUDA, for requests with any number of queries, from a work list.

A tile holds some query positions of one request times as many heads as fit, because all heads read the same latents.
`gluon_mla` takes the same lists with many heads on Hopper. Whole prompts use `triton_mla_plain` or FlashAttention.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.attention.triton_mla_tile import attend_latents, load_queries, specializes
from nanovllm_kernels.attention.triton_tile import LOG2_E
from nanovllm_kernels.attention.triton_work_list import load_part, load_segment, merge_parts
from nanovllm_kernels.attention.work_list import WorkList
from nanovllm_kernels.platform import can_overlap_launches


def paged_attention(
    q_latent: Tensor,
    q_rope: Tensor,
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

    wide: the list was planned with `tiles.latent_config(..., wide=wide)`.
    """
    num_heads, _, latent_dim = q_latent.shape
    size = tiles.number_size(q_latent.element_size(), kv_cache.element_size())
    config = tiles.latent_config(num_heads, size, wide=wide)
    tile_heads = tiles.latent_tile_heads(num_heads, config)
    slots = (2 * work.num_parts, triton.cdiv(num_heads, tile_heads), config.block_m)
    partial = q_latent.new_empty((*slots, latent_dim), dtype=torch.float32)
    lse = q_latent.new_empty(slots, dtype=torch.float32)
    tables = (block_tables, seq_lens, query_start_loc)
    if specializes(q_latent, q_rope, kv_cache):
        from nanovllm_kernels.attention import gluon_mla

        gluon_mla.attend(q_latent, q_rope, kv_cache, *tables, work, scale, out, partial, lse)
    else:
        _attend(q_latent, q_rope, kv_cache, kv_scales, *tables, work, scale, out, partial, lse, config)
    merge_parts(partial, lse, query_start_loc, work, tile_heads, config.block_m // tile_heads, out)


def _attend(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    work: WorkList,
    scale: float,
    out: Tensor,
    partial: Tensor,
    lse: Tensor,
    config: tiles.TileConfig,
) -> None:
    """Attend for each part of `work`; write whole tiles to `out`, parts of tiles to `partial` and `lse`."""
    num_heads, num_tokens, latent_dim = q_latent.shape
    rope_dim, tile_heads = q_rope.shape[2], tiles.latent_tile_heads(num_heads, config)
    overlap = can_overlap_launches(q_latent.device)
    _attend_latents[(partial.shape[1], work.num_parts)](
        q_latent,
        q_rope,
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
        num_tokens,
        q_rope.stride(0),
        q_rope.stride(1),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        PADDED_LATENT=max(16, tiles.next_power_of_2(latent_dim)),
        ROPE=rope_dim,
        PADDED_ROPE=max(16, tiles.next_power_of_2(rope_dim)),
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


# Arguments that change between steps are not specialised on: a step must never cause a compilation.
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
    tile_starts_ptr,
    tiles_ptr,
    parts_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    num_tokens,
    rope_stride_token,
    rope_stride_head,
    table_stride,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend for one part of the work list and one block of TILE_HEADS heads."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head_block = tl.program_id(0)
    part = tl.program_id(1)
    part_begin, part_end, first_tile, end_tile = load_part(tile_starts_ptr, parts_ptr, part)
    rows = tl.arange(0, BLOCK_M)
    heads = head_block * TILE_HEADS + rows % TILE_HEADS
    dims = tl.arange(0, PADDED_LATENT)
    # disable_licm: addresses kept across tiles would take registers from the products.
    for tile in tl.range(first_tile, end_tile, disable_licm=True):
        first_block, end_block, slot = load_segment(tile_starts_ptr, tile, part, part_begin, part_end)
        request = tl.load(tiles_ptr + 2 * tile)
        first_query = tl.load(tiles_ptr + 2 * tile + 1)
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        context = tl.load(seq_lens_ptr + request) - query_len
        queries = first_query + rows // TILE_HEADS
        row_mask = (queries < query_len) & (heads < NUM_HEADS)
        tokens = (query_start + queries).to(tl.int64)
        q_latent, q_rope, tile_scale_log2 = load_queries(
            q_latent_ptr,
            q_rope_ptr,
            tokens,
            heads,
            row_mask,
            num_tokens,
            rope_stride_token,
            rope_stride_head,
            scale_log2,
            LATENT,
            PADDED_LATENT,
            ROPE,
            PADDED_ROPE,
            QUANTIZED,
        )
        # A tile sees the tokens up to its last query.
        end = tl.minimum(end_block * BLOCK_N, context + tl.minimum(first_query + BLOCK_Q, query_len))
        acc, running_max, running_sum = attend_latents(
            q_latent,
            q_rope,
            kv_ptr,
            scales_ptr,
            block_tables_ptr + request.to(tl.int64) * table_stride,
            context + queries,
            first_block * BLOCK_N,
            end,
            tile_scale_log2,
            LATENT,
            PADDED_LATENT,
            ROPE,
            PADDED_ROPE,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            QUANTIZED,
        )
        # Early queries of a tile may see no latent of a later part.
        safe_sum = tl.where(running_sum > 0, running_sum, 1.0)
        acc = acc / safe_sum[:, None]
        mask = row_mask[:, None] & (dims < LATENT)[None, :]
        if slot < 0:
            places = (tokens * NUM_HEADS + heads) * LATENT
            tl.store(out_ptr + places[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            places = (slot.to(tl.int64) * tl.num_programs(0) + head_block) * BLOCK_M + rows
            tl.store(partial_ptr + places[:, None] * LATENT + dims[None, :], acc, mask=mask)
            lse = tl.where(running_sum > 0, running_max + tl.log2(safe_sum), float("-inf"))
            tl.store(lse_ptr + places, lse, mask=row_mask)
