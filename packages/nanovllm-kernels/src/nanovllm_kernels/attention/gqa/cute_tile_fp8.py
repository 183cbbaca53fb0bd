"""Computes attention over one slice (SLICE_TOKENS cached tokens) like `cute_tile`, but for an FP8 cache.

The cache has e4m3 elements, with one scale per token and head (see `fp8`). Products are in float16, which represents
every e4m3 number. Queries are divided by a power of two, so that products do not overflow. Value scales are applied to
weights instead of values: log2 of the scale is added to the base-2 score. A tile has at most 8 rows: warps exchange
float32 sums in the memory of one slice, which holds the sums of only 8 rows. Within each block of 16 dimensions, the
order of dimensions differs from `cute_tile`: lane l holds dimensions 4 (l % 4) to 4 (l % 4) + 3 of queries, keys and
sums.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float16, Float32, Int32, cute
from cutlass.cute import arch

from nanovllm_kernels.attention.gqa import cute_ptx
from nanovllm_kernels.attention.gqa.cute_tile import (
    ROW_BYTES,
    SLICE_TOKENS,
    clear_values,
    count_visible_tokens,
    lane_addresses,
    locate_row,
)


class LaneScoreLocation(NamedTuple):
    """Locates one score of lane l: `index` in the lane's `scores`, for token 2 (l % 4) + `token_offset`."""

    index: int
    token_offset: int


LANE_SCORES = (LaneScoreLocation(0, 0), LaneScoreLocation(1, 1), LaneScoreLocation(4, 8), LaneScoreLocation(5, 9))
# Let weights reach 2^15. With a lower limit, small weights of a long context would be subnormal in float16.
MAX_WEIGHT_LOG2 = 15.0
# Mask of a float32's exponent bits, and twice a float32's exponent bias.
EXPONENT_MASK = 0x7F800000
TWICE_EXPONENT_BIAS = 254


