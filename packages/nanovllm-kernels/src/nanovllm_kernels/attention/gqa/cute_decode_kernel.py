"""Computes paged decode in the CuTe DSL, for few queries per request. The bulk copy engine (TMA) loads keys and values.

A tile holds consecutive queries of one request (see `cute_decode`). A tile's length is the number of tokens that the
tile's last query sees. A slice is 16 consecutive tokens of one page, for one key-value head.

Each warp loads its slices into a ring buffer in shared memory, and computes attention over each slice. For each
key-value head, the slices of all tiles are cut into equal parts, one per CTA (Osama et al. 2023). The warps of a CTA
take the CTA's slices in turn, and synchronise only where a tile ends.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from nanovllm_kernels.attention.gqa import cute_ptx, cute_tile, cute_tile_fp8
from nanovllm_kernels.attention.gqa.cute_merge import ResultExchange, clear_empty_tiles, merge_tile
from nanovllm_kernels.attention.gqa.cute_tile import (
    NO_SCORE,
    SLICE_TOKENS,
    TILE_ROWS,
    WARP_SIZE,
    DecodeShape,
    QueryTile,
)

LOG2_SLICE_TOKENS = SLICE_TOKENS.bit_length() - 1


@dataclass(frozen=True)
class SliceLoader:
    """Holds the arguments with which a warp loads its slices. A slot of a ring buffer holds one slice.

    copy_atom: descriptor of the bulk copy of a slice's keys and values.
    cache_slices: the cache of this key-value head. The last index is a position in the cache, counted in slices.
    ring_slots: slots of all ring buffers of the CTA. The warp's slots begin at `first_ring_slot`.
    barriers: one barrier per slot.
    block_tables: page numbers of each request. The table for tile t begins at t // tiles_per_table * table_stride.
    end_slice: index of the CTA's last slice, plus 1. Slices are counted across all tiles.
    scales_ptr: pointer to this head's first key scale in an FP8 cache.
    scale_ring_address: address in shared memory of the CTA's ring buffers for scales.
    """

    copy_atom: cute.CopyAtom
    cache_slices: cute.Tensor
    ring_slots: cute.Tensor
    barriers: cute.Pointer
    first_ring_slot: Int32
    block_tables: cute.Tensor
    table_stride: Int32
    tiles_per_table: Int32
    tile_lens: cute.Tensor
    end_slice: Int32
    scales_ptr: cute.Pointer
    scale_ring_address: Int32
    num_kv_heads: Int32


class DecodeKernel:
    """The kernel of `cute_decode.paged_decode`, which describes the arguments."""

    def __init__(self, shape: DecodeShape):
        self.shape = shape
        # log2 of the number of slices per page.
        self.page_shift = (shape.page_size // SLICE_TOKENS).bit_length() - 1

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        kv_cache: cute.Pointer,
        kv_scales: cute.Pointer,
        block_tables: cute.Pointer,
        tile_lens: cute.Pointer,
        tiles: cute.Pointer,
        out: cute.Pointer,
        partial_out: cute.Pointer,
        partial_stats: cute.Pointer,
        counters: cute.Pointer,
        num_tiles: Int32,
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
            row_layout, (SLICE_TOKENS, head_stride, 2, shape.num_stages * shape.num_warps), order=(0, 1, 2, 3)
        )
        copy_atom, cache = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            cache,
            cute.select(ring_layout, mode=[0, 1, 2]),
            (SLICE_TOKENS, (shape.row_elements, shape.rows_per_token), 2),
        )
        self.kernel(
            copy_atom,
            cache,
            ring_layout,
            kv_scales,
            q,
            cute.make_tensor(block_tables, cute.make_layout(num_tiles * table_stride)),
            cute.make_tensor(tile_lens, cute.make_layout(num_tiles)),
            cute.make_tensor(tiles, cute.make_layout(2 * num_tiles)),
            out,
            partial_out,
            partial_stats,
            counters,
            num_tiles,
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
        tile_lens: cute.Tensor,
        tiles: cute.Tensor,
        out: cute.Pointer,
        partial_out: cute.Pointer,
        partial_stats: cute.Pointer,
        counters: cute.Pointer,
        num_tiles: Int32,
        num_kv_heads: Int32,
        q_stride: Int32,
        table_stride: Int32,
        tiles_per_table: Int32,
        num_parts: Int32,
        scale_log2: Float32,
    ):
        """Compute one part of the slices of one key-value head. Grid: key-value heads x parts.

        Slices are numbered across all tiles. A tile has the slices `tile_begin` to `tile_end` - 1. `slice_index` is the
        number of the slice that the warp computes. The variables `next_*` describe the slice that the warp copies next.
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
        cache_slices = cute.local_tile(
            cache, (SLICE_TOKENS, (shape.row_elements, shape.rows_per_token), 2), (None, 0, 0, kv_head)
        )
        ring_slots, cache_slices = cpasync.tma_partition(
            copy_atom, 0, cute.make_layout(1), cute.group_modes(ring, 0, 3), cute.group_modes(cache_slices, 0, 3)
        )
        ring_base = Int32(ring.iterator.toint())
        first_ring_slot = warp * shape.num_stages
        self.init_ring(copy_atom, barriers, first_ring_slot, warp)
        arch.griddepcontrol_launch_dependents()
        # The kernel must not access global memory before this wait.
        arch.griddepcontrol_wait()

        part_size, part_begin, part_end, tile, tile_begin, tile_end = self.find_part(
            tile_lens, num_tiles, num_parts, part, lane
        )
        loader = SliceLoader(
            copy_atom,
            cache_slices,
            ring_slots,
            barriers,
            first_ring_slot,
            block_tables,
            table_stride,
            tiles_per_table,
            tile_lens,
            part_end,
            kv_scales + kv_head * shape.page_size,
            scale_ring_address,
            num_kv_heads,
        )
        slice_index = part_begin + warp
        next_cache_index, next_slice, next_tile, next_tile_begin, next_tile_end = self.fill_ring(
            loader, slice_index, tile, tile_begin, tile_end
        )
        if cutlass.const_expr(not shape.has_tile_list):
            clear_empty_tiles(shape, exchange, tile_lens, num_tiles, part)

        queries = cute.make_rmem_tensor(shape.head_dim // 4, Int32)
        acc = cute.make_rmem_tensor(shape.head_dim // 2, Float32)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        # `ring_slot` holds the warp's current slice, `spare_slot` is free, `phase` is the barrier parity to wait for.
        ring_slot, spare_slot, phase = first_ring_slot, first_ring_slot + (shape.num_stages - 1), Int32(0)
        tile_part_begin = part_begin
        while tile_part_begin < part_end:
            tile_part_end = cutlass.min(tile_end, part_end)
            if tile_part_end > tile_part_begin:
                tile_len = tile_lens[tile]
                first_token, num_queries = self.load_tile(tiles, tile)
                query_offset = first_token * q_stride + kv_head * shape.group_size * shape.head_dim
                scale = self.load_queries(queries, q, query_offset, q_stride, num_queries, lane, scale_log2)
                acc.fill(0.0)
                row_sum.fill(0.0)
                row_max.fill(NO_SCORE)
                while slice_index < tile_part_end:
                    next_cache_index, next_slice, next_tile, next_tile_begin, next_tile_end = self.refill_slot(
                        loader, spare_slot, next_cache_index, next_slice, next_tile, next_tile_begin, next_tile_end
                    )
                    arch.mbarrier_wait(barriers + ring_slot, phase)
                    slice_address = ring_base + ring_slot * shape.slot_bytes
                    num_valid = tile_len - (slice_index - tile_begin) * SLICE_TOKENS
                    scales_address = scale_ring_address + ring_slot * shape.scale_bytes
                    self.attend(
                        queries,
                        acc,
                        row_max,
                        row_sum,
                        slice_address,
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
                    slice_index += shape.num_warps
                is_whole = tile_part_begin == tile_begin and tile_part_end == tile_end
                first_part, last_part = tile_begin // part_size, (tile_end - 1) // part_size
                spare_address = ring_base + spare_slot * shape.slot_bytes
                merge_tile(
                    shape,
                    exchange,
                    acc,
                    row_max,
                    row_sum,
                    spare_address,
                    tile,
                    first_token,
                    num_queries,
                    is_whole,
                    part,
                    first_part,
                    last_part,
                )
            tile_part_begin = tile_part_end
            if tile_part_begin < part_end:
                tile += 1
                tile_begin = tile_end
                tile_end += self.count_slices(tile_lens[tile])

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
    def find_part(self, tile_lens: cute.Tensor, num_tiles: Int32, num_parts: Int32, part: Int32, lane: Int32):
        """Return (slices per part, part's first slice, part's end, first tile, tile's first slice, tile's end).

        Both ends are exclusive.
        """
        tiles_per_lane = (num_tiles + (WARP_SIZE - 1)) >> 5
        first_tile = lane * tiles_per_lane
        lane_slices = Int32(0)
        for i in cutlass.range(tiles_per_lane, unroll=8):
            # Clamp the index and mask the count instead of branching, so that the loads overlap.
            tile_slices = self.count_slices(tile_lens[cutlass.min(first_tile + i, num_tiles - 1)])
            lane_slices += tile_slices * Int32(first_tile + i < num_tiles)
        slices_up_to_lane = lane_slices
        for i in cutlass.range_constexpr(5):
            lower_slices = arch.shuffle_sync_up(slices_up_to_lane, 1 << i)
            slices_up_to_lane += lower_slices * Int32(lane >= 1 << i)
        total_slices = arch.shuffle_sync(slices_up_to_lane, WARP_SIZE - 1)
        # If a part had fewer slices than the CTA has warps, merging would cost more time than the shorter part saves.
        part_size = cutlass.max((total_slices + num_parts - 1) // num_parts, Int32(self.shape.num_warps))
        part_begin = part * part_size
        part_end = cutlass.min(part_begin + part_size, total_slices)
        owner_lane = cutlass.min(
            arch.popc(arch.vote_ballot_sync(slices_up_to_lane <= part_begin)), Int32(WARP_SIZE - 1)
        )
        tile = arch.shuffle_sync(first_tile, owner_lane)
        tile_begin = arch.shuffle_sync(slices_up_to_lane - lane_slices, owner_lane)
        tile_end = tile_begin
        if part_begin < part_end:
            tile_end += self.count_slices(tile_lens[tile])
            tile, tile_begin, tile_end = self.find_tile(tile_lens, part_begin, tile, tile_begin, tile_end)
        return part_size, part_begin, part_end, tile, tile_begin, tile_end

    @cute.jit
    def fill_ring(self, loader: cutlass.Constexpr, slice_index: Int32, tile: Int32, begin: Int32, end: Int32):
        """Start to copy the warp's slices into all slots but one, beginning with `slice_index`.

        Return (cache index of the next slice, next slice, the slice's tile, begin and end of this tile).
        """
        # Look up all indexes first, so that the loads overlap.
        num_stages = self.shape.num_stages
        cache_indexes = []
        for stage in cutlass.range_constexpr(num_stages):
            cache_index = Int32(0)
            if slice_index + stage * self.shape.num_warps < loader.end_slice:
                tile, begin, end = self.find_tile(
                    loader.tile_lens, slice_index + stage * self.shape.num_warps, tile, begin, end
                )
                cache_index = self.look_up_slice(loader, tile, slice_index + stage * self.shape.num_warps - begin)
            cache_indexes.append(cache_index)
        for stage in cutlass.range_constexpr(num_stages - 1):
            if slice_index + stage * self.shape.num_warps < loader.end_slice:
                self.start_copy(loader, loader.first_ring_slot + stage, cache_indexes[stage])
        return (cache_indexes[num_stages - 1], slice_index + (num_stages - 1) * self.shape.num_warps, tile, begin, end)

    @cute.jit
    def refill_slot(
        self,
        loader: cutlass.Constexpr,
        ring_slot: Int32,
        cache_index: Int32,
        slice_index: Int32,
        tile: Int32,
        begin: Int32,
        end: Int32,
    ):
        """Start to copy slice `slice_index` from `cache_index` into `ring_slot`. Look up the warp's next slice."""
        if slice_index < loader.end_slice:
            self.start_copy(loader, ring_slot, cache_index)
            slice_index += self.shape.num_warps
            if slice_index < loader.end_slice:
                tile, begin, end = self.find_tile(loader.tile_lens, slice_index, tile, begin, end)
                cache_index = self.look_up_slice(loader, tile, slice_index - begin)
        return cache_index, slice_index, tile, begin, end

    @cute.jit
    def find_tile(self, tile_lens: cute.Tensor, slice_index: Int32, tile: Int32, begin: Int32, end: Int32):
        """Return (tile that contains `slice_index`, begin and end of this tile). The search begins with `tile`."""
        while slice_index >= end:
            tile += 1
            begin = end
            end += self.count_slices(tile_lens[tile])
        return tile, begin, end

    def load_tile(self, tiles, tile):
        """Return (row of the tile's first query in `q`, number of queries)."""
        if self.shape.has_tile_list:
            return tiles[2 * tile], tiles[2 * tile + 1]
        return tile, Int32(1)

    def load_queries(self, queries, q, offset, token_stride, num_queries, lane, scale_log2):
        """Load the queries of one key-value head. Return the factor from query-key products to base-2 scores."""
        tile = QueryTile(q, offset, token_stride, num_queries)
        if self.shape.is_fp8:
            return scale_log2 * cute_tile_fp8.load_queries(self.shape, queries, tile, lane)
        cute_tile.load_queries(self.shape, queries, tile, lane)
        return scale_log2

    def attend(
        self, queries, acc, row_max, row_sum, slice_address, scales_address, num_valid, num_queries, lane, scale
    ):
        """Add one slice to the running softmax, see `cute_tile.attend`."""
        state = queries, acc, row_max, row_sum, slice_address
        if self.shape.is_fp8:
            cute_tile_fp8.attend(self.shape, *state, scales_address, num_valid, num_queries, lane, scale)
        else:
            cute_tile.attend(self.shape, *state, num_valid, num_queries, lane, scale)

    def count_slices(self, tile_len):
        """Return the number of slices of a tile of `tile_len` tokens."""
        return (tile_len + (SLICE_TOKENS - 1)) >> LOG2_SLICE_TOKENS

    def look_up_slice(self, loader, tile, tile_slice):
        """Return the cache index of a slice. tile_slice: index of the slice within its tile."""
        table = tile // loader.tiles_per_table if self.shape.has_tile_list else tile
        page = loader.block_tables[table * loader.table_stride + (tile_slice >> self.page_shift)]
        return (page << self.page_shift) + (tile_slice & ((1 << self.page_shift) - 1))

    def start_copy(self, loader, ring_slot, cache_index):
        """Start the copy of the slice at `cache_index`, and of its FP8 scales, into `ring_slot`."""
        shape = self.shape
        barrier = loader.barriers + ring_slot
        with arch.elect_one():
            arch.mbarrier_arrive_and_expect_tx(barrier, shape.slot_bytes + shape.scale_bytes)
            if shape.is_fp8:
                page, page_slice = cache_index >> self.page_shift, cache_index & ((1 << self.page_shift) - 1)
                scales = loader.scales_ptr + (
                    page * (2 * loader.num_kv_heads * shape.page_size) + page_slice * SLICE_TOKENS
                )
                address = loader.scale_ring_address + ring_slot * shape.scale_bytes
                barrier_address = Int32(barrier.toint())
                cute_ptx.copy_16_bytes_async(address, scales, barrier_address)
                cute_ptx.copy_16_bytes_async(
                    address + SLICE_TOKENS, scales + loader.num_kv_heads * shape.page_size, barrier_address
                )
        cute.copy(
            loader.copy_atom,
            loader.cache_slices[(None, cache_index)],
            loader.ring_slots[(None, ring_slot)],
            tma_bar_ptr=barrier,
        )
