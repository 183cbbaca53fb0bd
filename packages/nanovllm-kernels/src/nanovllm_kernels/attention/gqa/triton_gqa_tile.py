"""Device functions of grouped-query attention: a tile of queries against blocks of paged keys and values."""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl

from nanovllm_kernels.attention.triton_softmax import load_pages, weigh_scores


@triton.jit
def attend_blocks(
    acc,
    running_max,
    running_sum,
    q,
    k_ptr,
    table_ptr,
    query_positions,
    dims,
    dim_mask,
    begin,
    end,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Accumulate keys and values of [begin, end), BLOCK_N at a time, into the online softmax.

    k_ptr: the key head in the cache's first slot.
    MASKED: whether a query may not see all of the keys.
    """
    for start in tl.range(begin, end, BLOCK_N):
        key_positions = start + tl.arange(0, BLOCK_N)
        pages = load_pages(table_ptr, key_positions, end, PAGE_SIZE, MASKED)
        slots = (pages * PAGE_SIZE + key_positions % PAGE_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM)
        k_ptrs = k_ptr + slots[None, :] + dims[:, None]
        v_ptrs = k_ptr + NUM_KV_HEADS * HEAD_DIM + slots[:, None] + dims[None, :]
        if MASKED:
            key_mask = key_positions < end
            k = tl.load(k_ptrs, mask=key_mask[None, :] & dim_mask[:, None], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=dim_mask[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        if MASKED:
            # No query sees a token after its own, so none sees a token from `end` on.
            scores = tl.where(key_positions[None, :] <= query_positions[:, None], scores, float("-inf"))
            v = tl.load(v_ptrs, mask=key_mask[:, None] & dim_mask[None, :], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=dim_mask[None, :], other=0.0)
        weights, rescale, running_max, running_sum = weigh_scores(scores, running_max, running_sum, True)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, running_max, running_sum


@triton.jit
def attend_range(
    q,
    k_ptr,
    table_ptr,
    query_positions,
    dims,
    dim_mask,
    begin,
    unmasked_end,
    end,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
):
    """Return (sums of weighted values, maximum score, sum of weights) over the keys of [begin, end).

    unmasked_end: every query sees all keys before it.
    UNMASKED_LOOP: whether a loop without masks runs up to `unmasked_end` first.
    """
    acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if UNMASKED_LOOP:
        acc, running_max, running_sum = attend_blocks(
            acc,
            running_max,
            running_sum,
            q,
            k_ptr,
            table_ptr,
            query_positions,
            dims,
            dim_mask,
            begin,
            unmasked_end,
            scale_log2,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            False,
        )
        begin = tl.maximum(begin, unmasked_end)
    return attend_blocks(
        acc,
        running_max,
        running_sum,
        q,
        k_ptr,
        table_ptr,
        query_positions,
        dims,
        dim_mask,
        begin,
        end,
        scale_log2,
        NUM_KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        PAGE_SIZE,
        BLOCK_N,
        True,
    )
