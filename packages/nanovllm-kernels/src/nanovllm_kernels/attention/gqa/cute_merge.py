"""Merges partial results in the CuTe DSL decode kernel: of a CTA's warps, and of the CTAs that share a request.

Partial results are weighted by the share of the softmax that each saw (Dao et al. 2023). The last CTA to finish its
part of a request merges and resets the counter, so that graphs can be replayed. Many parts are first merged in groups.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute import arch

from nanovllm_kernels.attention.gqa import cute_ptx
from nanovllm_kernels.attention.gqa.cute_tile import TILE_ROWS, WARP

# Partial results that are loaded at once, and parts per group.
MERGE = 8


@dataclass(frozen=True)
class Exchange:
    """Memory for a CTA's results, and the CTA's position.

    out: [B, Hq, D].
    partial: float32 [slots, Hkv, group, D].
    stats: float32 [slots, Hkv, group, 2], each row's maximum score and sum of weights.
    counters: int32, (slots of groups + B) * Hkv.
    row_stats, places: in shared memory, float32 [warps, 2, 16] and int32 [warps + 1].
    Slot 2p is for a request that part p continues or ends, slot 2p + 1 for one that it begins; slots
    2 * num_parts + 2g + (0 or 1) likewise for group g of MERGE parts.
    """

    out: cute.Pointer
    partial: cute.Pointer
    stats: cute.Pointer
    counters: cute.Pointer
    num_parts: Int32
    num_kv_heads: Int32
    kv_head: Int32
    row_stats: cute.Tensor
    places: cute.Tensor
    thread: Int32
    warp: Int32
    lane: Int32


def num_slots(num_parts: int) -> tuple[int, int]:
    """Return the number of slots of parts, and of groups of parts."""
    return 2 * num_parts, 2 * -(-num_parts // MERGE)


@cute.jit
def clear_empty(shape: cutlass.Constexpr, to: cutlass.Constexpr, lengths: cute.Tensor, num_reqs: Int32, part: Int32):
    """Zero the outputs of requests without tokens; parts share these requests."""
    for request in range(part, num_reqs, to.num_parts):
        if lengths[request] == 0:
            base = (request * to.num_kv_heads + to.kv_head) * shape.group * shape.head_dim
            for unit in range(to.thread, shape.group * shape.head_dim // 4, shape.warps * WARP):
                cute_ptx.store_pair_global(to.out + base + unit * 4, Int32(0), Int32(0))


@cute.jit
def finish(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    spare: Int32,
    request: Int32,
    whole: Boolean,
    part: Int32,
    first_part: Int32,
    last_part: Int32,
):
    """Merge the warps' results for one request, then those of its parts unless this part has the `whole` request.

    spare: shared address of the ring slot that is not being filled; the warp's rows are exchanged through this slot.
    """
    _hand_over(shape, to, acc, row_max, row_sum, spare)
    arch.sync_threads()
    out = to.out + (request * to.num_kv_heads + to.kv_head) * shape.group * shape.head_dim
    slot = 2 * part + Int32(part == first_part)
    for unit in range(to.thread, shape.group * shape.head_dim // 4, shape.warps * WARP):
        best, total, sums = _merge_warps(shape, to, unit)
        if whole:
            _store_out(shape, out + unit * 4, sums, total)
        else:
            _store_slot(shape, to, slot, unit, best, total, sums)
    if not whole:
        _finish_parts(shape, to, out, request, part, first_part, last_part)
    # The asynchronous proxy fills the spare slots next.
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_threads()


@cute.jit
def _finish_parts(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    out: cute.Pointer,
    request: Int32,
    part: Int32,
    first_part: Int32,
    last_part: Int32,
):
    """Merge the parts of a request that spans several; with many parts, merge each group first."""
    groups = 2 * ((to.num_parts + (MERGE - 1)) // MERGE)
    base, first, last = Int32(0), first_part, last_part
    joined = Boolean(True)
    if last_part - first_part >= 2 * MERGE:
        base, first, last = 2 * to.num_parts, first_part // MERGE, last_part // MERGE
        group = part // MERGE
        low = cutlass.max(first_part, group * MERGE)
        high = cutlass.min(last_part, group * MERGE + (MERGE - 1))
        slot = 2 * group + Int32(group == first)
        joined = _arrive_last(shape, to, slot, high - low + 1)
        if joined:
            for unit in range(to.thread, shape.group * shape.head_dim // 4, shape.warps * WARP):
                best, total, s0, s1, s2, s3 = _merge_slots(shape, to, unit, Int32(0), first_part, low, high)
                _store_slot(shape, to, base + slot, unit, best, total, (s0, s1, s2, s3))
    if joined:
        _finish_request(shape, to, out, groups + request, base, first, last)


@cute.jit
def _finish_request(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    out: cute.Pointer,
    counter: Int32,
    base: Int32,
    first: Int32,
    last: Int32,
):
    """Write the request's outputs if this CTA is the last to arrive."""
    if _arrive_last(shape, to, counter, last - first + 1):
        for unit in range(to.thread, shape.group * shape.head_dim // 4, shape.warps * WARP):
            _, total, s0, s1, s2, s3 = _merge_slots(shape, to, unit, base, first, first, last)
            _store_out(shape, out + unit * 4, (s0, s1, s2, s3), total)


@cute.jit
def _arrive_last(shape: cutlass.Constexpr, to: cutlass.Constexpr, counter: Int32, count: Int32):
    """Whether this CTA arrives last of `count`; it then sees what all wrote, and the counter is zero again."""
    arch.sync_threads()
    if to.thread == 0:
        place = to.counters + (counter * to.num_kv_heads + to.kv_head)
        # Release this CTA's writes and acquire those of the other CTAs.
        arrived = arch.atomic_add(place, Int32(1), sem="acq_rel", scope="gpu")
        to.places[shape.warps] = arrived
        if arrived == count - 1:
            cute.make_tensor(place, cute.make_layout(1))[0] = Int32(0)
    arch.sync_threads()
    return to.places[shape.warps] == count - 1


@cute.jit
def _hand_over(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    spare: Int32,
):
    """Store a warp's unscaled rows and their statistics in shared memory, for the other threads of the CTA."""
    row = to.lane >> 2
    for half in cutlass.range_constexpr(shape.lane_rows):
        total = row_sum[half]
        for i in cutlass.range_constexpr(2):
            total = total + arch.shuffle_sync_bfly(total, 1 << i)
        if row + 8 * half < shape.group:
            for tile in cutlass.range_constexpr(shape.head_dim // 8):
                at, first, second = _sums_of_lane(shape, to.lane, row, half, tile)
                cute_ptx.store_shared(spare + at * 4, acc[first], acc[second])
            if to.lane & 3 == 0:
                to.row_stats[(to.warp * 2) * TILE_ROWS + row + 8 * half] = row_max[half]
                to.row_stats[(to.warp * 2 + 1) * TILE_ROWS + row + 8 * half] = total
    if to.lane == 0:
        to.places[to.warp] = spare


def _sums_of_lane(shape, lane, row, half, tile):
    """Return the offset of a lane's two neighbouring sums of a tile's row, and their indices in its accumulators."""
    if not shape.quantized:
        eighth, column, first, second = tile, (lane & 3) * 2, 4 * tile + 2 * half, 4 * tile + 2 * half + 1
    else:
        # A pair of tiles holds even and odd dimensions; a lane's lower two come first, then its upper two.
        even, odd = 4 * (tile & ~1), 4 * (tile | 1)
        eighth, column = (tile & ~1) + ((lane & 3) >> 1), (lane & 1) * 4 + (tile & 1) * 2
        first, second = even + (tile & 1), odd + (tile & 1)
    # Swizzle a row's eighths, so that neighbouring rows use different banks.
    return (row + 8 * half) * shape.head_dim + (row ^ eighth) * 8 + column, first, second


def _merge_warps(shape, to, unit):
    """Return (maximum score, sum of weights, four sums) of elements 4 * unit to 4 * unit + 3 of the group's output."""
    row, column = unit // (shape.head_dim // 4), unit % (shape.head_dim // 4)
    at = row * shape.head_dim + ((column >> 1) ^ (row & 7)) * 8 + (column & 1) * 4
    maxima = [to.row_stats[(w * 2) * TILE_ROWS + row] for w in range(shape.warps)]
    best = maxima[0]
    for top in maxima[1:]:
        best = arch.fmax(best, top)
    total, sums = Float32(0.0), [Float32(0.0)] * 4
    for w in range(shape.warps):
        weight = cute_ptx.exp2(maxima[w] - best)
        total = total + weight * to.row_stats[(w * 2 + 1) * TILE_ROWS + row]
        values = cute_ptx.load_shared(to.places[w] + at * 4)
        sums = [sums[i] + weight * values[i] for i in range(4)]
    return best, total, sums


@cute.jit
def _merge_slots(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    unit: Int32,
    base: Int32,
    first: Int32,
    low: Int32,
    high: Int32,
):
    """Like `_merge_warps`, for the slots of parts (or groups) low..high of a request that begins in part `first`."""
    best, total = -Float32.inf, Float32(0.0)
    s0, s1, s2, s3 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
    for chunk in range(low, high + 1, MERGE):
        seen = []
        for i in cutlass.range_constexpr(MERGE):
            # Past the end, the last slot is read again with weight 0.
            part = cutlass.min(chunk + i, high)
            row = _slot_row(shape, to, base + 2 * part + Int32(part == first), unit)
            top, weights = cute_ptx.load_pair_global(to.stats + 2 * row)
            values = cute_ptx.load_global(to.partial + row * shape.head_dim + unit % (shape.head_dim // 4) * 4)
            seen.append((top, weights, values))
        new_best = best
        for top, _, _ in seen:
            new_best = arch.fmax(new_best, top)
        rescale = cute_ptx.exp2(best - new_best)
        total, s0, s1, s2, s3 = total * rescale, s0 * rescale, s1 * rescale, s2 * rescale, s3 * rescale
        for i in cutlass.range_constexpr(MERGE):
            top, weights, values = seen[i]
            weight = cute_ptx.exp2(top - new_best) * Float32(chunk + i <= high)
            total += weight * weights
            s0 += weight * values[0]
            s1 += weight * values[1]
            s2 += weight * values[2]
            s3 += weight * values[3]
        best = new_best
    return best, total, s0, s1, s2, s3


def _slot_row(shape, to, slot, unit):
    """Return the row of `partial` and `stats` that holds elements 4 * unit to 4 * unit + 3 of the group's output."""
    return (slot * to.num_kv_heads + to.kv_head) * shape.group + unit // (shape.head_dim // 4)


@cute.jit
def _store_slot(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    slot: Int32,
    unit: Int32,
    best: Float32,
    total: Float32,
    sums: cutlass.Constexpr,
):
    """Store four partial sums, and the row's statistics once per row."""
    row, column = _slot_row(shape, to, slot, unit), unit % (shape.head_dim // 4)
    cute_ptx.store_global(to.partial + row * shape.head_dim + column * 4, sums)
    if column == 0:
        cute_ptx.store_pair_global(to.stats + 2 * row, best, total)


def _store_out(shape, pointer, sums, total):
    """Store four outputs: the sums divided by the total weight, rounded."""
    scale = arch.rcp_approx(total)
    low = cute_ptx.pack(shape.dtype, sums[0] * scale, sums[1] * scale)
    high = cute_ptx.pack(shape.dtype, sums[2] * scale, sums[3] * scale)
    cute_ptx.store_pair_global(pointer, low, high)
