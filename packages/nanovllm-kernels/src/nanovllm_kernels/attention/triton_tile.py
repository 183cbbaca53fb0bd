"""What the attention kernels share: a tile of queries against blocks of paged keys and values.

Softmax is computed online (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def narrow_queries(q, scale_log2):
    """(`q` in float16 over a power of two, `scale_log2` times it), for a cache of e4m3.

    Such numbers become float16 in one instruction a pair, and exactly; no other 16-bit type is as cheap. Of bfloat16
    the power of two keeps what is large within range. float32 stays as it is.
    """
    if q.dtype == tl.float32:
        return q, scale_log2
    wide = q.to(tl.float32)
    top = tl.max(tl.max(tl.abs(wide), 1), 0)
    # The exponent alone, of a normal number.
    power = tl.maximum(top.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)
    return (wide / power).to(tl.float16), scale_log2 * power


@triton.jit
def power_of_2(exponents):
    """Biased exponents of float32, 0 for none, as the numbers: 2^-127 is taken for 0."""
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def attend_blocks(
    acc,
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
    QUANTIZED: tl.constexpr,
):
    """Fold keys and values of [begin, end), BLOCK_N at a time, into the online softmax; reads none beyond `limit`.

    k_ptr: the key head of the cache's first slot. scales_ptr: where QUANTIZED, its scale. Then the running maximum is
    of scores with the values' scales on top, so that weights times values fit a narrow type whatever the scales are;
    the running sum is that of the plain softmax.
    """
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        if MASKED:
            pages = tl.load(table_ptr + columns // PAGE_SIZE, mask=columns < limit, other=0).to(tl.int64)
        else:
            pages = tl.load(table_ptr + columns // PAGE_SIZE).to(tl.int64)
        offsets = columns % PAGE_SIZE
        slots = (pages * PAGE_SIZE + offsets) * (2 * NUM_KV_HEADS * HEAD_DIM)
        k_ptrs = k_ptr + slots[None, :] + dims[:, None]
        v_ptrs = k_ptr + NUM_KV_HEADS * HEAD_DIM + slots[:, None] + dims[None, :]
        if MASKED:
            inside = columns < limit
            k = tl.load(k_ptrs, mask=inside[None, :] & dim_mask[:, None], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=dim_mask[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
        if QUANTIZED:
            k_scale_ptrs = scales_ptr + pages * (2 * NUM_KV_HEADS * PAGE_SIZE) + offsets
            v_scale_ptrs = k_scale_ptrs + NUM_KV_HEADS * PAGE_SIZE
            if MASKED:
                k_exponents = tl.load(k_scale_ptrs, mask=inside, other=0).to(tl.int32)
                v_exponents = tl.load(v_scale_ptrs, mask=inside, other=0).to(tl.int32)
            else:
                k_exponents = tl.load(k_scale_ptrs).to(tl.int32)
                v_exponents = tl.load(v_scale_ptrs).to(tl.int32)
            scores = scores * power_of_2(k_exponents)[None, :] + (v_exponents - 127).to(tl.float32)[None, :]
        if MASKED:
            # No query sees a token past its own, hence none from `limit` on.
            scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
            v = tl.load(v_ptrs, mask=inside[:, None] & dim_mask[None, :], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=dim_mask[None, :], other=0.0)
        new_max = tl.max(scores, 1)
        if QUANTIZED:
            # Weights of up to 2^15: float16 then keeps small ones whole that would else be subnormal.
            new_max -= 15
        new_max = tl.maximum(running_max, new_max)
        # A row that has seen no key yet would subtract infinity from infinity.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(running_max - shift)
        if QUANTIZED:
            running_sum = running_sum * rescale + tl.sum(weights * power_of_2(254 - v_exponents)[None, :], 1)
        else:
            running_sum = running_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return acc, running_max, running_sum
