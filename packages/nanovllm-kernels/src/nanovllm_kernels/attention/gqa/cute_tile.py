"""Computes the attention to 16 cached tokens (a slice) in a warp of the CuTe DSL decode kernel.

A tile holds consecutive queries of one request, for the query heads of one key-value head. Row r is head r % group_size
of query r // group_size. Products use `mma.m16n8k16`. The softmax is online (Milakov and Gimelshein 2018), in base 2.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Uint8, cute
from cutlass.cute import arch

from nanovllm_kernels.attention.gqa import cute_ptx

WARP_SIZE = 32
# Cached tokens per slice. The smallest page has 16 tokens, and one `mma` multiplies the values of 16 tokens.
SLICE_TOKENS = 16
TILE_ROWS = 16
# Initial maximum score of a row. It is finite, because infinity minus infinity would be NaN.
NO_SCORE = -1e30
# Bytes of a row of shared memory under the 128-byte swizzle.
ROW_BYTES = 128


@dataclass(frozen=True)
class DecodeShape:
    """Compile-time parameters of a kernel. One CTA runs per SM.

    dtype: CUTLASS type of the queries.
    cache_dtype: CUTLASS type of the cache: `dtype`, or Uint8 for e4m3.
    group_size: query heads per key-value head.
    has_tile_list: whether the caller lists the tiles. If False, each request has one query, and tile b is the query of
        request b, in row b of the queries.
    tile_queries: maximum number of queries per tile. A tile has at most 16 rows, or 8 with an FP8 cache.
    num_stages: number of slots in each warp's ring buffer in shared memory. A slot holds one slice.
    """

    dtype: type
    cache_dtype: type
    head_dim: int
    group_size: int
    has_tile_list: bool
    tile_queries: int
    page_size: int
    num_warps: int
    num_stages: int

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is FP8."""
        return self.cache_dtype is Uint8

    @property
    def row_elements(self) -> int:
        """Elements in a row of shared memory."""
        return ROW_BYTES * 8 // self.cache_dtype.width

    @property
    def rows_per_token(self) -> int:
        """Rows of shared memory per token and head."""
        return self.head_dim // self.row_elements

    @property
    def keys_bytes(self) -> int:
        """Bytes of a slice's keys. In a slot, the keys precede the values.

        A token has `rows_per_token` rows. The first rows of all tokens precede the second rows of all tokens.
        """
        return SLICE_TOKENS * self.rows_per_token * ROW_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot.

        A slot holds a slice's keys and values. At the end of a tile, the warp reuses a slot for the float32 sums of 16
        rows (8 rows with an FP8 cache).
        """
        return 2 * self.keys_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a slice's key scales and value scales."""
        return 2 * SLICE_TOKENS if self.is_fp8 else 0

    @property
    def num_rows(self) -> int:
        """Maximum number of rows that a tile uses."""
        return self.group_size * self.tile_queries

    @property
    def rows_per_lane(self) -> int:
        """Rows of a tile that a lane holds: one if at most 8 rows are used, otherwise two."""
        return 1 if self.num_rows <= TILE_ROWS // 2 else 2


@dataclass(frozen=True)
class QueryTile:
    """The queries of one tile, for one key-value head.

    q: pointer to the first element of all queries.
    offset: index of the first element of the tile's first query and head.
    token_stride: elements from one query to the next.
    """

    q: cute.Pointer
    offset: Int32
    token_stride: Int32
    num_queries: Int32


