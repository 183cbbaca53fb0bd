"""Paged attention on CUDA: one Triton kernel for decodes, prefill chunks and mixed batches, and one that merges splits.

A tile holds BLOCK_Q consecutive query positions of one request times the query heads of one key-value head, so that
keys and values are read once for a whole group. Softmax is computed online (Milakov and Gimelshein 2018; Dao et al.
2022), in base 2. Where the tiles are too few to fill the device, the keys of each are cut into splits (Dao et al. 2023)
whose partial results a second kernel merges. Everything about the launch follows from numbers known to the host.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.platform import describe

LOG2_E = 1.4426950408889634


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """See the package's `paged_attention`."""
    num_reqs = seq_lens.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_decodes:
        _launch(
            q[:num_decodes],
            kv_cache,
            block_tables,
            seq_lens,
            query_start_loc[: num_decodes + 1],
            out[:num_decodes],
            scale,
            1,
            max_seq_len,
            first_token=0,
        )
    if num_decodes < num_reqs:
        _launch(
            q[num_decodes:],
            kv_cache,
            block_tables[num_decodes:],
            seq_lens[num_decodes:],
            query_start_loc[num_decodes:],
            out[num_decodes:],
            scale,
            max_query_len,
            max_seq_len,
            first_token=num_decodes,
        )
    return out


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    first_token: int,
) -> None:
    """Attend for the requests of `query_start_loc`, whose first query, number `first_token` of the step, is q[0]."""
    num_tokens, num_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    k_cache, v_cache = kv_cache.split(num_kv_heads, 2)
    num_reqs = query_start_loc.shape[0] - 1
    group = num_heads // num_kv_heads
    config = tiles.tile_config(head_dim, q.element_size(), group, max_query_len)
    one_query = max_query_len == 1
    block_q = 1 if one_query else config.block_m // group
    # Tiles start afresh at each request, which wastes less than one a request.
    num_tiles = num_reqs if one_query else num_tokens // block_q + num_reqs
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
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        partial,
        lse,
        scale * LOG2_E,
        num_reqs,
        first_token,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_Q=block_q,
        ONE_QUERY=one_query,
        SPLIT=num_splits > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        _merge_splits[(num_tokens, num_heads)](
            partial,
            lse,
            out,
            num_splits,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded,
            PADDED_SPLITS=tiles.next_power_of_2(num_splits),
            num_warps=4,
        )


# A step's shape must never cost a compilation: what changes from step to step isn't specialised on.
@triton.jit(
    do_not_specialize=["num_reqs", "first_token", "table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_reqs,
    first_token,
    q_stride_token,
    q_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile of queries against one split of its keys. With SPLIT, `out_ptr` and `lse_ptr` take partial results."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    if ONE_QUERY:
        request = tile
        first_query = 0
    else:
        # Request r's tiles are numbered from start_r // BLOCK_Q + r: find the last request that begins at or before.
        low = 0
        high = num_reqs - 1
        while low < high:
            middle = (low + high + 1) // 2
            begins = (tl.load(query_start_loc_ptr + middle) - first_token) // BLOCK_Q + middle
            low = tl.where(begins <= tile, middle, low)
            high = tl.where(begins <= tile, high, middle - 1)
        request = low
        begins = (tl.load(query_start_loc_ptr + request) - first_token) // BLOCK_Q + request
        first_query = (tile - begins) * BLOCK_Q
    query_start = tl.load(query_start_loc_ptr + request) - first_token
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token - query_start
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (queries < query_len)
    positions = seq_len - query_len + queries
    tokens = (query_start + queries).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    q = tl.load(
        q_ptr + tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head + dims[None, :],
        mask=row_mask[:, None] & dim_mask[None, :],
        other=0.0,
    )

    # The tile sees up to its last query; splits share that evenly, in whole blocks.
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    end = seq_len - query_len + last_query + 1
    split_len = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits) * BLOCK_N
    begin = split * split_len
    end = tl.minimum(end, begin + split_len)

    acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    k_ptr += kv_head * k_stride_head
    v_ptr += kv_head * v_stride_head
    if not ONE_QUERY:
        # Blocks that every query sees whole need no mask.
        full_end = tl.minimum(end, (seq_len - query_len + first_query + 1) // BLOCK_N * BLOCK_N)
        acc, running_max, running_sum = _attend_blocks(
            acc,
            running_max,
            running_sum,
            q,
            k_ptr,
            v_ptr,
            table_ptr,
            positions,
            dims,
            dim_mask,
            begin,
            full_end,
            end,
            scale_log2,
            k_stride_page,
            k_stride_slot,
            v_stride_page,
            v_stride_slot,
            HEAD_DIM == PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            False,
        )
        begin = tl.maximum(begin, full_end)
    acc, running_max, running_sum = _attend_blocks(
        acc,
        running_max,
        running_sum,
        q,
        k_ptr,
        v_ptr,
        table_ptr,
        positions,
        dims,
        dim_mask,
        begin,
        end,
        end,
        scale_log2,
        k_stride_page,
        k_stride_slot,
        v_stride_page,
        v_stride_slot,
        HEAD_DIM == PADDED_DIM,
        PAGE_SIZE,
        BLOCK_N,
        True,
    )

    safe_sum = tl.where(running_sum > 0, running_sum, 1.0)
    acc = acc / safe_sum[:, None]
    places = (tokens * NUM_HEADS + heads) * num_splits + split
    out_ptrs = out_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & dim_mask[None, :])
    if SPLIT:
        lse = tl.where(running_sum > 0, running_max + tl.log2(safe_sum), float("-inf"))
        tl.store(lse_ptr + places, lse, mask=row_mask)


@triton.jit
def _attend_blocks(
    acc,
    running_max,
    running_sum,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    positions,
    dims,
    dim_mask,
    begin,
    end,
    limit,
    scale_log2,
    k_stride_page,
    k_stride_slot,
    v_stride_page,
    v_stride_slot,
    WHOLE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys and values of [begin, end), BLOCK_N at a time, into the online softmax; reads none beyond `limit`."""
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        if MASKED:
            pages = tl.load(table_ptr + columns // PAGE_SIZE, mask=columns < limit, other=0).to(tl.int64)
        else:
            pages = tl.load(table_ptr + columns // PAGE_SIZE).to(tl.int64)
        slots = columns % PAGE_SIZE
        k_ptrs = k_ptr + pages[None, :] * k_stride_page + slots[None, :] * k_stride_slot + dims[:, None]
        v_ptrs = v_ptr + pages[:, None] * v_stride_page + slots[:, None] * v_stride_slot + dims[None, :]
        if MASKED:
            inside = columns < limit
            k = tl.load(k_ptrs, mask=inside[None, :] & dim_mask[:, None], other=0.0)
        elif WHOLE_DIM:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=dim_mask[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        if MASKED:
            # No query sees a token past its own, hence none from `limit` on.
            scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
            v = tl.load(v_ptrs, mask=inside[:, None] & dim_mask[None, :], other=0.0)
        elif WHOLE_DIM:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=dim_mask[None, :], other=0.0)
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        # A row that has seen no key yet would subtract infinity from infinity.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return acc, running_max, running_sum


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
    weights = tl.exp2(lse - tl.max(lse, 0))
    partial = tl.load(
        partial_ptr + (place * num_splits + splits[:, None]) * HEAD_DIM + dims[None, :],
        mask=(lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + place * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