@cute.jit
def load_queries(shape: cutlass.Constexpr, queries: cute.Tensor, tile: cutlass.Constexpr, lane: Int32):
    """Load `queries` like `cute_tile.load_queries`, and divide them by a power of two. Return this power of two."""
    words = cute.make_tensor(cute.recast_ptr(tile.q, dtype=Int32), cute.make_layout(1 << 30))
    queries.fill(0)
    row = lane >> 2
    if row < tile.num_queries * shape.group_size:
        first_word = (locate_row(shape, tile, row) >> 1) + (lane & 3) * 2
        for k in cutlass.range_constexpr(shape.head_dim // 16):
            queries[4 * k] = words[first_word + 8 * k]
            queries[4 * k + 2] = words[first_word + 8 * k + 1]
    max_element = Float32(0.0)
    for k in cutlass.range_constexpr(shape.head_dim // 8):
        low, high = cute_ptx.unpack_pair(shape.dtype, queries[2 * k])
        max_element = arch.fmax(max_element, arch.fmax(arch.fmax(low, -low), arch.fmax(high, -high)))
    for i in cutlass.range_constexpr(2):
        max_element = arch.fmax(max_element, arch.shuffle_sync_bfly(max_element, 1 << i))
    # Round down to a power of two. If the maximum is zero or subnormal, use the smallest normal number.
    biased_exponent = cutlass.max((cute_ptx.float_bits(max_element) & EXPONENT_MASK) >> 23, Int32(1))
    inverse = cute_ptx.power_of_2_from_biased(TWICE_EXPONENT_BIAS - biased_exponent)
    for k in cutlass.range_constexpr(shape.head_dim // 8):
        low, high = cute_ptx.unpack_pair(shape.dtype, queries[2 * k])
        queries[2 * k] = cute_ptx.round_pair(Float16, low * inverse, high * inverse)
    return cute_ptx.power_of_2_from_biased(biased_exponent)


@cute.jit
def attend(
    shape: cutlass.Constexpr,
    queries: cute.Tensor,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    slice_address: Int32,
    scales_address: Int32,
    num_valid: Int32,
    num_queries: Int32,
    lane: Int32,
    scale_log2: Float32,
):
    """Add a slice to the running softmax, like `cute_tile.attend`.

    scales_address: address of the slice's key scales in shared memory. Value scales follow the key scales.
    row_max: maximum score minus MAX_WEIGHT_LOG2.
    scale_log2: factor of scores: softmax scale * log2(e), times the power of two that divided the queries.
    row_sum: sum of the weights, each divided by its value scale.
    """
    scores = cute.make_rmem_tensor(SLICE_TOKENS // 2, Float32)
    inverse_value_exponents = cute.make_rmem_tensor(len(LANE_SCORES), Int32)
    addresses = lane_addresses(slice_address, lane)
    if num_valid < SLICE_TOKENS:
        clear_values(shape, slice_address + shape.keys_bytes, num_valid, lane)
    _multiply_keys(shape, queries, scores, addresses)
    _apply_scales(scores, inverse_value_exponents, scales_address + (lane & 3) * 2, scale_log2)
    if num_valid < SLICE_TOKENS + (shape.tile_queries - 1):
        num_visible = count_visible_tokens(shape, lane >> 2, num_valid, num_queries)
        for n in cutlass.range_constexpr(len(LANE_SCORES)):
            if LANE_SCORES[n].token_offset + (lane & 3) * 2 >= num_visible:
                scores[LANE_SCORES[n].index] = -Float32.inf
                inverse_value_exponents[n] = Int32(0)
    _update_softmax(shape, scores, inverse_value_exponents, acc, row_max, row_sum)
    _multiply_values(shape, scores, acc, addresses)


def _multiply_keys(shape, queries, scores, addresses):
    """Compute the slice's scores as two adjacent `mma` tiles of 8 tokens. A `dim_block` has 32 dimensions."""
    low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
    for dim_block in range(shape.head_dim // 32):
        keys = cute_ptx.load_matrices(
            addresses[dim_block % 4] + (dim_block // 4) * SLICE_TOKENS * ROW_BYTES, transpose=False
        )
        for i in range(2):
            first_register = 4 * (2 * dim_block + i)
            query = [queries[first_register + j] for j in range(4)]
            low = cute_ptx.multiply_add(Float16, query, cute_ptx.e4m3_to_float16(keys[2 * i]), low)
            high = cute_ptx.multiply_add(Float16, query, cute_ptx.e4m3_to_float16(keys[2 * i + 1]), high)
    for i in range(4):
        scores[i] = low[i]
        scores[4 + i] = high[i]


def _apply_scales(scores, inverse_value_exponents, scales_address, scale_log2):
    """Multiply scores by key scales, and add log2 of value scales. Store biased exponents of 1 / (value scale).

    scales_address: address of the key scales of the lane's first two tokens.
    inverse_value_exponents: receives one exponent for each entry of LANE_SCORES.
    """
    for half in range(2):
        key_exponents = cute_ptx.load_shared_two_bytes(scales_address + 8 * half)
        value_exponents = cute_ptx.load_shared_two_bytes(scales_address + SLICE_TOKENS + 8 * half)
        for i in range(2):
            key_exponent, value_exponent = (key_exponents >> (8 * i)) & 0xFF, (value_exponents >> (8 * i)) & 0xFF
            index = LANE_SCORES[2 * half + i].index
            scores[index] = scores[index] * (scale_log2 * cute_ptx.power_of_2_from_biased(key_exponent)) + Float32(
                value_exponent - TWICE_EXPONENT_BIAS // 2
            )
            inverse_value_exponents[2 * half + i] = TWICE_EXPONENT_BIAS - value_exponent


def _update_softmax(shape, scores, inverse_value_exponents, acc, row_max, row_sum):
    """Turn a lane's scores into weights, and rescale the previous sums."""
    slice_max = scores[LANE_SCORES[0].index]
    for score in LANE_SCORES[1:]:
        slice_max = arch.fmax(slice_max, scores[score.index])
    for i in range(2):
        slice_max = arch.fmax(slice_max, arch.shuffle_sync_bfly(slice_max, 1 << i))
    new_max = arch.fmax(row_max[0], slice_max - MAX_WEIGHT_LOG2)
    rescale = cute_ptx.exp2(row_max[0] - new_max)
    new_sum = row_sum[0] * rescale
    for n in range(len(LANE_SCORES)):
        index = LANE_SCORES[n].index
        scores[index] = cute_ptx.exp2(scores[index] - new_max)
        new_sum = new_sum + scores[index] * cute_ptx.power_of_2_from_biased(inverse_value_exponents[n])
    row_sum[0] = new_sum
    row_max[0] = new_max
    for mma_tile in range(shape.head_dim // 8):
        for i in range(2):
            acc[4 * mma_tile + i] = acc[4 * mma_tile + i] * rescale


def _multiply_values(shape, scores, acc, addresses):
    """Add the slice's weighted values.

    `ldmatrix` transposes units of 16 bits. A unit holds two adjacent dimensions of one token, so a loaded word holds
    two dimensions of two tokens. Swapping the middle bytes of the word separates even from odd dimensions. Each block
    of 16 dimensions therefore has two accumulators: one for its 8 even dimensions, the next for its 8 odd ones.
    """
    weights = [cute_ptx.round_pair(Float16, scores[0], scores[1]), Int32(0)]
    weights += [cute_ptx.round_pair(Float16, scores[4], scores[5]), Int32(0)]
    for dim_block in range(shape.head_dim // 32):
        address = addresses[dim_block % 4] + (shape.keys_bytes + (dim_block // 4) * SLICE_TOKENS * ROW_BYTES)
        values = cute_ptx.load_matrices(address, transpose=True)
        for i in range(2):
            low_tokens = cute_ptx.e4m3_to_float16(cute_ptx.swap_middle_bytes(values[2 * i]))
            high_tokens = cute_ptx.e4m3_to_float16(cute_ptx.swap_middle_bytes(values[2 * i + 1]))
            for parity in range(2):
                first_sum = 4 * (2 * (2 * dim_block + i) + parity)
                sums = [acc[first_sum + j] for j in range(4)]
                sums = cute_ptx.multiply_add(Float16, weights, (low_tokens[parity], high_tokens[parity]), sums)
                for j in range(4):
                    acc[first_sum + j] = sums[j]
