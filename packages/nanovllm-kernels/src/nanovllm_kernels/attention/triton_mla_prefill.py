"""Absorbed latent attention of requests with several queries and a context that is cached, on CUDA: chunks of prompts.

As `triton_prefill`: tiles of query positions times heads, splits where the tiles are too few, and launches that follow
from numbers known to the host. Prompts that are whole in the step are `triton_mla_plain`'s. Of many heads, on Hopper,
`gluon_mla` attends.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.attention.triton_mla_tile import attend_latents, load_queries, specializes
from nanovllm_kernels.attention.triton_prefill import find_request, merge_splits
from nanovllm_kernels.attention.triton_tile import LOG2_E
from nanovllm_kernels.platform import describe


def paged_prefill(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_absorbed: Tensor,
    scale: float,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Attend for the requests with several queries and a context; writes the rows of `out` that are theirs.

    num_absorbed: int32 [1], behind which token none is theirs.
    """
    num_heads, num_tokens, latent_dim = q_latent.shape
    rope_dim, num_reqs = q_rope.shape[2], seq_lens.shape[0]
    config = tiles.latent_config(num_heads, tiles.number_size(q_latent.element_size(), kv_cache.element_size()))
    tile_heads = min(tiles.next_power_of_2(num_heads), config.block_m)
    head_blocks = triton.cdiv(num_heads, tile_heads)
    block_q = config.block_m // tile_heads
    # Tiles start afresh at each request, which wastes less than one a request.
    num_tiles = num_tokens // block_q + num_reqs
    num_sms = describe(q_latent.device).num_sms or tiles.INTERPRETER_SMS
    num_splits = tiles.choose_splits(num_tiles * head_blocks, max_seq_len, num_sms * config.ctas_per_sm)
    if num_splits == 1:
        partial, lse = out, out
    else:
        partial = q_latent.new_empty((num_tokens, num_heads, num_splits, latent_dim), dtype=torch.float32)
        # What no tile writes is for no merge to see.
        lse = q_latent.new_full((num_tokens, num_heads, num_splits), float("-inf"), dtype=torch.float32)
    if specializes(q_latent, q_rope, kv_cache):
        from nanovllm_kernels.attention import gluon_mla

        tables = (block_tables, seq_lens, query_start_loc)
        results = (out, partial, lse)
        gluon_mla.attend_chunks(q_latent, q_rope, kv_cache, *tables, num_absorbed, num_splits, scale, *results)
    else:
        _attend_latents[(head_blocks, num_tiles, num_splits)](
            q_latent,
            q_rope,
            kv_cache,
            kv_cache if kv_scales is None else kv_scales,
            block_tables,
            seq_lens,
            query_start_loc,
            partial,
            lse,
            scale * LOG2_E,
            num_reqs,
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
            BLOCK_Q=block_q,
            QUANTIZED=kv_scales is not None,
            SPLIT=num_splits > 1,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    if num_splits > 1:
        merge_splits(partial, lse, out)


# A step's shape must never cost a compilation: what changes from step to step isn't specialised on.
@triton.jit(
    do_not_specialize=["num_reqs", "table_stride", "num_tokens"],
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
    out_ptr,
    lse_ptr,
    scale_log2,
    num_reqs,
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
    SPLIT: tl.constexpr,
):
    """One tile of queries against one split of its latents. With SPLIT, `out_ptr`, `lse_ptr` take partial results."""
    tile = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    request = find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    first_query = (tile - (query_start // BLOCK_Q + request)) * BLOCK_Q
    if (first_query >= query_len) | (query_len == 1) | (query_len == seq_len):
        return
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // TILE_HEADS
    heads = tl.program_id(0) * TILE_HEADS + rows % TILE_HEADS
    row_mask = (queries < query_len) & (heads < NUM_HEADS)
    positions = seq_len - query_len + queries
    tokens = (query_start + queries).to(tl.int64)
    q_latent, q_rope, scale_log2 = load_queries(
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

    # The tile sees up to its last query; splits share that evenly, in whole blocks.
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    end = seq_len - query_len + last_query + 1
    split_len = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits) * BLOCK_N
    begin = split * split_len
    end = tl.minimum(end, begin + split_len)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_LATENT], dtype=tl.float32)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    # Blocks that every query sees whole need no mask.
    full_end = tl.minimum(end, (seq_len - query_len + first_query + 1) // BLOCK_N * BLOCK_N)
    acc, running_max, running_sum = attend_latents(
        acc,
        running_max,
        running_sum,
        q_latent,
        q_rope,
        kv_ptr,
        scales_ptr,
        table_ptr,
        positions,
        begin,
        full_end,
        end,
        scale_log2,
        LATENT,
        PADDED_LATENT,
        ROPE,
        PADDED_ROPE,
        PAGE_SIZE,
        BLOCK_N,
        QUANTIZED,
        False,
    )
    acc, running_max, running_sum = attend_latents(
        acc,
        running_max,
        running_sum,
        q_latent,
        q_rope,
        kv_ptr,
        scales_ptr,
        table_ptr,
        positions,
        tl.maximum(begin, full_end),
        end,
        end,
        scale_log2,
        LATENT,
        PADDED_LATENT,
        ROPE,
        PADDED_ROPE,
        PAGE_SIZE,
        BLOCK_N,
        QUANTIZED,
        True,
    )

    safe_sum = tl.where(running_sum > 0, running_sum, 1.0)
    acc = acc / safe_sum[:, None]
    places = (tokens * NUM_HEADS + heads) * num_splits + split
    dims = tl.arange(0, PADDED_LATENT)
    out_ptrs = out_ptr + places[:, None] * LATENT + dims[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (dims < LATENT)[None, :])
    if SPLIT:
        lse = tl.where(running_sum > 0, running_max + tl.log2(safe_sum), float("-inf"))
        tl.store(lse_ptr + places, lse, mask=row_mask)
