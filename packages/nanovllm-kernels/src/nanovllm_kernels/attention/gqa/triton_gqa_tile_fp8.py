"""Computes attention of a tile of queries over an FP8 cache: e4m3, with one scale per token and head (see `fp8`).

Products are in float32 for float32 queries, and in float16 for other queries. Float16 represents every e4m3 number.
"""

import triton
import triton.language as tl

from nanovllm_kernels.attention.triton_softmax import (
    floor_to_power_of_2,
    load_page_numbers,
    scale_scores,
    weigh_scaled_scores,
)


@triton.jit
def queries_to_float16(q, scale_log2):
    """Return (`q` divided by a power of two, in float16; `scale_log2` multiplied by this power).

    Without the division, products could overflow. If `q` is float32, both arguments are returned unchanged.
    """
    # No early return, because Triton would also compile the code after the return.
    if q.dtype != tl.float32:
        q_float32 = q.to(tl.float32)
        power = floor_to_power_of_2(tl.max(tl.max(tl.abs(q_float32), 1), 0))
        q = (q_float32 / power).to(tl.float16)
        scale_log2 *= power
    return q, scale_log2


@triton.jit
def attend_fp8_range(
    q,
    k_ptr,
    exponents_ptr,
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
    """Attend like `triton_gqa_tile.attend_range`.

    The returned maximum is the maximum score (base 2) minus 15. The returned sum of weights excludes the value scales.
    exponents_ptr: pointer to the key head's scale in the cache's first slot. A scale is stored as a biased exponent.
    """
    q, scale_log2 = queries_to_float16(q, scale_log2)
    dims = tl.arange(0, q.shape[1])
    dim_mask = dims < HEAD_DIM
    # The product needs the values (V) transposed, and the hardware transposes only 16-bit elements of shared memory.
    # Therefore load the 8-bit elements of V in pairs.
    dim_pairs = tl.arange(0, q.shape[1] // 2)
    pair_mask = dim_pairs < HEAD_DIM // 2
    v_ptr = (k_ptr + NUM_KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.uint16), bitcast=True)
    even_acc = tl.zeros([q.shape[0], q.shape[1] // 2], dtype=tl.float32)
    odd_acc = tl.zeros([q.shape[0], q.shape[1] // 2], dtype=tl.float32)
    running_max = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([q.shape[0]], dtype=tl.float32)
    for masked in tl.static_range(0 if UNMASKED_LOOP else 1, 2):
        for start in tl.range(begin, end if masked else unmasked_end, BLOCK_N):
            key_positions = start + tl.arange(0, BLOCK_N)
            key_mask = key_positions < end
            pages = load_page_numbers(table_ptr, key_positions, end, PAGE_SIZE, masked)
            page_offsets = key_positions % PAGE_SIZE
            first_heads = (pages * PAGE_SIZE + page_offsets) * (2 * NUM_KV_HEADS)  # Index of each slot's first head.
            k_ptrs = k_ptr + first_heads[None, :] * HEAD_DIM + dims[:, None]
            v_ptrs = v_ptr + first_heads[:, None] * (HEAD_DIM // 2) + dim_pairs[None, :]
            k_exponent_ptrs = exponents_ptr + pages * (2 * NUM_KV_HEADS * PAGE_SIZE) + page_offsets
            v_exponent_ptrs = k_exponent_ptrs + NUM_KV_HEADS * PAGE_SIZE
            if masked:
                k = tl.load(k_ptrs, mask=key_mask[None, :] & dim_mask[:, None], other=0.0)
                k_exponents = tl.load(k_exponent_ptrs, mask=key_mask, other=0).to(tl.int32)
                v_exponents = tl.load(v_exponent_ptrs, mask=key_mask, other=0).to(tl.int32)
                v_pairs = tl.load(v_ptrs, mask=key_mask[:, None] & pair_mask[None, :], other=0)
            else:
                k_exponents = tl.load(k_exponent_ptrs).to(tl.int32)
                v_exponents = tl.load(v_exponent_ptrs).to(tl.int32)
                if q.shape[1] == HEAD_DIM:
                    k = tl.load(k_ptrs)
                    v_pairs = tl.load(v_ptrs)
                else:
                    k = tl.load(k_ptrs, mask=dim_mask[:, None], other=0.0)
                    v_pairs = tl.load(v_ptrs, mask=pair_mask[None, :], other=0)
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
            scores = scale_scores(scores, k_exponents, v_exponents)
            if masked:
                # Scores need no mask for `end`: `end` is the end of a block, or the causal mask hides all later keys.
                scores = tl.where(key_positions[None, :] <= query_positions[:, None], scores, float("-inf"))
            weights, rescale, running_max, running_sum = weigh_scaled_scores(
                scores, running_max, running_sum, v_exponents
            )
            weights = weights.to(q.dtype)
            v_even = (v_pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
            v_odd = (v_pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
            even_acc = tl.dot(weights, v_even, even_acc * rescale[:, None], input_precision="ieee")
            odd_acc = tl.dot(weights, v_odd, odd_acc * rescale[:, None], input_precision="ieee")
        begin = tl.maximum(begin, unmasked_end)
    return tl.interleave(even_acc, odd_acc), running_max, running_sum
