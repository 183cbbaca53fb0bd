"""Provides device functions of absorbed attention: a tile of queries attends directly to blocks of paged latents.

The latents of a block are both keys and values. In an FP8 cache, a latent and its rotated key part share one scale.
"""

import triton
import triton.language as tl

from nanovllm_kernels.attention.triton_softmax import (
    floor_to_power_of_2,
    load_page_numbers,
    scale_scores,
    weigh_scaled_scores,
    weigh_scores,
)


@triton.jit
def load_queries(
    sources,
    tokens,
    heads,
    row_mask,
    dims,
    rope_dims,
    scale_log2,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Return (latent parts, rotated parts, new `scale_log2`) of queries. Row i is head heads[i] of token tokens[i].

    sources: (pointer to contiguous latent parts [H, T, L], pointer to rotated parts [T, H, R], T, stride of T in the
        rotated parts, stride of H in the rotated parts).
    scale_log2: softmax scale times log2(e). Scores are multiplied by this factor.
    QUANTIZED: whether the cache is FP8. 16-bit queries are then divided by a power of two and converted to float16, and
        `scale_log2` is multiplied by this power.
    """
    latent_ptr, rope_ptr, num_tokens, rope_stride_token, rope_stride_head = sources
    latent_offsets = (heads.to(tl.int64) * num_tokens + tokens) * LATENT_DIM
    rope_offsets = tokens * rope_stride_token + heads * rope_stride_head
    latent = tl.load(
        latent_ptr + latent_offsets[:, None] + dims[None, :],
        mask=row_mask[:, None] & (dims < LATENT_DIM)[None, :],
        other=0.0,
    )
    rope = tl.load(
        rope_ptr + rope_offsets[:, None] + rope_dims[None, :],
        mask=row_mask[:, None] & (rope_dims < ROPE_DIM)[None, :],
        other=0.0,
    )
    if QUANTIZED and latent.dtype != tl.float32:
        latent_float32 = latent.to(tl.float32)
        rope_float32 = rope.to(tl.float32)
        row_max = tl.maximum(tl.max(tl.abs(latent_float32), 1), tl.max(tl.abs(rope_float32), 1))
        power = floor_to_power_of_2(tl.max(row_max, 0))
        latent = (latent_float32 / power).to(tl.float16)
        rope = (rope_float32 / power).to(tl.float16)
        scale_log2 *= power
    return latent, rope, scale_log2


@triton.jit
def attend_range(
    query,
    cache,
    query_positions,
    begin,
    end,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Attend to latents at positions [begin, end). Return (weighted sum, maximum score, sum of weights) of each query.

    query: result of `load_queries`.
    cache: (pointer to the cache, pointer to the scales' biased exponents, pointer to the request's page numbers).
    QUANTIZED: whether the cache is FP8. The returned maximum is then the maximum score minus 15, and the sum
        of weights excludes the scales.
    """
    q_latent, q_rope, scale_log2 = query
    kv_ptr, exponents_ptr, table_ptr = cache
    # All blocks are masked, because a second loop without masks would need too many registers.
    acc = tl.zeros(q_latent.shape, dtype=tl.float32)
    running_max = tl.full([q_latent.shape[0]], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([q_latent.shape[0]], dtype=tl.float32)
    dims = tl.arange(0, q_latent.shape[1])
    rope_dims = tl.arange(0, q_rope.shape[1])
    for start in tl.range(begin, end, BLOCK_N):
        key_positions = start + tl.arange(0, BLOCK_N)
        key_mask = key_positions < end
        pages = load_page_numbers(table_ptr, key_positions, end, PAGE_SIZE, True)
        slots = pages * PAGE_SIZE + key_positions % PAGE_SIZE
        slot_ptrs = kv_ptr + slots[:, None] * (LATENT_DIM + ROPE_DIM)
        latent_mask = key_mask[:, None] & (dims < LATENT_DIM)[None, :]
        latent = tl.load(slot_ptrs + dims[None, :], mask=latent_mask, other=0.0)
        rope_mask = key_mask[:, None] & (rope_dims < ROPE_DIM)[None, :]
        k_rope = tl.load(slot_ptrs + LATENT_DIM + rope_dims[None, :], mask=rope_mask, other=0.0)
        latent = latent.to(q_latent.dtype)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope.to(q_rope.dtype)), scores, input_precision="ieee") * scale_log2
        if QUANTIZED:
            exponents = tl.load(exponents_ptr + slots, mask=key_mask, other=0).to(tl.int32)
            scores = scale_scores(scores, exponents, exponents)
        # Scores need no mask for `end`: `end` is the end of a block, or the causal mask hides all later tokens.
        scores = tl.where(key_positions[None, :] <= query_positions[:, None], scores, float("-inf"))
        if QUANTIZED:
            weights, rescale, running_max, running_sum = weigh_scaled_scores(
                scores, running_max, running_sum, exponents
            )
        else:
            weights, rescale, running_max, running_sum = weigh_scores(scores, running_max, running_sum, True)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
    return acc, running_max, running_sum
