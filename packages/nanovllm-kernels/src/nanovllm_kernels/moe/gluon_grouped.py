"""Runs grouped products of block FP8 experts with many rows per expert, on Hopper, in Gluon.

One warp per program copies tiles into a ring buffer. Two groups of four warps multiply 64 rows each. While one group
scales and stores sums, the other group multiplies. A row is one (token, expert) pair; pairs are sorted by expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.moe.experts import PackedExperts
from nanovllm_kernels.moe.policy import GLUON_TILE_ROWS, GROUP
from nanovllm_kernels.moe.triton_sort import SortedPairs
from nanovllm_kernels.platform import can_overlap_launches, describe_device
from nanovllm_kernels.triton_fp8 import quantize_groups

# Rows per group of warps, columns per block, and elements of K (the summed dimension) per step. A tile has two blocks
# of columns, left and right.
WARP_GROUP_ROWS, BLOCK_COLUMNS, STEP_DEPTH = GLUON_TILE_ROWS // 2, 128, 128
STAGES = 4  # steps that the ring buffer holds
# Shared memory layout that the tensor cores require.
SHARED_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
# Registers per thread: at launch, in the copying warp, and in the multiplying warps. A thread of a multiplying
# warp needs 192 registers for two sums and a product.
LAUNCH_REGISTERS, COPY_REGISTERS, MULTIPLY_REGISTERS = 168, 24, 240
# Rows and columns that a program of `_gather_rows` copies at once.
GATHER_ROWS, GATHER_BLOCK = 16, 1024


def run_products(
    x: Tensor, x_scales: Tensor, experts: PackedExperts, weights: Tensor, pairs: SortedPairs, pair_results: Tensor
) -> None:
    """For each of `pairs`, write the expert's result times the pair's weight into 16-bit `pair_results` [T k, H].

    x: e4m3 [T, H]. The tiles of `pairs` have GLUON_TILE_ROWS rows.
    """
    num_pairs, hidden_size = pair_results.shape
    intermediate_size = experts.w2.shape[2]
    overlap = can_overlap_launches(x.device)  # programmatic dependent launch
    launch_options = {"OVERLAP": overlap, "launch_pdl": overlap}
    float32_options = {"dtype": torch.float32, "device": x.device}
    rows = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)  # sorted by expert
    # Loads of the last tile's scales may read up to GLUON_TILE_ROWS elements past the last row's scale.
    group_stride = num_pairs + GLUON_TILE_ROWS
    row_scales = torch.empty((hidden_size // GROUP, group_stride), **float32_options)
    hidden = torch.empty((num_pairs, intermediate_size), dtype=x.dtype, device=x.device)  # silu(gate) * up
    hidden_scales = torch.empty((intermediate_size // GROUP, group_stride), **float32_options)
    row_weights = torch.empty(num_pairs, **float32_options)
    _gather_rows[(triton.cdiv(num_pairs, GATHER_ROWS),)](
        x,
        x_scales,
        weights,
        pairs.order,
        rows,
        row_scales,
        row_weights,
        num_pairs,
        group_stride,
        x.stride(0),
        *x_scales.stride(),
        pairs.starts,
        experts.w2.shape[0],
        PARTIAL=experts.is_partial,  # `order` holds only the pairs of this rank
        K=hidden_size,
        TOP_K=weights.shape[1],
        PADDED_GROUPS=triton.next_power_of_2(hidden_size // GROUP),
        ROWS=GATHER_ROWS,
        BLOCK=GATHER_BLOCK,
        num_warps=4,
        **launch_options,
    )
    products = (
        (True, rows, row_scales, experts.w13, experts.scales13, hidden),
        (False, hidden, hidden_scales, experts.w2, experts.scales2, pair_results),
    )
    for gated, x_rows, x_row_scales, weight, scales, result in products:
        num_columns = result.shape[1]
        column_tiles = num_columns // (BLOCK_COLUMNS if gated else 2 * BLOCK_COLUMNS)
        _grouped_product[(min(describe_device(x.device).num_sms, (len(pairs.tiles) - 1) * column_tiles),)](
            _describe_rows(x_rows, WARP_GROUP_ROWS),
            _describe_rows(weight.view(-1, weight.shape[2]), BLOCK_COLUMNS),
            x_row_scales,
            scales,
            *pairs,
            row_weights,
            result,
            hidden_scales,
            group_stride,
            N=num_columns,
            K=x_rows.shape[1],
            GATED=gated,
            STAGES=STAGES,
            MULTIPLY_REGISTERS=MULTIPLY_REGISTERS,
            COPY_REGISTERS=COPY_REGISTERS,
            maxnreg=LAUNCH_REGISTERS,
            num_warps=4,
            **launch_options,
        )


def _describe_rows(matrix: Tensor, num_rows: int) -> TensorDescriptor:
    """Return the matrix's TMA descriptor for copies of `num_rows` rows."""
    return TensorDescriptor.from_tensor(matrix, [num_rows, STEP_DEPTH], SHARED_LAYOUT)


