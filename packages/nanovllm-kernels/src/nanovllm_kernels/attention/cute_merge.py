"""How results meet in the CuTe DSL decode kernel: of a CTA's warps, and of the CTAs that hold shares of one request.

Merging weighs partial results by the share of the softmax that each saw (Dao et al. 2023). A CTA that is done with its
part of a request counts itself; the last one merges, and sets the counter back, so that a graph can be replayed.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute import arch

from nanovllm_kernels.attention import cute_warp
from nanovllm_kernels.attention.cute_tile import TILE_ROWS, WARP

# Parts of a request whose results are on their way at once.
MERGE_PARTS = 8


@dataclass(frozen=True)
class Exchange:
    """Where a CTA's results go.

    out: [B, Hq, D]. partial: float32 [parts, 2, Hkv, group, D]; of the two, the second is for a request that begins in
    the part and ends in a later one. stats: float32 [parts, 2, Hkv, group, 2], greatest score and sum of weights of each
    row. counters: int32 [B, Hkv]. row_stats, places: in shared memory, float32 [warps, 2, 16] and int32 [warps + 1].
    """

    out: cute.Pointer
    partial: cute.Pointer
    stats: cute.Pointer
    counters: cute.Pointer
    num_kv_heads: Int32
    kv_head: Int32
    row_stats: cute.Tensor
    places: cute.Tensor
    thread: Int32
    warp: Int32
    lane: Int32


@cute.jit
def clear_empty(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    lengths: cute.Tensor,
    num_reqs: Int32,
    part: Int32,
    num_parts: Int32,
):
    """Zero the outputs of requests without tokens, dealt out over the parts."""
    for request in range(part, num_reqs, num_parts):
        if lengths[request] == 0:
            base = (request * to.num_kv_heads + to.kv_head) * shape.group * shape.head_dim
            for unit in range(to.thread, shape.group * shape.head_dim // 4, shape.tiling.warps * WARP):
                cute_warp.store_pair_global(to.out + base + unit * 4, Int32(0), Int32(0))


@cute.jit
def finish(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    spare: Int32,
    request: Int32,
    begins: cutlass.Boolean,
    ends: cutlass.Boolean,
    part: Int32,
    first_part: Int32,
    last_part: Int32,
):
    """Merge the warps' results for one request, then, unless it both begins and ends in this part, those of its parts.

    spare: shared address of the one slot of the warp's ring that is not being filled; its rows are handed over there.
    """
    _hand_over(shape, to, acc, row_max, row_sum, spare)
    arch.sync_threads()
    whole = begins and ends
    place = ((part * 2 + Int32(begins)) * to.num_kv_heads + to.kv_head) * shape.group
    out = to.out + (request * to.num_kv_heads + to.kv_head) * shape.group * shape.head_dim
    for unit in range(to.thread, shape.group * shape.head_dim // 4, shape.tiling.warps * WARP):
        best, total, sums = _merge_warps(shape, to, unit)
        if whole:
            _store_out(shape, out + unit * 4, sums, total)
        else:
            cute_warp.store_global(to.partial + place * shape.head_dim + unit * 4, sums)
            if unit % (shape.head_dim // 4) == 0:
                cute_warp.store_pair_global(to.stats + 2 * (place + unit // (shape.head_dim // 4)), best, total)
    if not whole:
        arch.sync_threads()
        if to.thread == 0:
            # Releases what the whole CTA wrote, and acquires what the others did.
            counter = to.counters + request * to.num_kv_heads + to.kv_head
            arrived = arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            to.places[shape.tiling.warps] = arrived
            if arrived == last_part - first_part:
                cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
        arch.sync_threads()
        if to.places[shape.tiling.warps] == last_part - first_part:
            for unit in range(to.thread, shape.group * shape.head_dim // 4, shape.tiling.warps * WARP):
                _merge_parts(shape, to, out, unit, first_part, last_part)
    # The slots that were lent are filled by the asynchronous proxy next.
    arch.fence_proxy("async.shared", space="cta")
    arch.sync_threads()


@cute.jit
def _hand_over(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    spare: Int32,
):
    """Put a warp's rows, unscaled, and their statistics where the CTA's other threads find them."""
    row = to.lane >> 2
    for half in cutlass.range_constexpr(shape.lane_rows):
        total = row_sum[half]
        for i in cutlass.range_constexpr(2):
            total = total + arch.shuffle_sync_bfly(total, 1 << i)
        if row + 8 * half < shape.group:
            for tile in cutlass.range_constexpr(shape.head_dim // 8):
                # The tiles of a row change places so that its neighbours' lie in other banks.
                at = (row + 8 * half) * shape.head_dim + (row ^ tile) * 8 + (to.lane & 3) * 2
                cute_warp.store_shared(spare + at * 4, acc[4 * tile + 2 * half], acc[4 * tile + 2 * half + 1])
            if to.lane & 3 == 0:
                to.row_stats[(to.warp * 2) * TILE_ROWS + row + 8 * half] = row_max[half]
                to.row_stats[(to.warp * 2 + 1) * TILE_ROWS + row + 8 * half] = total
    if to.lane == 0:
        to.places[to.warp] = spare


def _merge_warps(shape, to, unit):
    """(greatest score, sum of weights, four sums) of numbers 4 * unit and on of the group's output."""
    warps = shape.tiling.warps
    row, column = unit // (shape.head_dim // 4), unit % (shape.head_dim // 4)
    at = row * shape.head_dim + ((column >> 1) ^ (row & 7)) * 8 + (column & 1) * 4
    maxima = [to.row_stats[(w * 2) * TILE_ROWS + row] for w in range(warps)]
    best = maxima[0]
    for w in range(1, warps):
        best = arch.fmax(best, maxima[w])
    total, sums = Float32(0.0), [Float32(0.0)] * 4
    for w in range(warps):
        weight = cute_warp.exp2(maxima[w] - best)
        total = total + weight * to.row_stats[(w * 2 + 1) * TILE_ROWS + row]
        values = cute_warp.load_shared(to.places[w] + at * 4)
        sums = [sums[i] + weight * values[i] for i in range(4)]
    return best, total, sums


