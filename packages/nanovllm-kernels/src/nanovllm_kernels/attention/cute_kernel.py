"""The CuTe DSL kernel of paged decode: one query a request, keys and values brought in by the tensor memory accelerator.

A step is the work of one warp at once: STEP consecutive tokens of one page, keys and values of one head, which one bulk
tensor copy brings into a slot of the warp's own ring in shared memory. All steps of the batch, request after request,
are cut into equal shares, one for each CTA of a key-value head; the cut depends on nothing but the lengths, which every
CTA reads. Its warps take the share's steps in turn and meet only where a request ends. A request that lies in several
shares is merged by the CTA that comes last to it (Dao et al. 2023; Osama et al. 2023 for the equal shares).

The query heads of a key-value head are the rows of a 16-row tile of products; softmax is online, in base 2 (Milakov and
Gimelshein 2018). This room must not know torch.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from nanovllm_kernels.attention import cute_warp

TILE_ROWS = 16
# What one row of shared memory holds of a head under the 128-byte swizzle, in 16-bit numbers.
ROW_DIM = 64
WARP = 32


@dataclass(frozen=True)
class Tiling:
    """step: tokens a warp takes at once, a divisor of the page size. stages: slots of a warp's ring."""

    step: int
    warps: int
    stages: int
    ctas_per_sm: int


