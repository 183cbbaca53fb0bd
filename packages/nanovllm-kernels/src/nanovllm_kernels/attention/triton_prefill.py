"""Paged attention of requests with several queries each, on CUDA: prompts, whole or in chunks.

A tile holds BLOCK_Q consecutive query positions of one request times the query heads of one key-value head, so that
keys and values are read once for a whole group. Where the tiles are too few to fill the device, the keys of each are
cut into splits (Dao et al. 2023) whose partial results a second kernel merges. Everything about the launch follows from
numbers known to the host; which requests are meant is found on the device.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.attention.triton_tile import LOG2_E, attend_blocks
from nanovllm_kernels.attention.triton_tile_fp8 import attend_fp8_blocks, narrow_queries
from nanovllm_kernels.platform import describe


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Attend for the requests with several queries; writes the rows of `out` that are theirs, or padding."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    num_reqs = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    config = tiles.tile_config(
        head_dim, tiles.number_size(q.element_size(), kv_cache.element_size()), group, max_query_len
    )
    block_q = config.block_m // group
    # Tiles start afresh at each request, which wastes less than one a request.
    num_tiles = num_tokens // block_q + num_reqs
    num_sms = describe(q.device).num_sms or tiles.INTERPRETER_SMS
    num_splits = tiles.choose_splits(num_tiles * num_kv_heads, max_seq_len, num_sms * config.ctas_per_sm)
    if num_splits == 1:
        partial, lse = out, out
    else:
        partial = q.new_empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32)
        lse = q.new_empty((num_tokens, num_heads, num_splits), dtype=torch.float32)
    padded = tiles.next_power_of_2(head_dim)
    _attend[(num_kv_heads, num_tiles, num_splits)](
        q,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        seq_lens,
        query_start_loc,
        partial,
        lse,
        scale * LOG2_E,
        num_reqs,
        q.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        QUANTIZED=kv_scales is not None,
        BLOCK_Q=block_q,
        SPLIT=num_splits > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        merge_splits(partial, lse, out)


def merge_splits(partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Merge the splits of each query head into its row of `out` [T, H, D].

    partial: float32 [T, H, splits, D], each split's own softmax; lse: float32 [T, H, splits], the logarithm of its
    normalizer to base 2, -inf for one that saw nothing; a row of which all are so is left as it is.
    """
    num_tokens, num_heads, num_splits, head_dim = partial.shape
    _merge_splits[(num_tokens, num_heads)](
        partial,
        lse,
        out,
        num_splits,
        HEAD_DIM=head_dim,
        PADDED_DIM=tiles.next_power_of_2(head_dim),
        PADDED_SPLITS=tiles.next_power_of_2(num_splits),
        num_warps=4,
    )


@triton.jit
def find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q: tl.constexpr):
    """Whose tile this is: request r's tiles, of BLOCK_Q positions, are numbered from start_r // BLOCK_Q + r."""
    # The last request that begins at or before.
    low = 0
    high = num_reqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    return low


# A step's shape must never cost a compilation: what changes from step to step isn't specialised on.
@triton.jit(
    do_not_specialize=["num_reqs", "table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend(
    q_ptr,
    kv_ptr,
    scales_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_reqs,
    q_stride_token,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile of queries against one split of its keys. With SPLIT, `out_ptr` and `lse_ptr` take partial results."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    request = find_request(query_start_loc_ptr, num_reqs, tile, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_query = (tile - (query_start // BLOCK_Q + request)) * BLOCK_Q
    if first_query >= query_len:
        return
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    if query_len == 1:
        if SPLIT:
            # Nothing for the merge to see.
            places = (query_start * (NUM_KV_HEADS * GROUP) + heads) * num_splits + split
            tl.store(lse_ptr + places, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=rows < GROUP)
        return
    seq_len = tl.load(seq_lens_ptr + request)
    row_mask = (rows < BLOCK_Q * GROUP) & (queries < query_len)
    positions = seq_len - query_len + queries
    tokens = (query_start + queries).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    q = tl.load(
        q_ptr + tokens[:, None] * q_stride_token + heads[:, None] * HEAD_DIM + dims[None, :],
        mask=row_mask[:, None] & dim_mask[None, :],
        other=0.0,
    )

    # The tile sees up to its last query; splits share that evenly, in whole blocks.
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    end = seq_len - query_len + last_query + 1
    split_len = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits) * BLOCK_N
    begin = split * split_len
    end = tl.minimum(end, begin + split_len)

    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    k_ptr = kv_ptr + kv_head * HEAD_DIM
    # Blocks that every query sees whole need no mask.
    full_end = tl.minimum(end, (seq_len - query_len + first_query + 1) // BLOCK_N * BLOCK_N)
    rest = tl.maximum(begin, full_end)
    if QUANTIZED:
        q, scale_log2 = narrow_queries(q, scale_log2)
        scales_ptr += kv_head * PAGE_SIZE
        even = tl.zeros([BLOCK_M, PADDED_DIM // 2], dtype=tl.float32)
        odd = tl.zeros([BLOCK_M, PADDED_DIM // 2], dtype=tl.float32)
        even, odd, running_max, running_sum = attend_fp8_blocks(
            even,
            odd,
            running_max,
            running_sum,
            q,
            k_ptr,
            scales_ptr,
            table_ptr,
            positions,
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
            BLOCK_N,
            False,
        )
        even, odd, running_max, running_sum = attend_fp8_blocks(
            even,
            odd,
            running_max,
            running_sum,
            q,
            k_ptr,
            scales_ptr,
            table_ptr,
            positions,
            dims,
            dim_mask,
            rest,
            end,
            end,
            scale_log2,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            True,
        )
        acc = tl.interleave(even, odd)
    else:
        acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
        acc, running_max, running_sum = attend_blocks(
            acc,
            running_max,
            running_sum,
            q,
            k_ptr,
            table_ptr,
            positions,
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
            BLOCK_N,
            False,
        )
        acc, running_max, running_sum = attend_blocks(
            acc,
            running_max,
            running_sum,
            q,
            k_ptr,
            table_ptr,
            positions,
            dims,
            dim_mask,
            rest,
            end,
            end,
            scale_log2,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            True,
        )

    safe_sum = tl.where(running_sum > 0, running_sum, 1.0)
    acc = acc / safe_sum[:, None]
    places = (tokens * (NUM_KV_HEADS * GROUP) + heads) * num_splits + split
    out_ptrs = out_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & dim_mask[None, :])
    if SPLIT:
        lse = tl.where(running_sum > 0, running_max + tl.log2(safe_sum), float("-inf"))
        tl.store(lse_ptr + places, lse, mask=row_mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """Weigh the splits of one query head by the share of the softmax that each saw."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    lse = tl.load(lse_ptr + place * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    if top == float("-inf"):
        return
    weights = tl.exp2(lse - top)
    partial = tl.load(
        partial_ptr + (place * num_splits + splits[:, None]) * HEAD_DIM + dims[None, :],
        mask=(lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + place * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
