"""Merges the results of a CTA's warps, and of the CTAs that share a tile, in the CuTe DSL decode kernel.

A tile holds consecutive queries of one request (see `cute_decode`). A part is the work of one CTA. Parts are merged as
in split-KV attention (Dao et al. 2023). A CTA that has stored its part of a tile increments the tile's counter. The
last CTA merges the parts and resets the counter, so that graphs can be replayed. Many parts are first merged in groups.

`shape` is a `DecodeShape`. `quad` is the index of four adjacent elements in the output rows of a tile.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute import arch

from nanovllm_kernels.attention.gqa import cute_ptx
from nanovllm_kernels.attention.gqa.cute_tile import TILE_ROWS, WARP_SIZE

# Parts per group. A thread loads the partial results of all parts of a group at once.
PARTS_PER_GROUP = 8


@dataclass(frozen=True)
class ResultExchange:
    """Holds the memory through which warps and CTAs exchange results, and the thread's position.

    out: [T, Hq, D].
    partial_out: float32 [slots, Hkv, num_rows, D], where `num_rows` is `shape.num_rows`.
    partial_stats: float32 [slots, Hkv, num_rows, 2], each row's maximum score and sum of weights.
    counters: int32 [(group slots + tiles) * Hkv], number of arrived CTAs for each group of parts, then for each tile.
    row_stats: float32 [warps, 2, 16] in shared memory, each warp's maximum scores and sums of weights.
    row_addresses: int32 [warps + 1] in shared memory, address of each warp's rows, then the counter that thread 0 read.

    A slot holds the partial result of one tile. Part p shares at most two tiles with other parts. Slot 2p is for the
    tile that begins in an earlier part. Slot 2p + 1 is for the tile that begins in part p and ends in a later part.
    Group g of PARTS_PER_GROUP parts likewise has slots 2 * num_parts + 2g and 2 * num_parts + 2g + 1.
    """

    out: cute.Pointer
    partial_out: cute.Pointer
    partial_stats: cute.Pointer
    counters: cute.Pointer
    num_parts: Int32
    num_kv_heads: Int32
    kv_head: Int32
    row_stats: cute.Tensor
    row_addresses: cute.Tensor
    thread: Int32
    warp: Int32
    lane: Int32


def count_slots(num_parts: int) -> tuple[int, int]:
    """Return (number of parts' slots, number of groups' slots)."""
    return 2 * num_parts, 2 * -(-num_parts // PARTS_PER_GROUP)


@cute.jit
def clear_empty_tiles(
    shape: cutlass.Constexpr, exchange: cutlass.Constexpr, tile_lens: cute.Tensor, num_tiles: Int32, part: Int32
):
    """Zero the outputs of tiles without tokens. CTAs divide these tiles among themselves.

    Requires one query per request: tile b is the query of request b.
    """
    for tile in range(part, num_tiles, exchange.num_parts):
        if tile_lens[tile] == 0:
            first_element = (tile * exchange.num_kv_heads + exchange.kv_head) * shape.group_size * shape.head_dim
            for quad in range(exchange.thread, shape.group_size * shape.head_dim // 4, shape.num_warps * WARP_SIZE):
                cute_ptx.store_global_2_words(exchange.out + first_element + quad * 4, Int32(0), Int32(0))


@cute.jit
def merge_tile(
    shape: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    spare_address: Int32,
    tile: Int32,
    first_token: Int32,
    num_queries: Int32,
    is_whole: Boolean,
    part: Int32,
    first_part: Int32,
    last_part: Int32,
):
    """Merge the warps' results for one tile. If several parts share the tile, merge the parts too.

    first_token: row of the tile's first query in `exchange.out`.
    is_whole: whether this part computes the whole tile, so that no other part shares the tile.
    spare_address: address of a free slot in the warp's ring buffer. Other warps read this warp's rows from this slot.
    """
    _share_rows(shape, exchange, acc, row_max, row_sum, spare_address)
    arch.sync_threads()
    out = exchange.out + (first_token * exchange.num_kv_heads + exchange.kv_head) * shape.group_size * shape.head_dim
    slot = 2 * part + Int32(part == first_part)
    for quad in range(exchange.thread, shape.num_rows * shape.head_dim // 4, shape.num_warps * WARP_SIZE):
        max_score, weight_sum, sums = _merge_warps(shape, exchange, quad)
        if is_whole:
            _store_result(shape, exchange, out, quad, num_queries, sums, weight_sum)
        else:
            _store_slot(shape, exchange, slot, quad, max_score, weight_sum, sums)
    if not is_whole:
        _merge_parts(shape, exchange, out, tile, num_queries, part, first_part, last_part)
    # Order these accesses before the bulk copies (asynchronous proxy) that will refill the spare slots.
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_threads()


@cute.jit
def _merge_parts(
    shape: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    out: cute.Pointer,
    tile: Int32,
    num_queries: Int32,
    part: Int32,
    first_part: Int32,
    last_part: Int32,
):
    """Merge the parts of a tile that spans several parts. With many parts, merge each group first."""
    num_group_slots = 2 * ((exchange.num_parts + (PARTS_PER_GROUP - 1)) // PARTS_PER_GROUP)
    slot_base, first_index, last_index = Int32(0), first_part, last_part
    # True if the parts are not grouped, or if this CTA is the last CTA to arrive in its group.
    is_last = Boolean(True)
    if last_part - first_part >= 2 * PARTS_PER_GROUP:
        slot_base = 2 * exchange.num_parts
        first_index, last_index = first_part // PARTS_PER_GROUP, last_part // PARTS_PER_GROUP
        part_group = part // PARTS_PER_GROUP
        group_first_part = cutlass.max(first_part, part_group * PARTS_PER_GROUP)
        group_last_part = cutlass.min(last_part, part_group * PARTS_PER_GROUP + (PARTS_PER_GROUP - 1))
        slot = 2 * part_group + Int32(part_group == first_index)
        is_last = _arrives_last(shape, exchange, slot, group_last_part - group_first_part + 1)
        if is_last:
            for quad in range(exchange.thread, shape.num_rows * shape.head_dim // 4, shape.num_warps * WARP_SIZE):
                max_score, weight_sum, sum_0, sum_1, sum_2, sum_3 = _merge_slots(
                    shape, exchange, quad, Int32(0), first_part, group_first_part, group_last_part
                )
                _store_slot(
                    shape, exchange, slot_base + slot, quad, max_score, weight_sum, (sum_0, sum_1, sum_2, sum_3)
                )
    if is_last:
        counter_index = num_group_slots + tile
        _merge_if_last(shape, exchange, out, num_queries, counter_index, slot_base, first_index, last_index)


@cute.jit
def _merge_if_last(
    shape: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    out: cute.Pointer,
    num_queries: Int32,
    counter_index: Int32,
    slot_base: Int32,
    first_index: Int32,
    last_index: Int32,
):
    """Merge parts (or groups) first_index..last_index of a tile, if this CTA is the last to arrive."""
    if _arrives_last(shape, exchange, counter_index, last_index - first_index + 1):
        for quad in range(exchange.thread, shape.num_rows * shape.head_dim // 4, shape.num_warps * WARP_SIZE):
            _, weight_sum, sum_0, sum_1, sum_2, sum_3 = _merge_slots(
                shape, exchange, quad, slot_base, first_index, first_index, last_index
            )
            _store_result(shape, exchange, out, quad, num_queries, (sum_0, sum_1, sum_2, sum_3), weight_sum)


@cute.jit
def _arrives_last(shape: cutlass.Constexpr, exchange: cutlass.Constexpr, counter_index: Int32, num_arrivals: Int32):
    """Increment a counter. Return whether this CTA is the last of `num_arrivals` CTAs.

    The last CTA resets the counter, and sees the writes of all these CTAs.
    """
    arch.sync_threads()
    if exchange.thread == 0:
        counter_ptr = exchange.counters + (counter_index * exchange.num_kv_heads + exchange.kv_head)
        # Release the writes of this CTA, and acquire the writes of the other CTAs.
        num_arrived_before = arch.atomic_add(counter_ptr, Int32(1), sem="acq_rel", scope="gpu")
        exchange.row_addresses[shape.num_warps] = num_arrived_before
        if num_arrived_before == num_arrivals - 1:
            cute.make_tensor(counter_ptr, cute.make_layout(1))[0] = Int32(0)
    arch.sync_threads()
    return exchange.row_addresses[shape.num_warps] == num_arrivals - 1


@cute.jit
def _share_rows(
    shape: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    spare_address: Int32,
):
    """Store a warp's sums, and each row's maximum and sum of weights, in shared memory for the CTA's other threads."""
    row = exchange.lane >> 2
    for lane_row in cutlass.range_constexpr(shape.rows_per_lane):
        weight_sum = row_sum[lane_row]
        for i in cutlass.range_constexpr(2):
            weight_sum = weight_sum + arch.shuffle_sync_bfly(weight_sum, 1 << i)
        if row + 8 * lane_row < shape.num_rows:
            for mma_tile in cutlass.range_constexpr(shape.head_dim // 8):
                offset, first, second = _locate_lane_sums(shape, exchange.lane, row, lane_row, mma_tile)
                cute_ptx.store_shared_2_floats(spare_address + offset * 4, acc[first], acc[second])
            if exchange.lane & 3 == 0:
                exchange.row_stats[(exchange.warp * 2) * TILE_ROWS + row + 8 * lane_row] = row_max[lane_row]
                exchange.row_stats[(exchange.warp * 2 + 1) * TILE_ROWS + row + 8 * lane_row] = weight_sum
    if exchange.lane == 0:
        exchange.row_addresses[exchange.warp] = spare_address


def _locate_lane_sums(shape, lane, row, lane_row, mma_tile):
    """Locate a lane's two sums in one tile of `mma`. Return (offset in shared memory, two indices in `acc`)."""
    # `octet` is the index of 8 adjacent sums in a row. `column` is the position of the lane's first sum.
    if not shape.is_fp8:
        octet, column = mma_tile, (lane & 3) * 2
        first = 4 * mma_tile + 2 * lane_row
        second = first + 1
    else:
        # The first `mma` tile of a pair holds even dimensions, the second `mma` tile odd dimensions.
        even, odd = 4 * (mma_tile & ~1), 4 * (mma_tile | 1)
        octet, column = (mma_tile & ~1) + ((lane & 3) >> 1), (lane & 1) * 4 + (mma_tile & 1) * 2
        first, second = even + (mma_tile & 1), odd + (mma_tile & 1)
    # Swizzle the octets of each row, so that neighbouring rows use different banks.
    return (row + 8 * lane_row) * shape.head_dim + (row ^ octet) * 8 + column, first, second


def _merge_warps(shape, exchange, quad):
    """Merge elements 4 * quad to 4 * quad + 3 of the output. Return (maximum score, sum of weights, four sums)."""
    row, column = quad // (shape.head_dim // 4), quad % (shape.head_dim // 4)
    offset = row * shape.head_dim + ((column >> 1) ^ (row & 7)) * 8 + (column & 1) * 4
    maxima = [exchange.row_stats[(warp * 2) * TILE_ROWS + row] for warp in range(shape.num_warps)]
    max_score = maxima[0]
    for warp_max in maxima[1:]:
        max_score = arch.fmax(max_score, warp_max)
    weight_sum, sums = Float32(0.0), [Float32(0.0)] * 4
    for warp in range(shape.num_warps):
        weight = cute_ptx.exp2(maxima[warp] - max_score)
        weight_sum = weight_sum + weight * exchange.row_stats[(warp * 2 + 1) * TILE_ROWS + row]
        values = cute_ptx.load_shared_4_floats(exchange.row_addresses[warp] + offset * 4)
        sums = [sums[i] + weight * values[i] for i in range(4)]
    return max_score, weight_sum, sums


@cute.jit
def _merge_slots(
    shape: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    quad: Int32,
    slot_base: Int32,
    first_part: Int32,
    first_merged: Int32,
    last_merged: Int32,
):
    """Merge parts (or groups) first_merged..last_merged. Return what `_merge_warps` returns.

    first_part: the part (or group) in which the tile begins.
    """
    max_score, weight_sum = -Float32.inf, Float32(0.0)
    sum_0, sum_1, sum_2, sum_3 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
    for first_loaded in range(first_merged, last_merged + 1, PARTS_PER_GROUP):
        loaded = []
        for i in cutlass.range_constexpr(PARTS_PER_GROUP):
            # Past `last_merged`, the last slot is read again with weight 0.
            part = cutlass.min(first_loaded + i, last_merged)
            row = _partial_row(shape, exchange, slot_base + 2 * part + Int32(part == first_part), quad)
            slot_max, slot_sum = cute_ptx.load_global_2_floats(exchange.partial_stats + 2 * row)
            values = cute_ptx.load_global_4_floats(
                exchange.partial_out + row * shape.head_dim + quad % (shape.head_dim // 4) * 4
            )
            loaded.append((slot_max, slot_sum, values))
        new_max = max_score
        for slot_max, _, _ in loaded:
            new_max = arch.fmax(new_max, slot_max)
        rescale = cute_ptx.exp2(max_score - new_max)
        weight_sum, sum_0, sum_1 = weight_sum * rescale, sum_0 * rescale, sum_1 * rescale
        sum_2, sum_3 = sum_2 * rescale, sum_3 * rescale
        for i in cutlass.range_constexpr(PARTS_PER_GROUP):
            slot_max, slot_sum, values = loaded[i]
            weight = cute_ptx.exp2(slot_max - new_max) * Float32(first_loaded + i <= last_merged)
            weight_sum += weight * slot_sum
            sum_0 += weight * values[0]
            sum_1 += weight * values[1]
            sum_2 += weight * values[2]
            sum_3 += weight * values[3]
        max_score = new_max
    return max_score, weight_sum, sum_0, sum_1, sum_2, sum_3


def _partial_row(shape, exchange, slot, quad):
    """Return the row of the partial results that holds elements 4 * quad to 4 * quad + 3 of the output."""
    return (slot * exchange.num_kv_heads + exchange.kv_head) * shape.num_rows + quad // (shape.head_dim // 4)


@cute.jit
def _store_slot(
    shape: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    slot: Int32,
    quad: Int32,
    max_score: Float32,
    weight_sum: Float32,
    sums: cutlass.Constexpr,
):
    """Store four partial sums. For a row's first four sums, also store the row's maximum score and sum of weights."""
    row, column = _partial_row(shape, exchange, slot, quad), quad % (shape.head_dim // 4)
    cute_ptx.store_global_4_floats(exchange.partial_out + row * shape.head_dim + column * 4, sums)
    if column == 0:
        cute_ptx.store_global_2_words(exchange.partial_stats + 2 * row, max_score, weight_sum)


@cute.jit
def _store_result(
    shape: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    out: cute.Pointer,
    quad: Int32,
    num_queries: Int32,
    sums: cutlass.Constexpr,
    weight_sum: Float32,
):
    """Divide four sums by the sum of weights, round the results and store them. Skip rows without a query.

    out: output of the tile's first query for this key-value head.
    """
    quads_per_query = shape.group_size * shape.head_dim // 4
    query = quad // quads_per_query
    if query < num_queries:
        inverse_sum = arch.rcp_approx(weight_sum)
        low_pair = cute_ptx.round_pair(shape.dtype, sums[0] * inverse_sum, sums[1] * inverse_sum)
        high_pair = cute_ptx.round_pair(shape.dtype, sums[2] * inverse_sum, sums[3] * inverse_sum)
        # Skip the other key-value heads of the queries before this query.
        offset = 4 * (quad + query * quads_per_query * (exchange.num_kv_heads - 1))
        cute_ptx.store_global_2_words(out + offset, low_pair, high_pair)