@triton.jit(do_not_specialize=["num_pairs", "group_stride", "num_experts"])
def _gather_rows(
    x_ptr,
    x_scales_ptr,
    weights_ptr,
    order_ptr,  # `SortedPairs.order`
    rows_ptr,
    row_scales_ptr,
    row_weights_ptr,
    num_pairs,
    group_stride,
    x_stride,
    x_scales_stride,
    x_scales_group_stride,  # between the scales of a row's adjacent groups (of 128 elements)
    starts_ptr,  # `SortedPairs.starts`
    num_experts,
    PARTIAL: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copy each pair's row of `x`, the row's scales (stored group by group) and the pair's weight into sorted order."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if PARTIAL:
        num_pairs = tl.load(starts_ptr + num_experts)
        if tl.program_id(0) * ROWS >= num_pairs:
            return
    sorted_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = sorted_rows < num_pairs
    pairs = tl.load(order_ptr + sorted_rows, mask=row_mask, other=0)
    tl.store(row_weights_ptr + sorted_rows, tl.load(weights_ptr + pairs, mask=row_mask), mask=row_mask)
    tokens = pairs // TOP_K
    groups = tl.arange(0, PADDED_GROUPS)[:, None]
    mask = row_mask[None, :] & (groups < K // 128)
    scales = tl.load(
        x_scales_ptr + tokens[None, :] * x_scales_stride + groups * x_scales_group_stride, mask=mask, other=0.0
    )
    tl.store(row_scales_ptr + groups.to(tl.int64) * group_stride + sorted_rows[None, :], scales, mask=mask)
    token_ptrs = x_ptr + tokens[:, None].to(tl.int64) * x_stride
    target_ptrs = rows_ptr + sorted_rows[:, None].to(tl.int64) * K
    for first_k in tl.static_range(0, K, BLOCK):
        ks = first_k + tl.arange(0, BLOCK)[None, :]
        mask = row_mask[:, None] & (ks < K)
        tl.store(target_ptrs + ks, tl.load(token_ptrs + ks, mask=mask, other=0.0), mask=mask)


@gluon.jit(do_not_specialize=["group_stride"])
def _grouped_product(
    x_desc,  # TMA descriptor
    weight_desc,  # TMA descriptor
    x_scales_ptr,
    scales_ptr,
    order_ptr,  # `order_ptr`, `starts_ptr` and `tiles_ptr`: fields of `SortedPairs`
    starts_ptr,
    tiles_ptr,
    row_weights_ptr,
    out_ptr,
    out_scales_ptr,
    group_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """If GATED, write each row's quantised `silu(gate) * up`. If not, write each pair's weighted down projection."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], x_desc.layout)
    weight_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 128, 128], weight_desc.layout)
    # One barrier of each kind per stage. full: copies have arrived. empty: both groups of warps have used the copies.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    rings = (x_ring, weight_ring, full, empty)
    pointers = (x_scales_ptr, scales_ptr, order_ptr, starts_ptr, tiles_ptr, row_weights_ptr, out_ptr, out_scales_ptr)
    copy_sources = (x_desc, weight_desc, starts_ptr, tiles_ptr)
    gl.warp_specialize(
        [
            (_multiply, (rings, pointers, group_stride, N, K, GATED, STAGES, 0)),
            (_multiply, (rings, pointers, group_stride, N, K, GATED, STAGES, 1)),
            (_copy_tiles, (rings, copy_sources, N, K, GATED, STAGES)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _look_up_tile(tiles_ptr, work, num_work, COLUMN_TILES: gl.constexpr):
    """Return the expert and first row of a work item (a row tile and a column tile). Clamp `work` to the last item."""
    entry_ptr = tiles_ptr + 2 * (1 + gl.minimum(work, num_work - 1) // COLUMN_TILES)
    return gl.load(entry_ptr), gl.load(entry_ptr + 1)


@gluon.jit
def _copy_tiles(rings, sources, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr):
    """For each work item (tile) and step, copy rows and weights to the ring buffer. One warp runs this function."""
    x_ring, weight_ring, full, empty = rings
    x_desc, weight_desc, starts_ptr, tiles_ptr = sources
    TILE_COLUMNS: gl.constexpr = 128 if GATED else 256
    COLUMN_TILES: gl.constexpr = N // TILE_COLUMNS
    WEIGHT_ROWS_PER_EXPERT: gl.constexpr = 2 * N if GATED else N
    # Distance between the first and the second block of columns, in rows of the weight.
    BLOCK_DISTANCE: gl.constexpr = N if GATED else 128
    num_work = gl.load(tiles_ptr) * COLUMN_TILES
    step = 0
    for work in range(gl.program_id(0), num_work, gl.num_programs(0)):
        expert, first_row = _look_up_tile(tiles_ptr, work, num_work, COLUMN_TILES)
        has_second_half = first_row + 64 < gl.load(starts_ptr + expert + 1)
        first_weight_row = expert * WEIGHT_ROWS_PER_EXPERT + (work % COLUMN_TILES) * TILE_COLUMNS
        for k in range(0, K, 128):
            stage = step % STAGES
            # In the first pass over the ring every stage is free, and this wait returns at once.
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, 3 * 128 * 128, pred=has_second_half)  # bytes
            mbarrier.expect(barrier, 5 * 64 * 128, pred=has_second_half == 0)
            tma.async_copy_global_to_shared(weight_desc, [first_weight_row, k], barrier, weight_ring.index(2 * stage))
            tma.async_copy_global_to_shared(x_desc, [first_row, k], barrier, x_ring.index(2 * stage))
            tma.async_copy_global_to_shared(
                weight_desc, [first_weight_row + BLOCK_DISTANCE, k], barrier, weight_ring.index(2 * stage + 1)
            )
            tma.async_copy_global_to_shared(
                x_desc, [first_row + 64, k], barrier, x_ring.index(2 * stage + 1), pred=has_second_half
            )
            step += 1


@gluon.jit
def _multiply(
    rings,
    pointers,
    group_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
    WARP_GROUP: gl.constexpr,
):
    """Multiply and store 64 rows of each tile, from row `64 * WARP_GROUP`. Four warps run this function."""
    x_ring, weight_ring, full, empty = rings
    x_scales_ptr, scales_ptr, order_ptr, starts_ptr, tiles_ptr, row_weights_ptr, out_ptr, out_scales_ptr = pointers
    SUMS_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    TILE_COLUMNS: gl.constexpr = 128 if GATED else 256
    COLUMN_TILES: gl.constexpr = N // TILE_COLUMNS
    NUM_STEPS: gl.constexpr = K // 128
    num_work = gl.load(tiles_ptr) * COLUMN_TILES
    tile_rows = 64 * WARP_GROUP + gl.arange(0, 64, gl.SliceLayout(1, SUMS_LAYOUT))
    work = gl.program_id(0)
    step = 0
    if work < num_work:
        # While a step multiplies, the scales of the next step are loaded. A tile's first scales are loaded before the
        # previous tile is stored.
        expert, first_row = _look_up_tile(tiles_ptr, work, num_work, COLUMN_TILES)
        end = gl.load(starts_ptr + expert + 1)
        # left, right: the tile's first and second block of columns (gate and up if GATED).
        row_scale, left_scale, right_scale = _load_scales(
            x_scales_ptr, scales_ptr, expert, first_row, work, 0, tile_rows, group_stride, N, K, GATED
        )
        while work < num_work:
            next_work = work + gl.num_programs(0)
            next_expert, next_first_row = _look_up_tile(tiles_ptr, next_work, num_work, COLUMN_TILES)
            rows = first_row + tile_rows
            row_mask = rows < end
            if not GATED:
                pairs = gl.load(order_ptr + rows, mask=row_mask, other=0)
                weights = gl.load(row_weights_ptr + rows, mask=row_mask, other=0.0)
            # The compiler fails if it can prove that a branch is never taken: keep the condition a runtime value.
            has_rows = first_row + 64 * WARP_GROUP < end
            if has_rows:
                left_sums = gl.zeros([64, 128], gl.float32, SUMS_LAYOUT)
                right_sums = gl.zeros([64, 128], gl.float32, SUMS_LAYOUT)
                left_scale_product, right_scale_product = row_scale * left_scale, row_scale * right_scale
                second_step: gl.constexpr = 1 if NUM_STEPS > 1 else 0
                row_scale, left_scale, right_scale = _load_scales(
                    x_scales_ptr,
                    scales_ptr,
                    expert,
                    first_row,
                    work,
                    second_step,
                    tile_rows,
                    group_stride,
                    N,
                    K,
                    GATED,
                )
                # Each turn multiplies one block of columns, with one instruction. With two instructions, the compiler
                # would need more registers than a thread has.
                for turn in range(2 * NUM_STEPS):
                    stage = step % STAGES
                    block = turn & 1
                    if block == 0:
                        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                    zeros = gl.zeros([64, 128], gl.float32, SUMS_LAYOUT)
                    product = warpgroup_mma(
                        x_ring.index(2 * stage + WARP_GROUP),
                        weight_ring.index(2 * stage + block).permute((1, 0)),
                        zeros,
                        use_acc=False,
                        is_async=True,
                    )
                    product = warpgroup_mma_wait(0, deps=[product])
                    if block == 0:
                        left_sums += product * left_scale_product[:, None]
                    else:
                        mbarrier.arrive(empty.index(stage))
                        right_sums += product * right_scale_product[:, None]
                        left_scale_product, right_scale_product = row_scale * left_scale, row_scale * right_scale
                        # In the last two steps, this call loads the last scales again. These scales are not used.
                        row_scale, left_scale, right_scale = _load_scales(
                            x_scales_ptr,
                            scales_ptr,
                            expert,
                            first_row,
                            work,
                            gl.minimum(turn // 2 + 2, NUM_STEPS - 1),
                            tile_rows,
                            group_stride,
                            N,
                            K,
                            GATED,
                        )
                        step += 1
                next_end = gl.load(starts_ptr + next_expert + 1)
                row_scale, left_scale, right_scale = _load_scales(
                    x_scales_ptr,
                    scales_ptr,
                    next_expert,
                    next_first_row,
                    next_work,
                    0,
                    tile_rows,
                    group_stride,
                    N,
                    K,
                    GATED,
                )
                first_column = (work % COLUMN_TILES) * TILE_COLUMNS
                if GATED:
                    left_sums = left_sums * (1 / (1 + gl.exp(-left_sums))) * right_sums
                    values, scales = quantize_groups(left_sums, 1)  # values: e4m3
                    scale_ptrs = out_scales_ptr + (first_column // 128).to(gl.int64) * group_stride + rows
                    gl.store(scale_ptrs, scales, mask=row_mask)
                    _store_e4m3(values, out_ptr, first_row + 64 * WARP_GROUP, first_column, end, N)
                else:
                    num_rows = end - first_row - 64 * WARP_GROUP
                    _store_pair_results(left_sums * weights[:, None], pairs, num_rows, out_ptr, first_column, N)
                    _store_pair_results(right_sums * weights[:, None], pairs, num_rows, out_ptr, first_column + 128, N)
            else:
                for _ in range(NUM_STEPS):
                    stage = step % STAGES
                    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                    mbarrier.arrive(empty.index(stage))
                    step += 1
                next_end = gl.load(starts_ptr + next_expert + 1)
                row_scale, left_scale, right_scale = _load_scales(
                    x_scales_ptr,
                    scales_ptr,
                    next_expert,
                    next_first_row,
                    next_work,
                    0,
                    tile_rows,
                    group_stride,
                    N,
                    K,
                    GATED,
                )
            work = next_work
            expert, first_row, end = next_expert, next_first_row, next_end


@gluon.jit
def _load_scales(
    x_scales_ptr,
    scales_ptr,
    expert,
    first_row,
    work,
    step,
    tile_rows,
    group_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load a step's scales of the rows and of the two blocks of columns. Scales past the last row are not used."""
    BLOCKS: gl.constexpr = N // 128  # blocks of columns of one expert's projection
    NUM_STEPS: gl.constexpr = K // 128
    COLUMN_TILES: gl.constexpr = BLOCKS if GATED else BLOCKS // 2
    row_scale = gl.load(x_scales_ptr + (step * group_stride + first_row) + tile_rows)
    tile = work % COLUMN_TILES
    # 32-bit offsets suffice: there are fewer than 2^31 scales.
    if GATED:
        left_ptr = scales_ptr + ((expert * 2 * BLOCKS + tile) * NUM_STEPS + step)
        return row_scale, gl.load(left_ptr), gl.load(left_ptr + BLOCKS * NUM_STEPS)
    left_ptr = scales_ptr + ((expert * BLOCKS + 2 * tile) * NUM_STEPS + step)
    return row_scale, gl.load(left_ptr), gl.load(left_ptr + NUM_STEPS)


@gluon.jit
def _store_e4m3(values, out_ptr, first_row, first_column, end, N: gl.constexpr):
    """Store e4m3 [64, 128], 16 bytes per thread. Each warp stores the rows that it has summed."""
    STORE_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0], [8, 0]],
        [[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, STORE_LAYOUT))
    columns = first_column + gl.arange(0, 128, gl.SliceLayout(0, STORE_LAYOUT))
    out_ptrs = out_ptr + rows.to(gl.int64)[:, None] * N + columns[None, :]
    gl.store(out_ptrs, gl.convert_layout(values, STORE_LAYOUT), mask=(rows < end)[:, None])


@gluon.jit
def _store_pair_results(pair_results, pairs, num_rows, out_ptr, first_column, N: gl.constexpr):
    """Store row i of `pair_results` [64, 128] to row `pairs[i]` of the result, for i below `num_rows`."""
    STORE_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
    row_mask = gl.arange(0, 64, gl.SliceLayout(1, STORE_LAYOUT)) < num_rows
    pairs = gl.convert_layout(pairs, gl.SliceLayout(1, STORE_LAYOUT))
    columns = first_column + gl.arange(0, 128, gl.SliceLayout(0, STORE_LAYOUT))
    out_ptrs = out_ptr + pairs.to(gl.int64)[:, None] * N + columns[None, :]
    gl.store(
        out_ptrs, gl.convert_layout(pair_results.to(out_ptr.dtype.element_ty), STORE_LAYOUT), mask=row_mask[:, None]
    )
