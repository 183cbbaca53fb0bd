"""Device functions of the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2.

With an FP8 cache, products are in float16, which represents every e4m3 number. To avoid overflow,
queries are divided by a power of two, and weights are at most 2^15. Weights include the scales of the values.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def weigh_scores(scores, running_max, running_sum, ROWS_MAY_BE_MASKED: tl.constexpr):
    """Return (weights of a block of keys, factor for earlier sums, new maximum, new sum of weights).

    ROWS_MAY_BE_MASKED: whether a row may have seen no key yet.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = new_max
    if ROWS_MAY_BE_MASKED:
        # Avoid infinity minus infinity.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return weights, rescale, new_max, running_sum * rescale + tl.sum(weights, 1)


@triton.jit
def scale_scores(scores, key_exponents, value_exponents):
    """Multiply scores by the scales of FP8 keys. Add log2 of the value scales, so that weights include these scales."""
    return scores * power_of_2(key_exponents)[None, :] + (value_exponents - 127).to(tl.float32)[None, :]


@triton.jit
def weigh_scaled_scores(scores, running_max, running_sum, value_exponents):
    """Like `weigh_scores`, for scores from `scale_scores`. The sum of weights excludes the value scales.

    The returned maximum is 15 below the largest score. Maximum plus log2 of the sum is log2 of the normalizer.
    """
    # Weights reach 2^15: otherwise the small weights of a long context would be subnormal in float16.
    new_max = tl.maximum(running_max, tl.max(scores, 1) - 15)
    # Avoid infinity minus infinity in rows that have seen no key yet.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    block_sum = tl.sum(weights * power_of_2(254 - value_exponents)[None, :], 1)
    return weights, rescale, new_max, running_sum * rescale + block_sum


@triton.jit
def power_of_2(exponents):
    """Convert biased float32 exponents to powers of two; 0 gives 0."""
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def floor_to_power_of_2(numbers):
    """Round positive float32 numbers down to a power of two. Zeros and subnormals give the smallest normal number."""
    return tl.maximum(numbers.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def load_pages(table_ptr, key_positions, end, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Return the page number of each key position as int64; with MASKED, 0 for positions from `end` on."""
    if MASKED:
        pages = tl.load(table_ptr + key_positions // PAGE_SIZE, mask=key_positions < end, other=0)
    else:
        pages = tl.load(table_ptr + key_positions // PAGE_SIZE)
    return pages.to(tl.int64)
