"""One warp's tile of the CuTe DSL decode kernel: queries against a step's keys, online softmax, weights against values.

The query heads of a key-value head are rows of the 16 of `mma.m16n8k16`, so that keys and values are read once for the
whole group. Softmax is online (Milakov and Gimelshein 2018), in base 2. This room must not know pages or requests.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Uint8, cute
from cutlass.cute import arch

from nanovllm_kernels.attention import cute_warp

WARP = 32
# Tokens a warp takes at once: as many as the smallest page and one multiplication by the values hold.
STEP = 16
TILE_ROWS = 16
# What a row of shared memory holds of a head under the 128-byte swizzle.
ROW_BYTES = 128


@dataclass(frozen=True)
class Shape:
    """All that a kernel is compiled for.

    dtype, cached: CUTLASS's, of the queries and of the cache: the same, or Uint8 for e4m3. group: query heads to a
    key-value head, at most 16, of an FP8 cache 8. warps of a CTA, each with a ring of `stages` steps in shared memory;
    a CTA fills an SM.
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
        """Whether the cache is of FP8."""
        return self.cached is Uint8

    @property
    def row_dim(self) -> int:
        """Numbers in a row of shared memory."""
        return ROW_BYTES * 8 // self.cached.width

    @property
    def halves(self) -> int:
        """Rows of shared memory that a head of one token takes."""
        return self.head_dim // self.row_dim

    @property
    def value_bytes(self) -> int:
        """Bytes of a step's keys, hence where its values begin: all tokens' first rows, then their next."""
        return STEP * self.halves * ROW_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a step's keys and values, and also of a tile's accumulators in float32 (in FP8 of half a tile's)."""
        return 2 * self.value_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a step's scales: the keys', then the values'."""
        return 2 * STEP if self.quantized else 0

    @property
    def lane_rows(self) -> int:
        """Rows of a tile that a lane works on; where the group is small the second of them is empty."""
        return 1 if self.group <= TILE_ROWS // 2 else 2


@cute.jit
def load_queries(shape: cutlass.Constexpr, queries: cute.Tensor, q: cute.Pointer, offset: Int32, lane: Int32):
    """A group's queries, `offset` numbers into `q`, as A fragments; rows beyond the group are zero."""
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
    """Fold the step at shared address `base`, of which `left` tokens are the request's, into the running softmax."""
    scores = cute.make_rmem_tensor(STEP // 2, Float32)
    # Lane l gives token l % 16's row, and of each two chunks of 8 numbers the one numbered l // 16. Chunk c of row r
    # lies at c ^ (r % 8).
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
    """Zero the values beyond the request's: they may be NaN, which a weight of zero would not cancel."""
    for i in cutlass.range_constexpr(shape.value_bytes // 16 // WARP):
        unit = lane + WARP * i
        if (unit >> 3) & (STEP - 1) >= left:
            cute_warp.clear_shared(values + unit * 16)
    # The slot is filled by the asynchronous proxy next.
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()


def _multiply_keys(shape, queries, scores, places):
    """Scores of the step: two tiles of 8 tokens next to each other."""
    low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
    for k in range(shape.head_dim // 16):
        keys = cute_warp.load_matrices(places[k % 4] + (k // 4) * STEP * ROW_BYTES, transpose=False)
        query = [queries[4 * k + i] for i in range(4)]
        low = cute_warp.multiply_add(shape.dtype, query, (keys[0], keys[2]), low)
        high = cute_warp.multiply_add(shape.dtype, query, (keys[1], keys[3]), high)
    for i in range(4):
        scores[i] = low[i]
        scores[4 + i] = high[i]


def _update_softmax(shape, scores, acc, row_max, row_sum, half: int, scale_log2):
    """Turn the scores of one of a lane's rows into weights, and rescale what was summed before."""
    mine = [i for i in range(STEP // 2) if i % 4 // 2 == half]
    best = scores[mine[0]]
    for i in mine[1:]:
        best = arch.fmax(best, scores[i])
    for i in range(2):
        best = arch.fmax(best, arch.shuffle_sync_bfly(best, 1 << i))
    new_max = arch.fmax(row_max[half], best * scale_log2)
    rescale = cute_warp.exp2(row_max[half] - new_max)
    total = row_sum[half] * rescale
    for i in mine:
        scores[i] = cute_warp.exp2(scores[i] * scale_log2 - new_max)
        total = total + scores[i]
    row_sum[half] = total
    row_max[half] = new_max
    for tile in range(shape.head_dim // 8):
        for i in range(2):
            acc[4 * tile + 2 * half + i] = acc[4 * tile + 2 * half + i] * rescale


def _multiply_values(shape, scores, acc, places):
    """Add the step's values, weighted. The weights lie as A fragments want them already."""
    weights = [Int32(0)] * 4
    for i in range(2):
        for half in range(shape.lane_rows):
            at = 4 * i + 2 * half
            weights[2 * i + half] = cute_warp.pack(shape.dtype, scores[at], scores[at + 1])
    for k in range(shape.head_dim // 16):
        place = places[k % 4] + (shape.value_bytes + (k // 4) * STEP * ROW_BYTES)
        values = cute_warp.load_matrices(place, transpose=True)
        for i in range(2):
            tile = 8 * k + 4 * i
            sums = [acc[tile + j] for j in range(4)]
            sums = cute_warp.multiply_add(shape.dtype, weights, values[2 * i : 2 * i + 2], sums)
            for j in range(4):
                acc[tile + j] = sums[j]
