"""The tile of `cute_tile` for an FP8 cache: e4m3 keys and values, with a scale per token and head (see `fp8`).

As in `triton_softmax`, operands are float16, queries are divided by a power of two, and log2 of each value scale is
added to the score in base 2. A group has at most 8 query heads, half a tile, so that a step's slot can hold the sums.
Fragments permute every 16 dimensions: lane l holds 4 (l % 4) to 4 (l % 4) + 3 of queries, keys and output sums.
"""

import cutlass
from cutlass import Float16, Float32, Int32, cute
from cutlass.cute import arch

from nanovllm_kernels.attention.gqa import cute_ptx
from nanovllm_kernels.attention.gqa.cute_tile import ROW_BYTES, STEP, clear_values

# (index in the fragment, token offset) of each score of lane l, whose token is 2 (l % 4) + offset.
OWN_SCORES = ((0, 0), (1, 1), (4, 8), (5, 9))
# Weights reach 2^15, so that the small weights of a long context are not subnormal in float16.
HEADROOM = 15.0
# Float32: mask of the exponent's bits, and twice the exponent's bias.
EXPONENT = 0x7F800000
TWICE_BIAS = 254


@cute.jit
def load_queries(shape: cutlass.Constexpr, queries: cute.Tensor, q: cute.Pointer, offset: Int32, lane: Int32):
    """Load a group's queries, at element `offset` of `q`, as A fragments, divided by a power of two; returns that."""
    words = cute.make_tensor(cute.recast_ptr(q, dtype=Int32), cute.make_layout(1 << 30))
    queries.fill(0)
    row = lane >> 2
    if row < shape.group:
        base = ((offset + row * shape.head_dim) >> 1) + (lane & 3) * 2
        for k in cutlass.range_constexpr(shape.head_dim // 16):
            queries[4 * k] = words[base + 8 * k]
            queries[4 * k + 2] = words[base + 8 * k + 1]
    top = Float32(0.0)
    for k in cutlass.range_constexpr(shape.head_dim // 8):
        low, high = cute_ptx.widen(shape.dtype, queries[2 * k])
        top = arch.fmax(top, arch.fmax(arch.fmax(low, -low), arch.fmax(high, -high)))
    for i in cutlass.range_constexpr(2):
        top = arch.fmax(top, arch.shuffle_sync_bfly(top, 1 << i))
    # Keep the exponent only; the minimum is a normal number's.
    exponent = cutlass.max((cute_ptx.bits(top) & EXPONENT) >> 23, Int32(1))
    inverse = cute_ptx.power_of_2(TWICE_BIAS - exponent)
    for k in cutlass.range_constexpr(shape.head_dim // 8):
        low, high = cute_ptx.widen(shape.dtype, queries[2 * k])
        queries[2 * k] = cute_ptx.pack(Float16, low * inverse, high * inverse)
    return cute_ptx.power_of_2(exponent)


@cute.jit
def attend(
    shape: cutlass.Constexpr,
    queries: cute.Tensor,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    base: Int32,
    scales: Int32,
    left: Int32,
    lane: Int32,
    scale_log2: Float32,
):
    """Accumulate the step at shared address `base`, with scales at `scales`, like `cute_tile.attend`.

    row_max: reference point of the weights, HEADROOM below the maximum.
    row_sum: sum of the weights without value scales.
    """
    scores = cute.make_rmem_tensor(STEP // 2, Float32)
    exponents = cute.make_rmem_tensor(len(OWN_SCORES), Int32)
    row = lane & 15
    chunk = row * ROW_BYTES + (((lane >> 4) ^ (row & 7)) << 4)
    places = [base + (chunk ^ (32 * i)) for i in range(4)]
    if left < STEP:
        clear_values(shape, base + shape.value_bytes, left, lane)
    _multiply_keys(shape, queries, scores, places)
    _apply_scales(scores, exponents, scales + (lane & 3) * 2, scale_log2)
    if left < STEP:
        for n in cutlass.range_constexpr(len(OWN_SCORES)):
            if OWN_SCORES[n][1] + (lane & 3) * 2 >= left:
                scores[OWN_SCORES[n][0]] = -Float32.inf
                exponents[n] = Int32(0)
    _update_softmax(shape, scores, exponents, acc, row_max, row_sum)
    _multiply_values(shape, scores, acc, places)


def _multiply_keys(shape, queries, scores, places):
    """Compute the step's scores as two adjacent tiles of 8 tokens. One MMA multiplies 16 dimensions, 16 bytes."""
    low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
    for pair in range(shape.head_dim // 32):
        keys = cute_ptx.load_matrices(places[pair % 4] + (pair // 4) * STEP * ROW_BYTES, transpose=False)
        for i in range(2):
            at = 4 * (2 * pair + i)
            query = [queries[at + j] for j in range(4)]
            low = cute_ptx.multiply_add(Float16, query, cute_ptx.narrow_floats(keys[2 * i]), low)
            high = cute_ptx.multiply_add(Float16, query, cute_ptx.narrow_floats(keys[2 * i + 1]), high)
    for i in range(4):
        scores[i] = low[i]
        scores[4 + i] = high[i]


def _apply_scales(scores, exponents, scales, scale_log2):
    """Multiply scores by key scales and add log2 of value scales. exponents: receives those of 1 / value scale."""
    for half in range(2):
        keys = cute_ptx.load_bytes(scales + 8 * half)
        values = cute_ptx.load_bytes(scales + STEP + 8 * half)
        for i in range(2):
            key, value = (keys >> (8 * i)) & 0xFF, (values >> (8 * i)) & 0xFF
            at = OWN_SCORES[2 * half + i][0]
            scores[at] = scores[at] * (scale_log2 * cute_ptx.power_of_2(key)) + Float32(value - TWICE_BIAS // 2)
            exponents[2 * half + i] = TWICE_BIAS - value


def _update_softmax(shape, scores, exponents, acc, row_max, row_sum):
    """Turn a lane's scores into weights, and rescale the previous sums."""
    best = scores[OWN_SCORES[0][0]]
    for at, _ in OWN_SCORES[1:]:
        best = arch.fmax(best, scores[at])
    for i in range(2):
        best = arch.fmax(best, arch.shuffle_sync_bfly(best, 1 << i))
    new_max = arch.fmax(row_max[0], best - HEADROOM)
    rescale = cute_ptx.exp2(row_max[0] - new_max)
    total = row_sum[0] * rescale
    for n in range(len(OWN_SCORES)):
        at = OWN_SCORES[n][0]
        scores[at] = cute_ptx.exp2(scores[at] - new_max)
        total = total + scores[at] * cute_ptx.power_of_2(exponents[n])
    row_sum[0] = total
    row_max[0] = new_max
    for tile in range(shape.head_dim // 8):
        for i in range(2):
            acc[4 * tile + i] = acc[4 * tile + i] * rescale


def _multiply_values(shape, scores, acc, places):
    """Add the step's weighted values: of each 16 dimensions the even ones go to one tile, the odd ones to the next.

    ldmatrix transposes 16-bit units of two dimensions, which are separated here into one register per dimension.
    """
    weights = [cute_ptx.pack(Float16, scores[0], scores[1]), Int32(0)]
    weights += [cute_ptx.pack(Float16, scores[4], scores[5]), Int32(0)]
    for pair in range(shape.head_dim // 32):
        place = places[pair % 4] + (shape.value_bytes + (pair // 4) * STEP * ROW_BYTES)
        values = cute_ptx.load_matrices(place, transpose=True)
        for i in range(2):
            first = cute_ptx.narrow_floats(cute_ptx.swap_middle(values[2 * i]))
            second = cute_ptx.narrow_floats(cute_ptx.swap_middle(values[2 * i + 1]))
            for parity in range(2):
                tile = 4 * (2 * (2 * pair + i) + parity)
                sums = [acc[tile + j] for j in range(4)]
                sums = cute_ptx.multiply_add(Float16, weights, (first[parity], second[parity]), sums)
                for j in range(4):
                    acc[tile + j] = sums[j]
