"""The CuTe DSL kernel of paged decode: one query a request, keys and values brought in by the tensor memory accelerator.

A step is the work of one warp at once: consecutive tokens of one page, keys and values of one head, which one bulk tensor
copy brings into a slot of the warp's own ring in shared memory. All steps of the batch, request after request, are cut
into equal parts, one for each CTA of a key-value head (Osama et al. 2023); the cut depends on nothing but the lengths,
which every CTA reads. Its warps take the part's steps in turn and meet only where a request ends.

This room must not know torch.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from nanovllm_kernels.attention.cute_merge import Exchange, clear_empty, finish
from nanovllm_kernels.attention.cute_tile import ROW_DIM, TILE_ROWS, WARP, Shape, attend, load_queries


class DecodeKernel:
    """See `cute_decode.paged_decode`, which gives the arguments."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.steps_per_page = shape.page_size // shape.tiling.step

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
        """Launch a CTA for each key-value head and part."""
        shape, tiling = self.shape, self.shape.tiling
        cache = cute.make_tensor(
            kv_cache,
            cute.make_layout(
                (num_slots, (ROW_DIM, shape.halves), 2, num_kv_heads),
                stride=(
                    2 * num_kv_heads * shape.head_dim,
                    (1, ROW_DIM),
                    num_kv_heads * shape.head_dim,
                    shape.head_dim,
                ),
            ),
        )
        swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, shape.dtype)
        slots = tiling.stages * tiling.warps
        ring = cute.tile_to_shape(swizzled, (tiling.step, shape.head_dim, 2, slots), order=(0, 1, 2, 3))
        load, cache = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cache,
            cute.select(ring, mode=[0, 1, 2]),
            (tiling.step, (ROW_DIM, shape.halves), 2),
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
            stats,
            counters,
            num_reqs,
            num_kv_heads,
            q_stride,
            table_stride,
            num_parts,
            scale_log2,
        ).launch(
            grid=[num_kv_heads, num_parts, 1],
            block=[tiling.warps * WARP, 1, 1],
            min_blocks_per_mp=tiling.ctas_per_sm,
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
        stats: cute.Pointer,
        counters: cute.Pointer,
        num_reqs: Int32,
        num_kv_heads: Int32,
        q_stride: Int32,
        table_stride: Int32,
        num_parts: Int32,
        scale_log2: Float32,
    ):
        """One part of the steps of one key-value head. Grid: key-value heads x parts."""
        shape = self.shape
        step_size, warps, stages = shape.tiling.step, shape.tiling.warps, shape.tiling.stages
        kv_head, part, _ = arch.block_idx()
        warp = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()

        smem = SmemAllocator()
        ring = smem.allocate_tensor(shape.dtype, ring_layout.outer, 1024, ring_layout.inner)
        arrived = smem.allocate_array(Int64, warps * stages)
        to = Exchange(
            out,
            partial,
            stats,
            counters,
            num_kv_heads,
            kv_head,
            row_stats=smem.allocate_tensor(Float32, cute.make_layout(warps * 2 * TILE_ROWS)),
            places=smem.allocate_tensor(Int32, cute.make_layout(warps + 1)),
            thread=arch.thread_idx()[0],
            warp=warp,
            lane=lane,
        )
        boxes = cute.local_tile(cache, (step_size, (ROW_DIM, shape.halves), 2), (None, 0, 0, kv_head))
        slots, boxes = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(ring, 0, 3), cute.group_modes(boxes, 0, 3)
        )
        first_slot = warp * stages
        base = Int32(ring.iterator.toint())
        if warp == 0:
            cpasync.prefetch_descriptor(load)
        with arch.elect_one():
            for stage in cutlass.range_constexpr(stages):
                arch.mbarrier_init(arrived + first_slot + stage, 1)
            arch.mbarrier_init_fence()
        arch.sync_warp()

        part_size, begin, end, request, start, stop = self.find_part(lengths, num_reqs, num_parts, part, lane)

        # Fill the ring but for one slot. All look-ups of pages come first, so that they are on their way together.
        next_step, next_request, next_start, next_stop = begin + warp, request, start, stop
        coords = []
        for _ in cutlass.range_constexpr(stages):
            coord = Int32(0)
            if next_step < end:
                next_request, next_start, next_stop = self.seek(lengths, next_step, next_request, next_start, next_stop)
                coord = self.look_up(tables, next_request * table_stride, next_step - next_start)
            coords.append(coord)
            next_step += warps
        for stage in cutlass.range_constexpr(stages - 1):
            if begin + warp + stage * warps < end:
                self.issue(load, boxes, slots, arrived, first_slot + stage, coords[stage])
        next_coord = coords[stages - 1]
        next_step -= warps

        clear_empty(shape, to, lengths, num_reqs, part, num_parts)

        queries = cute.make_rmem_tensor(shape.head_dim // 4, Int32)
        acc = cute.make_rmem_tensor(shape.head_dim // 2, Float32)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        slot, spare, phase = first_slot, first_slot + (stages - 1), Int32(0)
        step = begin + warp
        position = begin
        while position < end:
            until = cutlass.min(stop, end)
            if until > position:
                length = lengths[request]
                load_queries(shape, queries, q, request * q_stride + kv_head * shape.group * shape.head_dim, lane)
                acc.fill(0.0)
                row_sum.fill(0.0)
                row_max.fill(-Float32.inf)
                while step < until:
                    if next_step < end:
                        self.issue(load, boxes, slots, arrived, spare, next_coord)
                        next_step += warps
                        if next_step < end:
                            next_request, next_start, next_stop = self.seek(
                                lengths, next_step, next_request, next_start, next_stop
                            )
                            next_coord = self.look_up(tables, next_request * table_stride, next_step - next_start)
                    arch.mbarrier_wait(arrived + slot, phase)
                    left = length - (step - start) * step_size
                    attend(
                        shape, queries, acc, row_max, row_sum, base + slot * shape.slot_bytes, left, lane, scale_log2
                    )
                    arch.sync_warp()
                    spare = slot
                    slot += 1
                    if slot == first_slot + stages:
                        slot = first_slot
                        phase ^= 1
                    step += warps
                finish(
                    shape,
                    to,
                    acc,
                    row_max,
                    row_sum,
                    base + spare * shape.slot_bytes,
                    request,
                    position == start,
                    until == stop,
                    part,
                    start // part_size,
                    (stop - 1) // part_size,
                )
            position = until
            if position < end:
                request += 1
                start = stop
                stop += self.num_steps(lengths[request])

    def num_steps(self, length):
        """Steps of a request of `length` tokens."""
        return (length + (self.shape.tiling.step - 1)) >> (self.shape.tiling.step.bit_length() - 1)

    @cute.jit
    def find_part(self, lengths: cute.Tensor, num_reqs: Int32, num_parts: Int32, part: Int32, lane: Int32):
        """(steps of a part, where this one begins and ends, the request it begins in, where that begins and ends)."""
        per_lane = (num_reqs + (WARP - 1)) >> 5
        first = lane * per_lane
        count = Int32(0)
        for i in cutlass.range(per_lane, unroll=8):
            # Read within bounds, and count only what is the lane's: without a branch the loads overlap.
            steps = self.num_steps(lengths[cutlass.min(first + i, num_reqs - 1)])
            count += steps * Int32(first + i < num_reqs)
        last = count
        for i in cutlass.range_constexpr(5):
            below = arch.shuffle_sync_up(last, 1 << i)
            last += below * Int32(lane >= 1 << i)
        total = arch.shuffle_sync(last, WARP - 1)
        # Below a step a warp a part would cost more to merge than it gains.
        size = cutlass.max((total + num_parts - 1) // num_parts, Int32(self.shape.tiling.warps))
        begin = part * size
        end = cutlass.min(begin + size, total)
        owner = cutlass.min(arch.popc(arch.vote_ballot_sync(last <= begin)), Int32(WARP - 1))
        request = arch.shuffle_sync(first, owner)
        start = arch.shuffle_sync(last - count, owner)
        stop = start
        if begin < end:
            stop += self.num_steps(lengths[request])
            request, start, stop = self.seek(lengths, begin, request, start, stop)
        return size, begin, end, request, start, stop

    @cute.jit
    def seek(self, lengths: cute.Tensor, step: Int32, request: Int32, start: Int32, stop: Int32):
        """The request that `step` belongs to, its first step and the next one's, from those of an earlier request."""
        while step >= stop:
            request += 1
            start = stop
            stop += self.num_steps(lengths[request])
        return request, start, stop

    def look_up(self, tables, row, index):
        """Where in the cache, counted in steps, step `index` of the request with table `row` lies."""
        page = tables[row + (index >> (self.steps_per_page.bit_length() - 1))]
        return page * self.steps_per_page + (index & (self.steps_per_page - 1))

    def issue(self, load, boxes, slots, arrived, slot, coord):
        """Start the copy of one step into `slot`."""
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(arrived + slot, self.shape.slot_bytes)
        cute.copy(load, boxes[(None, coord)], slots[(None, slot)], tma_bar_ptr=arrived + slot)