@cute.jit
def load_queries(shape: cutlass.Constexpr, queries: cute.Tensor, tile: cutlass.Constexpr, lane: Int32):
    """Load the queries of `tile` into `queries` (registers), as operand A of `mma`. Unused rows are zero."""
    words = cute.make_tensor(cute.recast_ptr(tile.q, dtype=Int32), cute.make_layout(1 << 30))
    queries.fill(0)
    for lane_row in cutlass.range_constexpr(shape.rows_per_lane):
        row = (lane >> 2) + 8 * lane_row
        if row < tile.num_queries * shape.group_size:
            first_word = (locate_row(shape, tile, row) >> 1) + (lane & 3)
            for k in cutlass.range_constexpr(shape.head_dim // 16):
                queries[4 * k + lane_row] = words[first_word + 8 * k]
                queries[4 * k + lane_row + 2] = words[first_word + 8 * k + 4]


def locate_row(shape, tile, row):
    """Return the index of the first element of a row in `tile.q`."""
    query, head = row // shape.group_size, row % shape.group_size
    return tile.offset + query * tile.token_stride + head * shape.head_dim


def count_visible_tokens(shape, row, num_valid, num_queries):
    """Return how many tokens a row sees, counted from the slice's first token. The last query sees `num_valid`."""
    return num_valid - (num_queries - 1 - row // shape.group_size)


@cute.jit
def attend(
    shape: cutlass.Constexpr,
    queries: cute.Tensor,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    slice_address: Int32,
    num_valid: Int32,
    num_queries: Int32,
    lane: Int32,
    scale_log2: Float32,
):
    """Add the slice at address `slice_address` of shared memory to the running softmax.

    acc: sums of weighted values. row_max, row_sum: maximum score and sum of weights of each of the lane's rows.
    num_valid: number of tokens, counted from the slice's first token, that the tile's last query sees.
    """
    scores = cute.make_rmem_tensor(SLICE_TOKENS // 2, Float32)
    addresses = lane_addresses(slice_address, lane)
    if num_valid < SLICE_TOKENS:
        clear_values(shape, slice_address + shape.keys_bytes, num_valid, lane)
    _multiply_keys(shape, queries, scores, addresses)
    if num_valid < SLICE_TOKENS + (shape.tile_queries - 1):
        for i in cutlass.range_constexpr(SLICE_TOKENS // 2):
            row = (lane >> 2) + 8 * (i % 4 // 2)
            num_visible = count_visible_tokens(shape, row, num_valid, num_queries)
            if (i // 4) * 8 + (lane & 3) * 2 + i % 2 >= num_visible:
                scores[i] = -Float32.inf
    for lane_row in cutlass.range_constexpr(shape.rows_per_lane):
        _update_softmax(shape, scores, acc, row_max, row_sum, lane_row, scale_log2)
    _multiply_values(shape, scores, acc, addresses)


def lane_addresses(slice_address, lane):
    """Return the four addresses from which a lane loads matrices, one per pair of 16-byte chunks in a row.

    Lane l addresses token l % 16, and chunk l // 16 of each pair. The swizzle moves chunk c of token t to c ^ (t % 8).
    """
    token = lane & 15
    offset = token * ROW_BYTES + (((lane >> 4) ^ (token & 7)) << 4)
    return [slice_address + (offset ^ (32 * i)) for i in range(4)]


@cute.jit
def clear_values(shape: cutlass.Constexpr, values_address: Int32, num_valid: Int32, lane: Int32):
    """Zero the values of the slice's tokens after the first `num_valid`: a weight of zero would not cancel a NaN."""
    for i in cutlass.range_constexpr(shape.keys_bytes // 16 // WARP_SIZE):
        chunk = lane + WARP_SIZE * i
        if (chunk >> 3) & (SLICE_TOKENS - 1) >= num_valid:
            cute_ptx.clear_shared_16_bytes(values_address + chunk * 16)
    # The bulk copy engine (asynchronous proxy) must not write to the slot before these writes.
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_warp()


def _multiply_keys(shape, queries, scores, addresses):
    """Compute the slice's scores as two adjacent `mma` tiles of 8 tokens."""
    low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
    for k in range(shape.head_dim // 16):
        keys = cute_ptx.load_matrices(addresses[k % 4] + (k // 4) * SLICE_TOKENS * ROW_BYTES, transpose=False)
        query = [queries[4 * k + i] for i in range(4)]
        low = cute_ptx.multiply_add(shape.dtype, query, (keys[0], keys[2]), low)
        high = cute_ptx.multiply_add(shape.dtype, query, (keys[1], keys[3]), high)
    for i in range(4):
        scores[i] = low[i]
        scores[4 + i] = high[i]


def _update_softmax(shape, scores, acc, row_max, row_sum, lane_row: int, scale_log2):
    """Turn the scores of row `lane_row` of a lane into weights, and rescale the previous sums."""
    score_indices = [i for i in range(SLICE_TOKENS // 2) if i % 4 // 2 == lane_row]
    slice_max = scores[score_indices[0]]
    for i in score_indices[1:]:
        slice_max = arch.fmax(slice_max, scores[i])
    for i in range(2):
        slice_max = arch.fmax(slice_max, arch.shuffle_sync_bfly(slice_max, 1 << i))
    new_max = arch.fmax(row_max[lane_row], slice_max * scale_log2)
    rescale = cute_ptx.exp2(row_max[lane_row] - new_max)
    new_sum = row_sum[lane_row] * rescale
    for i in score_indices:
        scores[i] = cute_ptx.exp2(scores[i] * scale_log2 - new_max)
        new_sum = new_sum + scores[i]
    row_sum[lane_row] = new_sum
    row_max[lane_row] = new_max
    for mma_tile in range(shape.head_dim // 8):
        for i in range(2):
            index = 4 * mma_tile + 2 * lane_row + i
            acc[index] = acc[index] * rescale


def _multiply_values(shape, scores, acc, addresses):
    """Add the slice's weighted values. The registers of scores already have the layout of operand A."""
    weights = [Int32(0)] * 4
    for i in range(2):
        for lane_row in range(shape.rows_per_lane):
            first_score = 4 * i + 2 * lane_row
            weights[2 * i + lane_row] = cute_ptx.round_pair(shape.dtype, scores[first_score], scores[first_score + 1])
    for k in range(shape.head_dim // 16):
        address = addresses[k % 4] + (shape.keys_bytes + (k // 4) * SLICE_TOKENS * ROW_BYTES)
        values = cute_ptx.load_matrices(address, transpose=True)
        for i in range(2):
            first_sum = 8 * k + 4 * i
            sums = [acc[first_sum + j] for j in range(4)]
            sums = cute_ptx.multiply_add(shape.dtype, weights, values[2 * i : 2 * i + 2], sums)
            for j in range(4):
                acc[first_sum + j] = sums[j]
