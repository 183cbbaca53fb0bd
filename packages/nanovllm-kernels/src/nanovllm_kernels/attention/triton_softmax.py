"""Provides device functions for an online softmax in base 2 (Milakov and Gimelshein 2018; Dao et al. 2022).

With an FP8 cache, kernels multiply in float16, which represents every e4m3 number. To avoid overflow, kernels divide
queries by a power of two, and limit softmax weights to 2^15. Kernels apply value scales to weights instead of values.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def weigh_scores(scores, running_max, running_sum, ROWS_MAY_BE_MASKED: tl.constexpr):
    """Return (weights of the block's keys, factor for sums of earlier blocks, new maximum, new sum of weights).

    scores: [rows, keys] of one block of keys. running_max, running_sum: maximum score and sum of weights of
        earlier blocks.
    ROWS_MAY_BE_MASKED: whether there may be a row whose keys so far are all masked.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = new_max
    if ROWS_MAY_BE_MASKED:
        # Avoid infinity minus infinity in rows whose keys are all masked.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    return weights, rescale, new_max, running_sum * rescale + tl.sum(weights, 1)


@triton.jit
def scale_scores(scores, key_exponents, value_exponents):
    """Multiply scores by the key scales, and add log2 of the value scales, so that weights include the value scales.

    key_exponents, value_exponents: biased float32 exponents of the scales, which are powers of two.
    """
    return scores * power_of_2_from_biased(key_exponents)[None, :] + (value_exponents - 127).to(tl.float32)[None, :]


@triton.jit
def weigh_scaled_scores(scores, running_max, running_sum, value_exponents):
    """Return what `weigh_scores` returns, for scores from `scale_scores`. The sum of weights excludes the value scales.

    The returned maximum is the largest score minus 15. log2 of the normalizer is this maximum plus log2 of the sum.
    """
    # Let weights reach 2^15. With a lower limit, small weights of a long context would be subnormal in float16.
    new_max = tl.maximum(running_max, tl.max(scores, 1) - 15)
    # Avoid infinity minus infinity in rows that have seen no key yet.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(running_max - shift)
    # Exponent 254 - e gives the inverse of the scale with exponent e.
    block_sum = tl.sum(weights * power_of_2_from_biased(254 - value_exponents)[None, :], 1)
    return weights, rescale, new_max, running_sum * rescale + block_sum


@triton.jit
def power_of_2_from_biased(biased_exponents):
    """Return float32 2 ** (biased_exponents - 127). A biased exponent of 0 gives 0."""
    return (biased_exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def floor_to_power_of_2(numbers):
    """Round positive float32 numbers down to a power of two. Zeros and subnormals give the smallest normal number."""
    return tl.maximum(numbers.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def load_page_numbers(table_ptr, key_positions, end, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Load page numbers (int64) of key positions from a row of the block table. MASKED: 0 for positions >= `end`."""
    if MASKED:
        pages = tl.load(table_ptr + key_positions // PAGE_SIZE, mask=key_positions < end, other=0)
    else:
        pages = tl.load(table_ptr + key_positions // PAGE_SIZE)
    return pages.to(tl.int64)
