"""Computes paged decode in the CuTe DSL, for few queries per request. The bulk copy engine (TMA) loads keys and values.

A request here is a tile of consecutive queries of one of the step's requests, see `cute_decode`.

A step is 16 consecutive tokens of one page for one key-value head. Each warp loads its steps into a ring buffer in
shared memory, and computes them. For each key-value head, the steps of all requests are cut into equal parts, one per
CTA (Osama et al. 2023). The warps of a CTA take the CTA's steps in turn, and synchronise only where a request ends.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from nanovllm_kernels.attention.gqa import cute_ptx, cute_tile, cute_tile_fp8
from nanovllm_kernels.attention.gqa.cute_merge import ResultExchange, clear_empty_requests, merge_request
from nanovllm_kernels.attention.gqa.cute_tile import (
    NO_SCORE,
    STEP_TOKENS,
    TILE_ROWS,
    WARP_SIZE,
    DecodeShape,
    QueryTile,
)

LOG2_STEP_TOKENS = STEP_TOKENS.bit_length() - 1


@dataclass(frozen=True)
class StepLoader:
    """Holds what a warp needs to load its steps. A slot of a ring buffer holds one step.

    copy_atom: descriptor of the bulk copy of a step's keys and values.
    cache_steps: the cache of this key-value head. The last index is a position in the cache, counted in steps.
    ring_slots: slots of all ring buffers of the CTA. The warp's slots begin at `first_ring_slot`.
    barriers: one barrier per slot.
    block_tables: page numbers. The table of request b begins at b // `tiles_per_table` * `table_stride`.
    end_step: the step after the CTA's last step.
    scales_ptr: pointer to this head's first key scale in an FP8 cache.
    scale_ring_address: address in shared memory of the CTA's ring buffers for scales.
    """

    copy_atom: cute.CopyAtom
    cache_steps: cute.Tensor
    ring_slots: cute.Tensor
    barriers: cute.Pointer
    first_ring_slot: Int32
    block_tables: cute.Tensor
    table_stride: Int32
    tiles_per_table: Int32
    seq_lens: cute.Tensor
    end_step: Int32
    scales_ptr: cute.Pointer
    scale_ring_address: Int32
    num_kv_heads: Int32


class DecodeKernel:
    """The kernel of `cute_decode.paged_decode`, which describes the arguments."""

    def __init__(self, shape: DecodeShape):
        self.shape = shape
        # log2 of the number of steps per page.
        self.page_shift = (shape.page_size // STEP_TOKENS).bit_length() - 1

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv_cache: cute.Pointer,
        kv_scales: cute.Pointer,
        block_tables: cute.Pointer,
        seq_lens: cute.Pointer,
        tiles: cute.Pointer,
        out: cute.Pointer,
        partial_out: cute.Pointer,
        partial_stats: cute.Pointer,
        counters: cute.Pointer,
        num_reqs: Int32,
        num_cache_slots: Int32,
        num_kv_heads: Int32,
        q_stride: Int32,
        table_stride: Int32,
        tiles_per_table: Int32,
        num_parts: Int32,
        scale_log2: Float32,
        stream: cuda.CUstream,
    ):
        """Launch one CTA per key-value head and part."""
        shape = self.shape
        head_stride, kv_stride = shape.head_dim, num_kv_heads * shape.head_dim
        # The tensor's modes (dimensions): token, element (split into rows of shared memory), key or value, head.
        cache = cute.make_tensor(
            kv_cache,
            cute.make_layout(
                (num_cache_slots, (shape.row_elements, shape.rows_per_token), 2, num_kv_heads),
                stride=(2 * kv_stride, (1, shape.row_elements), kv_stride, head_stride),
            ),
        )
        row_layout = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, shape.cache_dtype)
        ring_layout = cute.tile_to_shape(
            row_layout, (STEP_TOKENS, head_stride, 2, shape.num_stages * shape.num_warps), order=(0, 1, 2, 3)
        )
        copy_atom, cache = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cache,
            cute.select(ring_layout, mode=[0, 1, 2]),
            (STEP_TOKENS, (shape.row_elements, shape.rows_per_token), 2),
        )
        self.kernel(
            copy_atom,
            cache,
            ring_layout,
            kv_scales,
            q,
            cute.make_tensor(block_tables, cute.make_layout(num_reqs * table_stride)),
            cute.make_tensor(seq_lens, cute.make_layout(num_reqs)),
            cute.make_tensor(tiles, cute.make_layout(2 * num_reqs)),
            out,
            partial_out,
            partial_stats,
            counters,
            num_reqs,
            num_kv_heads,
            q_stride,
            table_stride,
            tiles_per_table,
            num_parts,
            scale_log2,
        ).launch(
            grid=[num_kv_heads, num_parts, 1],
            block=[shape.num_warps * WARP_SIZE, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            # Programmatic dependent launch: CTAs begin their setup before the previous kernel ends.
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        copy_atom: cute.CopyAtom,
        cache: cute.Tensor,
        ring_layout: cute.ComposedLayout,
        kv_scales: cute.Pointer,
        q: cute.Pointer,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        tiles: cute.Tensor,
        out: cute.Pointer,
        partial_out: cute.Pointer,
        partial_stats: cute.Pointer,
        counters: cute.Pointer,
        num_reqs: Int32,
        num_kv_heads: Int32,
        q_stride: Int32,
        table_stride: Int32,
        tiles_per_table: Int32,
        num_parts: Int32,
        scale_log2: Float32,
    ):
        """Compute one part of the steps of one key-value head. Grid: key-value heads x parts.

        Steps are numbered across all requests. A request has the steps `request_begin` to `request_end` - 1. Variables
        `next_*` describe the step that the warp copies next. `next_index` is this step's index in the cache.
        """
        shape = self.shape
        kv_head, part, _ = arch.block_idx()
        warp = arch.make_warp_uniform(arch.warp_idx())
        lane = arch.lane_idx()

        smem = SmemAllocator()
        ring = smem.allocate_tensor(shape.cache_dtype, ring_layout.outer, 1024, ring_layout.inner)
        barriers = smem.allocate_array(Int64, shape.num_warps * shape.num_stages)
        scale_ring_address = Int32(0)
        if cutlass.const_expr(shape.is_fp8):
            scales_layout = cute.make_layout(shape.num_warps * shape.num_stages * shape.scale_bytes // 4)
            scale_ring_address = Int32(smem.allocate_tensor(Int32, scales_layout, 16).iterator.toint())
        exchange = ResultExchange(
            out,
            partial_out,
            partial_stats,
            counters,
            num_parts,
            num_kv_heads,
            kv_head,
            row_stats=smem.allocate_tensor(Float32, cute.make_layout(shape.num_warps * 2 * TILE_ROWS)),
            row_addresses=smem.allocate_tensor(Int32, cute.make_layout(shape.num_warps + 1)),
            thread=arch.thread_idx()[0],
            warp=warp,
            lane=lane,
        )
        cache_steps = cute.local_tile(
            cache, (STEP_TOKENS, (shape.row_elements, shape.rows_per_token), 2), (None, 0, 0, kv_head)
        )
        ring_slots, cache_steps = cpasync.tma_partition(
            copy_atom, 0, cute.make_layout(1), cute.group_modes(ring, 0, 3), cute.group_modes(cache_steps, 0, 3)
        )
        ring_base = Int32(ring.iterator.toint())
        first_ring_slot = warp * shape.num_stages
        self.init_ring(copy_atom, barriers, first_ring_slot, warp)
        arch.griddepcontrol_launch_dependents()
        # The kernel must not access global memory before this wait.
        arch.griddepcontrol_wait()

        part_size, part_begin, part_end, request, request_begin, request_end = self.find_part(
            seq_lens, num_reqs, num_parts, part, lane
        )
        loader = StepLoader(
            copy_atom,
            cache_steps,
            ring_slots,
            barriers,
            first_ring_slot,
            block_tables,
            table_stride,
            tiles_per_table,
            seq_lens,
            part_end,
            kv_scales + kv_head * shape.page_size,
            scale_ring_address,
            num_kv_heads,
        )
        step = part_begin + warp
        next_index, next_step, next_request, next_begin, next_end = self.fill_ring(
            loader, step, request, request_begin, request_end
        )
        if cutlass.const_expr(not shape.has_tiles):
            clear_empty_requests(shape, exchange, seq_lens, num_reqs, part)

        queries = cute.make_rmem_tensor(shape.head_dim // 4, Int32)
        acc = cute.make_rmem_tensor(shape.head_dim // 2, Float32)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        # `ring_slot` holds the warp's current step, `spare_slot` is free, `phase` is the barrier parity to wait for.
        ring_slot, spare_slot, phase = first_ring_slot, first_ring_slot + (shape.num_stages - 1), Int32(0)
        request_part_begin = part_begin
        while request_part_begin < part_end:
            request_part_end = cutlass.min(request_end, part_end)
            if request_part_end > request_part_begin:
                seq_len = seq_lens[request]
                first_token, num_queries = self.load_tile(tiles, request)
                query_offset = first_token * q_stride + kv_head * shape.group_size * shape.head_dim
                scale = self.load_queries(queries, q, query_offset, q_stride, num_queries, lane, scale_log2)
                acc.fill(0.0)
                row_sum.fill(0.0)
                row_max.fill(NO_SCORE)
                while step < request_part_end:
                    # `spare_slot` held the warp's previous step.
                    next_index, next_step, next_request, next_begin, next_end = self.refill_slot(
                        loader, spare_slot, next_index, next_step, next_request, next_begin, next_end
                    )
                    arch.mbarrier_wait(barriers + ring_slot, phase)
                    step_address = ring_base + ring_slot * shape.slot_bytes
                    num_valid = seq_len - (step - request_begin) * STEP_TOKENS
                    scales_address = scale_ring_address + ring_slot * shape.scale_bytes
                    self.attend(
                        queries,
                        acc,
                        row_max,
                        row_sum,
                        step_address,
                        scales_address,
                        num_valid,
                        num_queries,
                        lane,
                        scale,
                    )
                    arch.sync_warp()
                    spare_slot = ring_slot
                    ring_slot += 1
                    if ring_slot == first_ring_slot + shape.num_stages:
                        ring_slot = first_ring_slot
                        phase ^= 1
                    step += shape.num_warps
                is_whole = request_part_begin == request_begin and request_part_end == request_end
                first_part, last_part = request_begin // part_size, (request_end - 1) // part_size
                spare_address = ring_base + spare_slot * shape.slot_bytes
                merge_request(
                    shape,
                    exchange,
                    acc,
                    row_max,
                    row_sum,
                    spare_address,
                    request,
                    first_token,
                    num_queries,
                    is_whole,
                    part,
                    first_part,
                    last_part,
                )
            request_part_begin = request_part_end
            if request_part_begin < part_end:
                request += 1
                request_begin = request_end
                request_end += self.count_steps(seq_lens[request])

    @cute.jit
    def init_ring(self, copy_atom: cute.CopyAtom, barriers: cute.Pointer, first_ring_slot: Int32, warp: Int32):
        """Initialise the warp's barriers."""
        if warp == 0:
            cpasync.prefetch_descriptor(copy_atom)
        with arch.elect_one():
            for stage in cutlass.range_constexpr(self.shape.num_stages):
                arch.mbarrier_init(barriers + first_ring_slot + stage, 1)
            arch.mbarrier_init_fence()
        arch.sync_warp()

    @cute.jit
    def find_part(self, seq_lens: cute.Tensor, num_reqs: Int32, num_parts: Int32, part: Int32, lane: Int32):
        """Return (steps per part, part's first step, part's end, first request, request's first step, request's end).

        Each lane counts the steps of an equal number of requests. Every end is the step after the last step.
        """
        requests_per_lane = (num_reqs + (WARP_SIZE - 1)) >> 5
        first_request = lane * requests_per_lane
        lane_steps = Int32(0)
        for i in cutlass.range(requests_per_lane, unroll=8):
            # Clamp the index and mask the count instead of branching, so that the loads overlap.
            request_steps = self.count_steps(seq_lens[cutlass.min(first_request + i, num_reqs - 1)])
            lane_steps += request_steps * Int32(first_request + i < num_reqs)
        steps_up_to_lane = lane_steps
        for i in cutlass.range_constexpr(5):
            lower_steps = arch.shuffle_sync_up(steps_up_to_lane, 1 << i)
            steps_up_to_lane += lower_steps * Int32(lane >= 1 << i)
        total_steps = arch.shuffle_sync(steps_up_to_lane, WARP_SIZE - 1)
        # Parts with less than one step per warp would cost more time in merges than such parts save.
        part_size = cutlass.max((total_steps + num_parts - 1) // num_parts, Int32(self.shape.num_warps))
        part_begin = part * part_size
        part_end = cutlass.min(part_begin + part_size, total_steps)
        owner_lane = cutlass.min(arch.popc(arch.vote_ballot_sync(steps_up_to_lane <= part_begin)), Int32(WARP_SIZE - 1))
        request = arch.shuffle_sync(first_request, owner_lane)
        request_begin = arch.shuffle_sync(steps_up_to_lane - lane_steps, owner_lane)
        request_end = request_begin
        if part_begin < part_end:
            request_end += self.count_steps(seq_lens[request])
            request, request_begin, request_end = self.find_request(
                seq_lens, part_begin, request, request_begin, request_end
            )
        return part_size, part_begin, part_end, request, request_begin, request_end

    @cute.jit
    def fill_ring(self, loader: cutlass.Constexpr, step: Int32, request: Int32, begin: Int32, end: Int32):
        """Start to copy the warp's steps from `step` on, into all slots but one. Return arguments for `refill_slot`."""
        # A cache index is a position in the cache, counted in steps. Look up all indexes first, so that loads overlap.
        num_stages = self.shape.num_stages
        cache_indexes = []
        for stage in cutlass.range_constexpr(num_stages):
            cache_index = Int32(0)
            if step + stage * self.shape.num_warps < loader.end_step:
                request, begin, end = self.find_request(
                    loader.seq_lens, step + stage * self.shape.num_warps, request, begin, end
                )
                cache_index = self.look_up_step(loader, request, step + stage * self.shape.num_warps - begin)
            cache_indexes.append(cache_index)
        for stage in cutlass.range_constexpr(num_stages - 1):
            if step + stage * self.shape.num_warps < loader.end_step:
                self.start_copy(loader, loader.first_ring_slot + stage, cache_indexes[stage])
        return (cache_indexes[num_stages - 1], step + (num_stages - 1) * self.shape.num_warps, request, begin, end)

    @cute.jit
    def refill_slot(
        self,
        loader: cutlass.Constexpr,
        ring_slot: Int32,
        cache_index: Int32,
        step: Int32,
        request: Int32,
        begin: Int32,
        end: Int32,
    ):
        """Start copying `step`, which is at `cache_index`, into `ring_slot`. Look up the warp's next step."""
        if step < loader.end_step:
            self.start_copy(loader, ring_slot, cache_index)
            step += self.shape.num_warps
            if step < loader.end_step:
                request, begin, end = self.find_request(loader.seq_lens, step, request, begin, end)
                cache_index = self.look_up_step(loader, request, step - begin)
        return cache_index, step, request, begin, end

    @cute.jit
    def find_request(self, seq_lens: cute.Tensor, step: Int32, request: Int32, begin: Int32, end: Int32):
        """Return (request that contains `step`, begin and end of this request). Search from `request` on."""
        while step >= end:
            request += 1
            begin = end
            end += self.count_steps(seq_lens[request])
        return request, begin, end

    def load_tile(self, tiles, request):
        """Return (row of the request's first query, number of queries)."""
        if self.shape.has_tiles:
            return tiles[2 * request], tiles[2 * request + 1]
        return request, Int32(1)

    def load_queries(self, queries, q, offset, token_stride, num_queries, lane, scale_log2):
        """Load the queries of one key-value head. Return the factor of query-key products, for scores in base 2."""
        tile = QueryTile(q, offset, token_stride, num_queries)
        if self.shape.is_fp8:
            return scale_log2 * cute_tile_fp8.load_queries(self.shape, queries, tile, lane)
        cute_tile.load_queries(self.shape, queries, tile, lane)
        return scale_log2

    def attend(self, queries, acc, row_max, row_sum, step_address, scales_address, num_valid, num_queries, lane, scale):
        """Accumulate one step into the running softmax, see `cute_tile.attend`."""
        state = queries, acc, row_max, row_sum, step_address
        if self.shape.is_fp8:
            cute_tile_fp8.attend(self.shape, *state, scales_address, num_valid, num_queries, lane, scale)
        else:
            cute_tile.attend(self.shape, *state, num_valid, num_queries, lane, scale)

    def count_steps(self, seq_len):
        """Return the number of steps of a request of `seq_len` tokens."""
        return (seq_len + (STEP_TOKENS - 1)) >> LOG2_STEP_TOKENS

    def look_up_step(self, loader, request, request_step):
        """Return a request's step as an index in the cache, counted in steps."""
        table = request // loader.tiles_per_table if self.shape.has_tiles else request
        page = loader.block_tables[table * loader.table_stride + (request_step >> self.page_shift)]
        return (page << self.page_shift) + (request_step & ((1 << self.page_shift) - 1))

    def start_copy(self, loader, ring_slot, cache_index):
        """Start the copy of the step at `cache_index`, and of its FP8 scales, into `ring_slot`."""
        shape = self.shape
        barrier = loader.barriers + ring_slot
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(barrier, shape.slot_bytes + shape.scale_bytes)
            if shape.is_fp8:
                page, page_step = cache_index >> self.page_shift, cache_index & ((1 << self.page_shift) - 1)
                scales = loader.scales_ptr + (
                    page * (2 * loader.num_kv_heads * shape.page_size) + page_step * STEP_TOKENS
                )
                address = loader.scale_ring_address + ring_slot * shape.scale_bytes
                barrier_address = Int32(barrier.toint())
                cute_ptx.copy_16_bytes_async(address, scales, barrier_address)
                cute_ptx.copy_16_bytes_async(
                    address + STEP_TOKENS, scales + loader.num_kv_heads * shape.page_size, barrier_address
                )
        cute.copy(
            loader.copy_atom,
            loader.cache_steps[(None, cache_index)],
            loader.ring_slots[(None, ring_slot)],
            tma_bar_ptr=barrier,
        )
