"""The CuTe DSL kernel of paged decode: one query per request; the bulk copy engine (TMA) loads keys and values.

A step is 16 consecutive tokens of one page for one head; one warp computes it and loads it into its own ring in shared
memory. The steps of all requests are cut into equal parts, one per CTA of a key-value head (Osama et al. 2023). A CTA's
warps take its steps in turn and synchronise only where a request ends.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from nanovllm_kernels.attention.gqa import cute_ptx, cute_tile, cute_tile_fp8
from nanovllm_kernels.attention.gqa.cute_merge import Exchange, clear_empty, finish
from nanovllm_kernels.attention.gqa.cute_tile import STEP, TILE_ROWS, WARP, Shape

STEP_SHIFT = STEP.bit_length() - 1


@dataclass(frozen=True)
class Loader:
    """What a warp needs to load keys and values.

    boxes: the cache of this key-value head, indexed in steps.
    slots, arrived: the CTA's rings and their barriers, indexed in steps; the warp's begin at `first_slot`.
    end: the step after the CTA's last.
    scales: the scales of this head in an FP8 cache.
    scale_ring: shared address of the ring of scales.
    """

    load: cute.CopyAtom
    boxes: cute.Tensor
    slots: cute.Tensor
    arrived: cute.Pointer
    first_slot: Int32
    tables: cute.Tensor
    table_stride: Int32
    lengths: cute.Tensor
    end: Int32
    scales: cute.Pointer
    scale_ring: Int32
    num_kv_heads: Int32


class DecodeKernel:
    """The kernel of `cute_decode.paged_decode`, which documents the arguments."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.page_shift = (shape.page_size // STEP).bit_length() - 1

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv_cache: cute.Pointer,
        kv_scales: cute.Pointer,
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
        """Launch one CTA per key-value head and part."""
        shape = self.shape
        head, heads = shape.head_dim, num_kv_heads * shape.head_dim
        # Modes: token, element (in rows of shared memory), key or value, head.
        cache = cute.make_tensor(
            kv_cache,
            cute.make_layout(
                (num_slots, (shape.row_dim, shape.halves), 2, num_kv_heads),
                stride=(2 * heads, (1, shape.row_dim), heads, head),
            ),
        )
        swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, shape.cached)
        ring = cute.tile_to_shape(swizzled, (STEP, head, 2, shape.stages * shape.warps), order=(0, 1, 2, 3))
        load, cache = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cache,
            cute.select(ring, mode=[0, 1, 2]),
            (STEP, (shape.row_dim, shape.halves), 2),
        )
        self.kernel(
            load,
            cache,
            ring,
            kv_scales,
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
            block=[shape.warps * WARP, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            # Programmatic dependent launch: CTAs set up while the previous kernel ends.
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        cache: cute.Tensor,
        ring_layout: cute.ComposedLayout,
        kv_scales: cute.Pointer,
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
        """Compute one part of the steps of one key-value head. Grid: key-value heads x parts."""
        shape = self.shape
        kv_head, part, _ = arch.block_idx()
        warp = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()

        smem = SmemAllocator()
        ring = smem.allocate_tensor(shape.cached, ring_layout.outer, 1024, ring_layout.inner)
        arrived = smem.allocate_array(Int64, shape.warps * shape.stages)
        scale_ring = Int32(0)
        if cutlass.const_expr(shape.quantized):
            words = cute.make_layout(shape.warps * shape.stages * shape.scale_bytes // 4)
            scale_ring = Int32(smem.allocate_tensor(Int32, words, 16).iterator.toint())
        to = Exchange(
            out,
            partial,
            stats,
            counters,
            num_parts,
            num_kv_heads,
            kv_head,
            row_stats=smem.allocate_tensor(Float32, cute.make_layout(shape.warps * 2 * TILE_ROWS)),
            places=smem.allocate_tensor(Int32, cute.make_layout(shape.warps + 1)),
            thread=arch.thread_idx()[0],
            warp=warp,
            lane=lane,
        )
        boxes = cute.local_tile(cache, (STEP, (shape.row_dim, shape.halves), 2), (None, 0, 0, kv_head))
        slots, boxes = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(ring, 0, 3), cute.group_modes(boxes, 0, 3)
        )
        ring_base = Int32(ring.iterator.toint())
        first_slot = warp * shape.stages
        self.open_ring(load, arrived, first_slot, warp)
        arch.griddepcontrol_launch_dependents()
        # The kernel must not access global memory before this wait.
        arch.griddepcontrol_wait()

        part_size, begin, end, request, start, stop = self.find_part(lengths, num_reqs, num_parts, part, lane)
        loader = Loader(
            load,
            boxes,
            slots,
            arrived,
            first_slot,
            tables,
            table_stride,
            lengths,
            end,
            kv_scales + kv_head * shape.page_size,
            scale_ring,
            num_kv_heads,
        )
        step = begin + warp
        ahead = self.fill_ring(loader, step, request, start, stop)
        next_coord, next_step, next_request, next_start, next_stop = ahead
        clear_empty(shape, to, lengths, num_reqs, part)

        queries = cute.make_rmem_tensor(shape.head_dim // 4, Int32)
        acc = cute.make_rmem_tensor(shape.head_dim // 2, Float32)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        slot, spare, phase = first_slot, first_slot + (shape.stages - 1), Int32(0)
        position = begin
        while position < end:
            until = cutlass.min(stop, end)
            if until > position:
                length = lengths[request]
                offset = request * q_stride + kv_head * shape.group * shape.head_dim
                scale = self.load_queries(queries, q, offset, lane, scale_log2)
                acc.fill(0.0)
                row_sum.fill(0.0)
                row_max.fill(-Float32.inf)
                while step < until:
                    # The previous step's slot is free: refill it.
                    next_coord, next_step, next_request, next_start, next_stop = self.refill(
                        loader, spare, next_coord, next_step, next_request, next_start, next_stop
                    )
                    arch.mbarrier_wait(arrived + slot, phase)
                    base, left = ring_base + slot * shape.slot_bytes, length - (step - start) * STEP
                    scales = scale_ring + slot * shape.scale_bytes
                    self.attend(queries, acc, row_max, row_sum, base, scales, left, lane, scale)
                    arch.sync_warp()
                    spare = slot
                    slot += 1
                    if slot == first_slot + shape.stages:
                        slot = first_slot
                        phase ^= 1
                    step += shape.warps
                whole = position == start and until == stop
                first_part, last_part = start // part_size, (stop - 1) // part_size
                spare_base = ring_base + spare * shape.slot_bytes
                finish(shape, to, acc, row_max, row_sum, spare_base, request, whole, part, first_part, last_part)
            position = until
            if position < end:
                request += 1
                start = stop
                stop += self.num_steps(lengths[request])

    @cute.jit
    def open_ring(self, load: cute.CopyAtom, arrived: cute.Pointer, first_slot: Int32, warp: Int32):
        """Initialise the warp's barriers."""
        if warp == 0:
            cpasync.prefetch_descriptor(load)
        with arch.elect_one():
            for stage in cutlass.range_constexpr(self.shape.stages):
                arch.mbarrier_init(arrived + first_slot + stage, 1)
            arch.mbarrier_init_fence()
        arch.sync_warp()

    @cute.jit
    def find_part(self, lengths: cute.Tensor, num_reqs: Int32, num_parts: Int32, part: Int32, lane: Int32):
        """Return (steps per part, this part's begin and end, its first request, that request's begin and end)."""
        per_lane = (num_reqs + (WARP - 1)) >> 5
        first = lane * per_lane
        count = Int32(0)
        for i in cutlass.range(per_lane, unroll=8):
            # Clamp the index and mask the count instead of branching, so that the loads overlap.
            steps = self.num_steps(lengths[cutlass.min(first + i, num_reqs - 1)])
            count += steps * Int32(first + i < num_reqs)
        last = count
        for i in cutlass.range_constexpr(5):
            below = arch.shuffle_sync_up(last, 1 << i)
            last += below * Int32(lane >= 1 << i)
        total = arch.shuffle_sync(last, WARP - 1)
        # Parts smaller than one step per warp would cost more to merge than they save.
        size = cutlass.max((total + num_parts - 1) // num_parts, Int32(self.shape.warps))
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
    def fill_ring(self, loader: cutlass.Constexpr, step: Int32, request: Int32, start: Int32, stop: Int32):
        """Fill all slots of the warp's ring but one, from its first step. Returns the state that `refill` continues."""
        # Look up all pages first, so that these loads overlap.
        stages = self.shape.stages
        coords = []
        for stage in cutlass.range_constexpr(stages):
            coord = Int32(0)
            if step + stage * self.shape.warps < loader.end:
                request, start, stop = self.seek(loader.lengths, step + stage * self.shape.warps, request, start, stop)
                coord = self.look_up(loader, request, step + stage * self.shape.warps - start)
            coords.append(coord)
        for stage in cutlass.range_constexpr(stages - 1):
            if step + stage * self.shape.warps < loader.end:
                self.issue(loader, loader.first_slot + stage, coords[stage])
        return coords[stages - 1], step + (stages - 1) * self.shape.warps, request, start, stop

    @cute.jit
    def refill(
        self,
        loader: cutlass.Constexpr,
        slot: Int32,
        coord: Int32,
        step: Int32,
        request: Int32,
        start: Int32,
        stop: Int32,
    ):
        """Start the copy of `step`, at `coord` in the cache, into `slot`, and look up the warp's next step."""
        if step < loader.end:
            self.issue(loader, slot, coord)
            step += self.shape.warps
            if step < loader.end:
                request, start, stop = self.seek(loader.lengths, step, request, start, stop)
                coord = self.look_up(loader, request, step - start)
        return coord, step, request, start, stop

    @cute.jit
    def seek(self, lengths: cute.Tensor, step: Int32, request: Int32, start: Int32, stop: Int32):
        """Return the request that contains `step`, its first step and the next request's, starting at `request`."""
        while step >= stop:
            request += 1
            start = stop
            stop += self.num_steps(lengths[request])
        return request, start, stop

    def load_queries(self, queries, q, offset, lane, scale_log2):
        """Load a group's queries. Returns the factor for their products with keys, in base 2."""
        if self.shape.quantized:
            return scale_log2 * cute_tile_fp8.load_queries(self.shape, queries, q, offset, lane)
        cute_tile.load_queries(self.shape, queries, q, offset, lane)
        return scale_log2

    def attend(self, queries, acc, row_max, row_sum, base, scales, left, lane, scale):
        """Accumulate one step into the running softmax."""
        if self.shape.quantized:
            cute_tile_fp8.attend(self.shape, queries, acc, row_max, row_sum, base, scales, left, lane, scale)
        else:
            cute_tile.attend(self.shape, queries, acc, row_max, row_sum, base, left, lane, scale)

    def num_steps(self, length):
        """Return the number of steps of a request of `length` tokens."""
        return (length + (STEP - 1)) >> STEP_SHIFT

    def look_up(self, loader, request, index):
        """Return the position in the cache, in steps, of step `index` of a request."""
        page = loader.tables[request * loader.table_stride + (index >> self.page_shift)]
        return (page << self.page_shift) + (index & ((1 << self.page_shift) - 1))

    def issue(self, loader, slot, coord):
        """Start the copy of the step at `coord`, and of its FP8 scales, into `slot`."""
        shape = self.shape
        barrier = loader.arrived + slot
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(barrier, shape.slot_bytes + shape.scale_bytes)
            if shape.quantized:
                page, index = coord >> self.page_shift, coord & ((1 << self.page_shift) - 1)
                keys = loader.scales + (page * (2 * loader.num_kv_heads * shape.page_size) + index * STEP)
                target, at = loader.scale_ring + slot * shape.scale_bytes, Int32(barrier.toint())
                cute_ptx.copy_16_bytes(target, keys, at)
                cute_ptx.copy_16_bytes(target + STEP, keys + loader.num_kv_heads * shape.page_size, at)
        cute.copy(loader.load, loader.boxes[(None, coord)], loader.slots[(None, slot)], tma_bar_ptr=barrier)
