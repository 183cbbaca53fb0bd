"""The tile of `triton_tile` over an FP8 cache: e4m3 keys and values, each head of each token with a scale (see `fp8`).

Products are of float16, which e4m3 becomes exactly, a pair in one instruction; no other 16-bit type is as cheap. What
keeps float16's short range from mattering: queries are divided by a power of two, and the values' scales are added to
the scores, in base 2, so that the weights of the running softmax are of values without their scales, and none is above
2^15. With queries of float32 everything is float32.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl


@triton.jit
def narrow_queries(q, scale_log2):
    """(`q` in float16 over a power of two, `scale_log2` times it); in float32 both as they are."""
    # With one return: a second one would be compiled too, whichever is taken.
    if q.dtype != tl.float32:
        wide = q.to(tl.float32)
        top = tl.max(tl.max(tl.abs(wide), 1), 0)
        # Its exponent alone, of a normal number.
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
    """`attend_blocks`, with the accumulator's even and odd dimensions apart.

    q, scale_log2: of `narrow_queries`. scales_ptr: the key head's scale of the cache's first slot. `running_max` is
    only what the weights are counted from; it and `running_sum` give the plain softmax's normalizer as they do there.
    """
    # Two values are one number of 16 bits: of those the hardware transposes a tile on its way from shared memory.
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
            # No query sees a token past its own, hence none from `limit` on.
            scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
        # Weights of up to 2^15: the small ones of a long context would else be subnormal in float16.
        new_max = tl.maximum(running_max, tl.max(scores, 1) - 15)
        # A row that has seen no key yet would subtract infinity from infinity.
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
    """`triton_tile.attend_range` over an FP8 cache. q: as loaded."""
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
    """Biased exponents of float32 as numbers; 0 gives 0."""
    return (exponents << 23).to(tl.float32, bitcast=True)
