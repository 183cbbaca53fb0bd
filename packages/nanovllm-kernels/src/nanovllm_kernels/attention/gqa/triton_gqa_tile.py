"""Holds the Triton device function that computes attention of one tile of queries over paged keys and values."""

import triton
import triton.language as tl

from nanovllm_kernels.attention.triton_softmax import load_page_numbers, weigh_scores


@triton.jit
def attend_range(
    q,
    k_ptr,
    table_ptr,
    query_positions,
    begin,
    unmasked_end,
    end,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
):
    """Attend to keys at positions [begin, end). Return (sums of weighted values, maximum score, sum of weights).

    k_ptr: pointer to the tile's key head in the cache's first slot. A slot has all key heads, then all value heads.
    table_ptr: pointer to the request's page numbers.
    unmasked_end: every query sees all keys before this position.
    UNMASKED_LOOP: whether a first loop, without masks of keys, visits the keys before `unmasked_end`.
    """
    dims = tl.arange(0, q.shape[1])
    dim_mask = dims < HEAD_DIM
    acc = tl.zeros(q.shape, dtype=tl.float32)
    running_max = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([q.shape[0]], dtype=tl.float32)
    for masked in tl.static_range(0 if UNMASKED_LOOP else 1, 2):
        for start in tl.range(begin, end if masked else unmasked_end, BLOCK_N):
            key_positions = start + tl.arange(0, BLOCK_N)
            pages = load_page_numbers(table_ptr, key_positions, end, PAGE_SIZE, masked)
            slot_offsets = (pages * PAGE_SIZE + key_positions % PAGE_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM)
            k_ptrs = k_ptr + slot_offsets[None, :] + dims[:, None]
            v_ptrs = k_ptr + NUM_KV_HEADS * HEAD_DIM + slot_offsets[:, None] + dims[None, :]
            if masked:
                key_mask = key_positions < end
                k = tl.load(k_ptrs, mask=key_mask[None, :] & dim_mask[:, None], other=0.0)
            elif q.shape[1] == HEAD_DIM:
                k = tl.load(k_ptrs)
            else:
                k = tl.load(k_ptrs, mask=dim_mask[:, None], other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale_log2
            if masked:
                # Scores need no mask for `end`: `end` is the end of a block, or the causal mask hides all later keys.
                scores = tl.where(key_positions[None, :] <= query_positions[:, None], scores, float("-inf"))
                v = tl.load(v_ptrs, mask=key_mask[:, None] & dim_mask[None, :], other=0.0)
            elif q.shape[1] == HEAD_DIM:
                v = tl.load(v_ptrs)
            else:
                v = tl.load(v_ptrs, mask=dim_mask[None, :], other=0.0)
            weights, rescale, running_max, running_sum = weigh_scores(scores, running_max, running_sum, True)
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        begin = tl.maximum(begin, unmasked_end)
    return acc, running_max, running_sum
