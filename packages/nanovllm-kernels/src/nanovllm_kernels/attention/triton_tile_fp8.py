"""The tile of `triton_tile` for an FP8 cache: e4m3 keys and values, with a scale per token and head (see `fp8`).

Products are float16, to which e4m3 converts exactly and fastest. To stay within its range, queries are divided by a
power of two, and the values' scales are added to the scores in base 2: weights then include these scales, and stay
below 2^15. With float32 queries everything is float32.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl


@triton.jit
def narrow_queries(q, scale_log2):
    """Return `q` divided by a power of two as float16, and `scale_log2` times that power; float32 is left unchanged."""
    # A single return, because Triton would compile code after an early return too.
    if q.dtype != tl.float32:
        wide = q.to(tl.float32)
        top = tl.max(tl.max(tl.abs(wide), 1), 0)
        # Keep the exponent only; the minimum is a normal number's.
        power = tl.maximum(top.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)
        q = (wide / power).to(tl.float16)
        scale_log2 *= power
    return q, scale_log2


@triton.jit
def attend_fp8_blocks(
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
    end,
    limit,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`attend_blocks` for an FP8 cache, with separate accumulators for even and odd dimensions.

    q, scale_log2: from `narrow_queries`.
    scales_ptr: the key head's scale in the cache's first slot.
    running_max: the weights' reference point; with `running_sum` it gives the plain softmax's normalizer.
    """
    # Load pairs of values as 16 bits: the hardware transposes tiles of 16-bit elements from shared memory.
    pairs = tl.arange(0, PADDED_DIM // 2)
    pair_mask = pairs < HEAD_DIM // 2
    v_ptr = (k_ptr + NUM_KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.uint16), bitcast=True)
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < limit
        if MASKED:
            pages = tl.load(table_ptr + columns // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            pages = tl.load(table_ptr + columns // PAGE_SIZE).to(tl.int64)
        offsets = columns % PAGE_SIZE
        slots = (pages * PAGE_SIZE + offsets) * (2 * NUM_KV_HEADS)
        k_ptrs = k_ptr + slots[None, :] * HEAD_DIM + dims[:, None]
        v_ptrs = v_ptr + slots[:, None] * (HEAD_DIM // 2) + pairs[None, :]
        k_scale_ptrs = scales_ptr + pages * (2 * NUM_KV_HEADS * PAGE_SIZE) + offsets
        v_scale_ptrs = k_scale_ptrs + NUM_KV_HEADS * PAGE_SIZE
        if MASKED:
            k = tl.load(k_ptrs, mask=inside[None, :] & dim_mask[:, None], other=0.0)
            k_exponents = tl.load(k_scale_ptrs, mask=inside, other=0).to(tl.int32)
            v_exponents = tl.load(v_scale_ptrs, mask=inside, other=0).to(tl.int32)
            v = tl.load(v_ptrs, mask=inside[:, None] & pair_mask[None, :], other=0)
        else:
            k_exponents = tl.load(k_scale_ptrs).to(tl.int32)
            v_exponents = tl.load(v_scale_ptrs).to(tl.int32)
            if HEAD_DIM == PADDED_DIM:
                k = tl.load(k_ptrs)
                v = tl.load(v_ptrs)
            else:
                k = tl.load(k_ptrs, mask=dim_mask[:, None], other=0.0)
                v = tl.load(v_ptrs, mask=pair_mask[None, :], other=0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
        scores = scores * power_of_2(k_exponents)[None, :] + (v_exponents - 127).to(tl.float32)[None, :]
        if MASKED:
            # No query sees a token after its own, so none sees a token from `limit` on.
            scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
        # Weights reach 2^15, so that the small weights of a long context are not subnormal in float16.
        new_max = tl.maximum(running_max, tl.max(scores, 1) - 15)
        # Avoid infinity minus infinity in rows that have seen no key yet.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        running_sum = running_sum * rescale + tl.sum(weights * power_of_2(254 - v_exponents)[None, :], 1)
        weights = weights.to(q.dtype)
        v_even = (v & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
        v_odd = (v >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(q.dtype)
        even = tl.dot(weights, v_even, even * rescale[:, None], input_precision="ieee")
        odd = tl.dot(weights, v_odd, odd * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return even, odd, running_max, running_sum


@triton.jit
def attend_fp8_range(
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
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FULL_BLOCKS: tl.constexpr,
):
    """`triton_tile.attend_range` for an FP8 cache. q: as loaded, in its own dtype."""
    q, scale_log2 = narrow_queries(q, scale_log2)
    even = tl.zeros([BLOCK_M, PADDED_DIM // 2], dtype=tl.float32)
    odd = tl.zeros([BLOCK_M, PADDED_DIM // 2], dtype=tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if FULL_BLOCKS:
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
        begin = tl.maximum(begin, full_end)
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
    return tl.interleave(even, odd), running_max, running_sum


@triton.jit
def power_of_2(exponents):
    """Convert biased float32 exponents to powers of two; 0 gives 0."""
    return (exponents << 23).to(tl.float32, bitcast=True)