class DecodeKernel:
    """See `cute_decode.paged_decode`. One object for each dtype, head size, group, page size and tiling."""

    def __init__(self, dtype, head_dim: int, group: int, page_size: int, tiling: Tiling):
        self.dtype = dtype
        self.head_dim = head_dim
        self.group = group
        self.page_size = page_size
        self.step = tiling.step
        self.warps = tiling.warps
        self.stages = tiling.stages
        self.ctas_per_sm = tiling.ctas_per_sm
        self.step_shift = tiling.step.bit_length() - 1
        self.page_shift = page_size.bit_length() - 1
        self.slot_bytes = 2 * tiling.step * head_dim * 2
        # A lane holds two rows of a tile; the second is empty where the group is small.
        self.rows = 1 if group <= TILE_ROWS // 2 else 2

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv_cache: cute.Pointer,
        tables: cute.Pointer,
        lengths: cute.Pointer,
        out: cute.Pointer,
        partial: cute.Pointer,
        stats: cute.Pointer,
        counters: cute.Pointer,
        num_reqs: Int32,
        num_slots: Int32,
        num_kv_heads: Int32,
        q_stride: Int32,
        table_stride: Int32,
        num_parts: Int32,
        scale_log2: Float32,
        stream: cuda.CUstream,
    ):
        """Launch on `stream`. Pointers and shapes as `cute_decode` gives them."""
        halves = self.head_dim // ROW_DIM
        token = 2 * num_kv_heads * self.head_dim
        cache = cute.make_tensor(
            kv_cache,
            cute.make_layout(
                (num_slots, (ROW_DIM, halves), 2, num_kv_heads),
                stride=(token, (1, ROW_DIM), num_kv_heads * self.head_dim, self.head_dim),
            ),
        )
        swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        ring = cute.tile_to_shape(swizzled, (self.step, self.head_dim, 2, self.stages * self.warps), order=(0, 1, 2, 3))
        load, cache = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cache,
            cute.select(ring, mode=[0, 1, 2]),
            (self.step, (ROW_DIM, halves), 2),
        )
        self.kernel(
            load,
            cache,
            ring,
            q,
            cute.make_tensor(tables, cute.make_layout(num_reqs * table_stride)),
            cute.make_tensor(lengths, cute.make_layout(num_reqs)),
            out,
            partial,
            cute.make_tensor(stats, cute.make_layout(2 * 2 * num_parts * num_kv_heads * self.group)),
            counters,
            num_reqs,
            num_kv_heads,
            q_stride,
            table_stride,
            num_parts,
            scale_log2,
        ).launch(
            grid=[num_kv_heads, num_parts, 1],
            block=[self.warps * WARP, 1, 1],
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        cache: cute.Tensor,
        ring_layout: cute.ComposedLayout,
        q: cute.Pointer,
        tables: cute.Tensor,
        lengths: cute.Tensor,
        out: cute.Pointer,
        partial: cute.Pointer,
        stats: cute.Tensor,
        counters: cute.Pointer,
        num_reqs: Int32,
        num_kv_heads: Int32,
        q_stride: Int32,
        table_stride: Int32,
        num_parts: Int32,
        scale_log2: Float32,
    ):
        """One share of the steps of one key-value head. Grid: key-value heads x shares."""
        thread, _, _ = arch.thread_idx()
        kv_head, part, _ = arch.block_idx()
        warp = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()

        smem = SmemAllocator()
        ring = smem.allocate_tensor(self.dtype, ring_layout.outer, 1024, ring_layout.inner)
        arrived = smem.allocate_array(Int64, self.warps * self.stages)
        row_stats = smem.allocate_tensor(Float32, cute.make_layout(self.warps * 2 * TILE_ROWS))
        places = smem.allocate_tensor(Int32, cute.make_layout(self.warps + 1))
        tiles = cute.local_tile(cache, (self.step, (ROW_DIM, self.head_dim // ROW_DIM), 2), (None, 0, 0, None))
        ring_slots, boxes = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(ring, 0, 3), cute.group_modes(tiles, 0, 3)
        )
        ring_base = Int32(ring.iterator.toint()) + warp * self.stages * self.slot_bytes
        first_slot = warp * self.stages

        if warp == 0:
            cpasync.prefetch_descriptor(load)
        with arch.elect_one():
            for stage in cutlass.range_constexpr(self.stages):
                arch.mbarrier_init(arrived + first_slot + stage, 1)
            arch.mbarrier_init_fence()
        arch.sync_warp()

        share, begin, end, request, start = self.find_share(lengths, num_reqs, num_parts, part, lane)

        # Fill the ring but for one slot. All look-ups of pages first, so that they are on their way together.
        next_step = begin + warp
        next_request, next_start = request, start
        coords = []
        for _ in cutlass.range_constexpr(self.stages):
            coord = Int32(0)
            if next_step < end:
                next_request, next_start = self.seek(lengths, next_step, next_request, next_start)
                coord = self.look_up(tables, next_request * table_stride, next_step - next_start)
            coords.append(coord)
            next_step += self.warps
        for stage in cutlass.range_constexpr(self.stages - 1):
            if begin + warp + stage * self.warps < end:
                self.issue(load, boxes, ring_slots, arrived, first_slot + stage, coords[stage], kv_head)
        next_coord = coords[self.stages - 1]
        next_step -= self.warps

        self.clear_empty(out, lengths, num_reqs, num_kv_heads, kv_head, part, num_parts, thread)

        queries = cute.make_rmem_tensor(self.head_dim // 4, Int32)
        acc = cute.make_rmem_tensor(self.head_dim // 2, Float32)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        slot, spare, phase = Int32(0), Int32(self.stages - 1), Int32(0)
        step = begin + warp
        position = begin
        while position < end:
            length = lengths[request]
            request_end = start + self.num_steps(length)
            stop = cutlass.min(request_end, end)
            if stop > position:
                self.load_queries(queries, q, request * q_stride + kv_head * self.group * self.head_dim, lane)
                acc.fill(0.0)
                row_sum.fill(0.0)
                row_max.fill(-Float32.inf)
                while step < stop:
                    if next_step < end:
                        self.issue(load, boxes, ring_slots, arrived, first_slot + spare, next_coord, kv_head)
                        next_step += self.warps
                        if next_step < end:
                            next_request, next_start = self.seek(lengths, next_step, next_request, next_start)
                            next_coord = self.look_up(tables, next_request * table_stride, next_step - next_start)
                    arch.mbarrier_wait(arrived + first_slot + slot, phase)
                    left = length - ((step - start) << self.step_shift)
                    self.attend(
                        queries, acc, row_max, row_sum, ring_base + slot * self.slot_bytes, left, lane, scale_log2
                    )
                    arch.sync_warp()
                    spare = slot
                    slot += 1
                    if slot == self.stages:
                        slot = Int32(0)
                        phase ^= 1
                    step += self.warps
                self.finish(
                    acc,
                    row_max,
                    row_sum,
                    row_stats,
                    places,
                    ring_base + spare * self.slot_bytes,
                    out,
                    partial,
                    stats,
                    counters,
                    request,
                    start,
                    request_end,
                    position,
                    stop,
                    share,
                    num_kv_heads,
                    kv_head,
                    part,
                    thread,
                    warp,
                    lane,
                )
            position = stop
            start = request_end
            request += 1

    def num_steps(self, length):
        """Steps of a request of `length` tokens."""
        return (length + (self.step - 1)) >> self.step_shift

    @cute.jit
    def find_share(self, lengths: cute.Tensor, num_reqs: Int32, num_parts: Int32, part: Int32, lane: Int32):
        """(size of a share, this one's begin and end in steps, the request it begins in, that request's first step)."""
        per_lane = (num_reqs + (WARP - 1)) // WARP
        first = lane * per_lane
        count = Int32(0)
        for i in cutlass.range(per_lane, unroll=4):
            if first + i < num_reqs:
                count += self.num_steps(lengths[first + i])
        last = count
        for i in cutlass.range_constexpr(5):
            below = arch.shuffle_sync_up(last, 1 << i)
            if lane >= 1 << i:
                last += below
        total = arch.shuffle_sync(last, WARP - 1)
        # Below a step a warp a share would cost more to merge than it gains.
        share = cutlass.max((total + num_parts - 1) // num_parts, Int32(self.warps))
        begin = part * share
        end = cutlass.min(begin + share, total)
        owner = cutlass.min(arch.popc(arch.vote_ballot_sync(last <= begin)), Int32(WARP - 1))
        request = arch.shuffle_sync(first, owner)
        start = arch.shuffle_sync(last - count, owner)
        if begin < end:
            request, start = self.seek(lengths, begin, request, start)
        return share, begin, end, request, start

    @cute.jit
    def seek(self, lengths: cute.Tensor, step: Int32, request: Int32, start: Int32):
        """The request that `step` belongs to and its first step, from an earlier request and its first step."""
        end = start + self.num_steps(lengths[request])
        while step >= end:
            start = end
            request += 1
            end = start + self.num_steps(lengths[request])
        return request, start

    def look_up(self, tables, row, index):
        """Where in the cache, in units of a step, step `index` of the request with table `row` lies."""
        page = tables[row + (index >> (self.page_shift - self.step_shift))]
        within = index & (self.page_size // self.step - 1)
        return page * (self.page_size // self.step) + within

    def issue(self, load, boxes, ring_slots, arrived, slot, coord, kv_head):
        """Start the copy of one step into `slot`."""
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(arrived + slot, self.slot_bytes)
        cute.copy(load, boxes[(None, coord, kv_head)], ring_slots[(None, slot)], tma_bar_ptr=arrived + slot)

    @cute.jit
    def clear_empty(
        self,
        out: cute.Pointer,
        lengths: cute.Tensor,
        num_reqs: Int32,
        num_kv_heads: Int32,
        kv_head: Int32,
        part: Int32,
        num_parts: Int32,
        thread: Int32,
    ):
        """Zero the outputs of requests without tokens, dealt out over the shares."""
        for request in range(part, num_reqs, num_parts):
            if lengths[request] == 0:
                base = (request * num_kv_heads + kv_head) * self.group * self.head_dim
                for unit in range(thread, self.group * self.head_dim // 4, self.warps * WARP):
                    cute_warp.store_pair_global(out + base + unit * 4, Int32(0), Int32(0))

    @cute.jit
    def load_queries(self, queries: cute.Tensor, q: cute.Pointer, offset: Int32, lane: Int32):
        """The request's query heads of this key-value head as A fragments; rows beyond the group are zero."""
        words = cute.make_tensor(cute.recast_ptr(q, dtype=Int32), cute.make_layout(1 << 30))
        queries.fill(0)
        for half in cutlass.range_constexpr(self.rows):
            row = (lane >> 2) + 8 * half
            if row < self.group:
                base = (offset + row * self.head_dim) // 2 + (lane & 3)
                for k in cutlass.range_constexpr(self.head_dim // 16):
                    queries[4 * k + half] = words[base + 8 * k]
                    queries[4 * k + half + 2] = words[base + 8 * k + 4]

    @cute.jit
    def attend(
        self,
        queries: cute.Tensor,
        acc: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        base: Int32,
        left: Int32,
        lane: Int32,
        scale_log2: Float32,
    ):
        """Fold the step at shared address `base`, of which `left` tokens are the request's, into the online softmax."""
        dim_steps, half_bytes = self.head_dim // 16, self.step * ROW_DIM * 2
        value_bytes = half_bytes * (self.head_dim // ROW_DIM)
        scores = cute.make_rmem_tensor(self.step // 2, Float32)
        # Lane l gives row l % 16 of a block of 16 tokens, and of two neighbouring chunks of 8 numbers chunk l // 16;
        # chunk c of row r lies at c ^ (r % 8).
        row = lane & 15
        chunk = row * (ROW_DIM * 2) + (((lane >> 4) ^ (row & 7)) << 4)
        places = [base + (chunk ^ (32 * i)) for i in range(4)]
        if left < self.step:
            # What lies beyond the request may be NaN, which a weight of zero would not cancel.
            for i in cutlass.range_constexpr(self.step * self.head_dim * 2 // 16 // WARP):
                unit = lane + WARP * i
                if ((unit >> 3) & (self.step - 1)) >= left:
                    cute_warp.clear_shared(base + value_bytes + unit * 16)
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_warp()
        for block in cutlass.range_constexpr(self.step // 16):
            low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
            for k in cutlass.range_constexpr(dim_steps):
                offset = (k // 4) * half_bytes + block * 16 * ROW_DIM * 2
                keys = cute_warp.load_matrices(places[k % 4] + offset, transpose=False)
                query = [queries[4 * k + i] for i in range(4)]
                low = cute_warp.multiply_add(self.dtype, query, (keys[0], keys[2]), low)
                high = cute_warp.multiply_add(self.dtype, query, (keys[1], keys[3]), high)
            for i in cutlass.range_constexpr(4):
                scores[8 * block + i] = low[i]
                scores[8 * block + 4 + i] = high[i]
        if left < self.step:
            for i in cutlass.range_constexpr(self.step // 2):
                token = (i // 4) * 8 + (lane & 3) * 2 + i % 2
                if token >= left:
                    scores[i] = -Float32.inf

        for half in cutlass.range_constexpr(self.rows):
            mine = [i for i in range(self.step // 2) if i % 4 // 2 == half]
            best = scores[mine[0]]
            for i in mine[1:]:
                best = arch.fmax(best, scores[i])
            for i in cutlass.range_constexpr(2):
                best = arch.fmax(best, arch.shuffle_sync_bfly(best, 1 << i))
            new_max = arch.fmax(row_max[half], best * scale_log2)
            rescale = cute_warp.exp2(row_max[half] - new_max)
            total = row_sum[half] * rescale
            for i in mine:
                scores[i] = cute_warp.exp2(scores[i] * scale_log2 - new_max)
                total = total + scores[i]
            row_sum[half] = total
            row_max[half] = new_max
            for tile in cutlass.range_constexpr(self.head_dim // 8):
                for i in cutlass.range_constexpr(2):
                    acc[4 * tile + 2 * half + i] = acc[4 * tile + 2 * half + i] * rescale

        for block in cutlass.range_constexpr(self.step // 16):
            weights = [Int32(0)] * 4
            for i in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(self.rows):
                    at = 8 * block + 4 * i + 2 * half
                    weights[2 * i + half] = cute_warp.pack(self.dtype, scores[at], scores[at + 1])
            for k in cutlass.range_constexpr(dim_steps):
                offset = value_bytes + (k // 4) * half_bytes + block * 16 * ROW_DIM * 2
                values = cute_warp.load_matrices(places[k % 4] + offset, transpose=True)
                for i in cutlass.range_constexpr(2):
                    tile = 8 * k + 4 * i
                    added = cute_warp.multiply_add(
                        self.dtype, weights, values[2 * i : 2 * i + 2], [acc[tile + j] for j in range(4)]
                    )
                    for j in cutlass.range_constexpr(4):
                        acc[tile + j] = added[j]

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        row_stats: cute.Tensor,
        places: cute.Tensor,
        spare: Int32,
        out: cute.Pointer,
        partial: cute.Pointer,
        stats: cute.Tensor,
        counters: cute.Pointer,
        request: Int32,
        start: Int32,
        request_end: Int32,
        position: Int32,
        stop: Int32,
        share: Int32,
        num_kv_heads: Int32,
        kv_head: Int32,
        part: Int32,
        thread: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """Merge the warps' results for one request; write them out if the request is whole, else merge its shares.

        Each warp hands its rows over in the one slot of its ring that is not being filled.
        """
        row = lane >> 2
        for half in cutlass.range_constexpr(self.rows):
            total = row_sum[half]
            for i in cutlass.range_constexpr(2):
                total = total + arch.shuffle_sync_bfly(total, 1 << i)
            if row + 8 * half < self.group:
                for tile in cutlass.range_constexpr(self.head_dim // 8):
                    # The tiles of a row change places so that its neighbours' lie in other banks.
                    at = ((row + 8 * half) * self.head_dim + ((row ^ tile) * 8) + (lane & 3) * 2) * 4
                    cute_warp.store_shared(spare + at, acc[4 * tile + 2 * half], acc[4 * tile + 2 * half + 1])
                if lane & 3 == 0:
                    row_stats[warp * 2 * TILE_ROWS + row + 8 * half] = row_max[half]
                    row_stats[(warp * 2 + 1) * TILE_ROWS + row + 8 * half] = total
        if lane == 0:
            places[warp] = spare
        arch.sync_threads()

        whole = position == start and stop == request_end
        first = Int32(position == start)
        place = ((part * 2 + first) * num_kv_heads + kv_head) * self.group
        out_base = (request * num_kv_heads + kv_head) * self.group * self.head_dim
        for unit in range(thread, self.group * self.head_dim // 4, self.warps * WARP):
            unit_row = unit // (self.head_dim // 4)
            column = unit % (self.head_dim // 4)
            at = (unit_row * self.head_dim + (((column >> 1) ^ (unit_row & 7)) * 8) + (column & 1) * 4) * 4
            maxima = [row_stats[w * 2 * TILE_ROWS + unit_row] for w in range(self.warps)]
            best = maxima[0]
            for w in cutlass.range_constexpr(1, self.warps):
                best = arch.fmax(best, maxima[w])
            total = Float32(0.0)
            sums = [Float32(0.0)] * 4
            for w in cutlass.range_constexpr(self.warps):
                weight = cute_warp.exp2(maxima[w] - best)
                total = total + weight * row_stats[(w * 2 + 1) * TILE_ROWS + unit_row]
                values = cute_warp.load_shared(places[w] + at)
                sums = [sums[i] + weight * values[i] for i in range(4)]
            if whole:
                self.store_out(out + out_base + unit * 4, sums, total)
            else:
                cute_warp.store_global(partial + place * self.head_dim + unit * 4, sums)
                if column == 0:
                    stats[2 * (place + unit_row)] = best
                    stats[2 * (place + unit_row) + 1] = total
        if not whole:
            self.merge_shares(
                places,
                out + out_base,
                partial,
                stats,
                counters + request * num_kv_heads + kv_head,
                start // share,
                (request_end - 1) // share,
                num_kv_heads,
                kv_head,
                thread,
            )
        # The slots lent above are filled by the asynchronous proxy next.
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_threads()

    @cute.jit
    def merge_shares(
        self,
        places: cute.Tensor,
        out: cute.Pointer,
        partial: cute.Pointer,
        stats: cute.Tensor,
        counter: cute.Pointer,
        first_part: Int32,
        last_part: Int32,
        num_kv_heads: Int32,
        kv_head: Int32,
        thread: Int32,
    ):
        """Where this CTA is the last to write its part of a request, merge them all; leaves the counter at zero."""
        arch.fence_acq_rel_gpu()
        arch.sync_threads()
        if thread == 0:
            places[self.warps] = arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        arch.sync_threads()
        if places[self.warps] == last_part - first_part:
            arch.fence_acq_rel_gpu()
            if thread == 0:
                cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
            part_rows = 2 * num_kv_heads * self.group
            # Part p's rows, but for the first part's, which holds the request's first step.
            rows = kv_head * self.group
            for unit in range(thread, self.group * self.head_dim // 4, self.warps * WARP):
                row = rows + unit // (self.head_dim // 4)
                first_row = first_part * part_rows + num_kv_heads * self.group + row
                best = stats[2 * first_row]
                for p in cutlass.range(first_part + 1, last_part + 1, unroll=8):
                    best = arch.fmax(best, stats[2 * (p * part_rows + row)])
                column = (unit % (self.head_dim // 4)) * 4
                weight = cute_warp.exp2(stats[2 * first_row] - best)
                total = weight * stats[2 * first_row + 1]
                values = cute_warp.load_global(partial + first_row * self.head_dim + column)
                s0, s1, s2, s3 = (weight * value for value in values)
                for p in cutlass.range(first_part + 1, last_part + 1, unroll=8):
                    part_row = p * part_rows + row
                    weight = cute_warp.exp2(stats[2 * part_row] - best)
                    total += weight * stats[2 * part_row + 1]
                    values = cute_warp.load_global(partial + part_row * self.head_dim + column)
                    s0 += weight * values[0]
                    s1 += weight * values[1]
                    s2 += weight * values[2]
                    s3 += weight * values[3]
                self.store_out(out + unit * 4, (s0, s1, s2, s3), total)

    def store_out(self, pointer, sums, total):
        """Four outputs: sums over the total weight, rounded."""
        scale = arch.rcp_approx(total)
        cute_warp.store_pair_global(
            pointer,
            cute_warp.pack(self.dtype, sums[0] * scale, sums[1] * scale),
            cute_warp.pack(self.dtype, sums[2] * scale, sums[3] * scale),
        )
