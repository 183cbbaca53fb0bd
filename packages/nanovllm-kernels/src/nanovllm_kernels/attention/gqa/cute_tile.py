"""One warp's tile of the CuTe DSL decode kernel: scores, online softmax and weighted values of one step.

The query heads of a key-value head are rows of `mma.m16n8k16`, so that keys and values are read once per group. The
softmax is online (Milakov and Gimelshein 2018), in base 2.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Uint8, cute
from cutlass.cute import arch

from nanovllm_kernels.attention.gqa import cute_ptx

WARP = 32
# Tokens of a step: the smallest page, and the depth of one multiplication with the values.
STEP = 16
TILE_ROWS = 16
# Bytes of a row of shared memory under the 128-byte swizzle.
ROW_BYTES = 128


@dataclass(frozen=True)
class Shape:
    """Compile-time parameters of a kernel.

    dtype, cached: CUTLASS types of the queries and of the cache: the same, or Uint8 for e4m3.
    group: query heads per key-value head, at most 16, or 8 with an FP8 cache.
    warps: warps of a CTA, which fills an SM. stages: steps in each warp's ring in shared memory.
    """

    dtype: type
    cached: type
    head_dim: int
    group: int
    page_size: int
    warps: int
    stages: int

    @property
    def quantized(self) -> bool:
        """Whether the cache is FP8."""
        return self.cached is Uint8

    @property
    def row_dim(self) -> int:
        """Elements in a row of shared memory."""
        return ROW_BYTES * 8 // self.cached.width

    @property
    def halves(self) -> int:
        """Rows of shared memory per token and head."""
        return self.head_dim // self.row_dim

    @property
    def value_bytes(self) -> int:
        """Bytes of a step's keys, and the offset of its values. All tokens' first rows come first, then the second."""
        return STEP * self.halves * ROW_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a step's keys and values; also of a tile's float32 accumulators (FP8: of half a tile's)."""
        return 2 * self.value_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a step's scales: the keys', then the values'."""
        return 2 * STEP if self.quantized else 0

    @property
    def lane_rows(self) -> int:
        """Rows of a tile per lane; with a small group the second row is empty."""
        return 1 if self.group <= TILE_ROWS // 2 else 2


@cute.jit
def load_queries(shape: cutlass.Constexpr, queries: cute.Tensor, q: cute.Pointer, offset: Int32, lane: Int32):
    """Load a group's queries, at element `offset` of `q`, as A fragments; rows beyond the group are zero."""
    words = cute.make_tensor(cute.recast_ptr(q, dtype=Int32), cute.make_layout(1 << 30))
    queries.fill(0)
    for half in cutlass.range_constexpr(shape.lane_rows):
        row = (lane >> 2) + 8 * half
        if row < shape.group:
            base = ((offset + row * shape.head_dim) >> 1) + (lane & 3)
            for k in cutlass.range_constexpr(shape.head_dim // 16):
                queries[4 * k + half] = words[base + 8 * k]
                queries[4 * k + half + 2] = words[base + 8 * k + 4]


@cute.jit
def attend(
    shape: cutlass.Constexpr,
    queries: cute.Tensor,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    base: Int32,
    left: Int32,
    lane: Int32,
    scale_log2: Float32,
):
    """Accumulate the step at shared address `base` into the running softmax; its first `left` tokens are valid."""
    scores = cute.make_rmem_tensor(STEP // 2, Float32)
    # Lane l addresses token l % 16, and chunk l // 16 of each pair of chunks of 8 elements. The swizzle puts chunk c of
    # row r at c ^ (r % 8).
    row = lane & 15
    chunk = row * ROW_BYTES + (((lane >> 4) ^ (row & 7)) << 4)
    places = [base + (chunk ^ (32 * i)) for i in range(4)]
    if left < STEP:
        clear_values(shape, base + shape.value_bytes, left, lane)
    _multiply_keys(shape, queries, scores, places)
    if left < STEP:
        for i in cutlass.range_constexpr(STEP // 2):
            if (i // 4) * 8 + (lane & 3) * 2 + i % 2 >= left:
                scores[i] = -Float32.inf
    for half in cutlass.range_constexpr(shape.lane_rows):
        _update_softmax(shape, scores, acc, row_max, row_sum, half, scale_log2)
    _multiply_values(shape, scores, acc, places)


@cute.jit
def clear_values(shape: cutlass.Constexpr, values: Int32, left: Int32, lane: Int32):
    """Zero the values past the request's end: they may be NaN, which a weight of zero would not cancel."""
    for i in cutlass.range_constexpr(shape.value_bytes // 16 // WARP):
        unit = lane + WARP * i
        if (unit >> 3) & (STEP - 1) >= left:
            cute_ptx.clear_shared(values + unit * 16)
    # The asynchronous proxy fills the slot next.
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()


def _multiply_keys(shape, queries, scores, places):
    """Compute the step's scores as two adjacent tiles of 8 tokens."""
    low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
    for k in range(shape.head_dim // 16):
        keys = cute_ptx.load_matrices(places[k % 4] + (k // 4) * STEP * ROW_BYTES, transpose=False)
        query = [queries[4 * k + i] for i in range(4)]
        low = cute_ptx.multiply_add(shape.dtype, query, (keys[0], keys[2]), low)
        high = cute_ptx.multiply_add(shape.dtype, query, (keys[1], keys[3]), high)
    for i in range(4):
        scores[i] = low[i]
        scores[4 + i] = high[i]


def _update_softmax(shape, scores, acc, row_max, row_sum, half: int, scale_log2):
    """Turn the scores of one of a lane's rows into weights, and rescale the previous sums."""
    own_scores = [i for i in range(STEP // 2) if i % 4 // 2 == half]
    best = scores[own_scores[0]]
    for i in own_scores[1:]:
        best = arch.fmax(best, scores[i])
    for i in range(2):
        best = arch.fmax(best, arch.shuffle_sync_bfly(best, 1 << i))
    new_max = arch.fmax(row_max[half], best * scale_log2)
    rescale = cute_ptx.exp2(row_max[half] - new_max)
    total = row_sum[half] * rescale
    for i in own_scores:
        scores[i] = cute_ptx.exp2(scores[i] * scale_log2 - new_max)
        total = total + scores[i]
    row_sum[half] = total
    row_max[half] = new_max
    for tile in range(shape.head_dim // 8):
        for i in range(2):
            acc[4 * tile + 2 * half + i] = acc[4 * tile + 2 * half + i] * rescale


def _multiply_values(shape, scores, acc, places):
    """Add the step's weighted values. The scores' registers already have the layout of A fragments."""
    weights = [Int32(0)] * 4
    for i in range(2):
        for half in range(shape.lane_rows):
            at = 4 * i + 2 * half
            weights[2 * i + half] = cute_ptx.pack(shape.dtype, scores[at], scores[at + 1])
    for k in range(shape.head_dim // 16):
        place = places[k % 4] + (shape.value_bytes + (k // 4) * STEP * ROW_BYTES)
        values = cute_ptx.load_matrices(place, transpose=True)
        for i in range(2):
            tile = 8 * k + 4 * i
            sums = [acc[tile + j] for j in range(4)]
            sums = cute_ptx.multiply_add(shape.dtype, weights, values[2 * i : 2 * i + 2], sums)
            for j in range(4):
                acc[tile + j] = sums[j]