@cute.jit
def _merge_parts(
    shape: cutlass.Constexpr,
    to: cutlass.Constexpr,
    out: cute.Pointer,
    unit: Int32,
    first_part: Int32,
    last_part: Int32,
):
    """Numbers 4 * unit and on of the group's output, from all parts of the request."""
    part_rows = 2 * to.num_kv_heads * shape.group
    row = to.kv_head * shape.group + unit // (shape.head_dim // 4)
    column = unit % (shape.head_dim // 4) * 4
    best, total = -Float32.inf, Float32(0.0)
    s0, s1, s2, s3 = Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)
    for chunk in range(first_part, last_part + 1, MERGE_PARTS):
        seen = []
        for i in cutlass.range_constexpr(MERGE_PARTS):
            # Beyond the last part it is read again, and not counted.
            part = cutlass.min(chunk + i, last_part)
            place = part * part_rows + Int32(part == first_part) * (to.num_kv_heads * shape.group) + row
            top, weights = cute_warp.load_pair_global(to.stats + 2 * place)
            values = cute_warp.load_global(to.partial + place * shape.head_dim + column)
            seen.append((top, weights, values))
        new_best = best
        for top, _, _ in seen:
            new_best = arch.fmax(new_best, top)
        rescale = cute_warp.exp2(best - new_best)
        total, s0, s1, s2, s3 = total * rescale, s0 * rescale, s1 * rescale, s2 * rescale, s3 * rescale
        for i in cutlass.range_constexpr(MERGE_PARTS):
            top, weights, values = seen[i]
            weight = cute_warp.exp2(top - new_best) * Float32(chunk + i <= last_part)
            total += weight * weights
            s0 += weight * values[0]
            s1 += weight * values[1]
            s2 += weight * values[2]
            s3 += weight * values[3]
        best = new_best
    _store_out(shape, out + unit * 4, (s0, s1, s2, s3), total)


def _store_out(shape, pointer, sums, total):
    """Four outputs: sums over the total weight, rounded."""
    scale = arch.rcp_approx(total)
    low = cute_warp.pack(shape.dtype, sums[0] * scale, sums[1] * scale)
    high = cute_warp.pack(shape.dtype, sums[2] * scale, sums[3] * scale)
    cute_warp.store_pair_global(pointer, low, high)
