"""Computes absorbed latent attention with many heads on Hopper, in Gluon, for decodes and prompt chunks.

A program computes one part of a `WorkList` for 64 heads. One warp copies queries and latents in advance. Four warps
compute scores, weights and half of the 64 x 512 results. Four other warps compute the other half, because the results
exceed the registers of four warps. Blocks of shared memory have 64 rows (heads or latents) and 64 columns.
"""

# ruff: noqa: RUF005, SIM113 - Gluon supports neither unpacking into tuples nor `enumerate`

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

from nanovllm_kernels.attention.mla.gluon_work_list import load_program_tiles, load_tile_share, partial_rows
from nanovllm_kernels.attention.plan.attention_batch import PagedRequests
from nanovllm_kernels.attention.plan.tile_configs import GLUON_TILE_HEADS
from nanovllm_kernels.attention.plan.work_list import WorkList
from nanovllm_kernels.attention.triton_softmax import LOG2_E
from nanovllm_kernels.attention.triton_split_kv import PartialResults
from nanovllm_kernels.platform import can_overlap_launches

# Number of stages in shared memory. A stage holds 64 latents. Queries leave no memory for a third stage.
STAGES = 2
# Shared memory layout that the tensor cores require, with 64 elements per row.
SHARED_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
BOX_COLUMNS = 64  # Columns per bulk copy.
# Registers per thread: at launch, in the copying warp, and in warps that multiply. Results take 128 registers.
LAUNCH_REGISTERS, COPY_REGISTERS, MULTIPLY_REGISTERS = 168, 32, 232


def attend(
    q_latent: Tensor,
    q_rope: Tensor,
    requests: PagedRequests,
    work: WorkList,
    scale: float,
    out: Tensor,
    partial: PartialResults,
) -> None:
    """Compute each part of `work`. Write results of whole tiles to `out`, and partial results to `partial`.

    q_latent: [H, T, 512], contiguous. q_rope: [T, H, 64], a slice of a contiguous tensor.
    requests: requests with a cache [N, P, 1, 576].
    work: work list for tiles of one token and blocks of 64 latents.
    """
    kv_cache, _, block_tables, seq_lens, query_start_loc = requests
    num_heads, num_tokens, latent_dim = q_latent.shape
    page_size, width = kv_cache.shape[1], kv_cache.shape[3]
    overlap = can_overlap_launches(q_latent.device)  # Whether this kernel may start before the previous one ends.
    rope_rows = q_rope.as_strided((num_tokens * num_heads, q_rope.shape[2]), (q_rope.stride(1), 1))
    num_programs = work.num_parts * (num_heads // GLUON_TILE_HEADS)
    _attend_parts[(num_programs,)](
        TensorDescriptor.from_tensor(q_latent.view(num_heads, -1), [GLUON_TILE_HEADS, BOX_COLUMNS], SHARED_LAYOUT),
        TensorDescriptor.from_tensor(rope_rows, [GLUON_TILE_HEADS, BOX_COLUMNS], SHARED_LAYOUT),
        TensorDescriptor.from_tensor(kv_cache.view(-1, width), [page_size, BOX_COLUMNS], SHARED_LAYOUT),
        TensorDescriptor.from_tensor(out.view(-1, latent_dim), [GLUON_TILE_HEADS, BOX_COLUMNS], SHARED_LAYOUT),
        block_tables,
        seq_lens,
        query_start_loc,
        *work,
        *partial,
        scale * LOG2_E,
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        PAGE_SIZE=page_size,
        STAGES=STAGES,
        MULTIPLY_REGISTERS=MULTIPLY_REGISTERS,
        COPY_REGISTERS=COPY_REGISTERS,
        OVERLAP=overlap,
        maxnreg=LAUNCH_REGISTERS,
        num_warps=4,
        launch_pdl=overlap,
    )


@gluon.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend_parts(
    q_desc,
    rope_desc,
    kv_desc,
    out_desc,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_first_blocks_ptr,
    tiles_ptr,
    parts_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    scale_log2,
    table_stride,
    NUM_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Compute one part of the work list for 64 query heads, token by token."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    dtype: gl.constexpr = out_desc.dtype
    STAGE_PAGES: gl.constexpr = 64 // PAGE_SIZE
    # Eight blocks of 64 columns of latent query parts, and one block of rotated query parts.
    query_blocks = gl.allocate_shared_memory(dtype, [9, 64, 64], q_desc.layout)
    # Each stage has eight blocks of 64 columns of latents, stored page by page, and one block of rotated key parts.
    latents = gl.allocate_shared_memory(dtype, [STAGES * 8 * STAGE_PAGES, PAGE_SIZE, 64], kv_desc.layout)
    rope_keys = gl.allocate_shared_memory(dtype, [STAGES * STAGE_PAGES, PAGE_SIZE, 64], kv_desc.layout)
    # The first four warps pass weights, and a factor for each row of sums, to the other four warps.
    weights = gl.allocate_shared_memory(dtype, [64, 64], q_desc.layout)
    row_factors = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stage_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Four signals: queries are loaded, queries may be replaced, weights are stored, weights may be replaced.
    signals = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(stage_full.index(stage), count=1)
        mbarrier.init(stage_empty.index(stage), count=2)
    for signal in gl.static_range(4):
        mbarrier.init(signals.index(signal), count=1)
    fence_async_shared()
    # View a stage as eight blocks of 64 rows and 64 columns, and also as two halves of 64 rows and 256 columns.
    latent_blocks = latents._reinterpret(dtype, [STAGES * 8, 64, 64], q_desc.layout)  # noqa: SLF001 - no public name
    latent_halves = latents._reinterpret(dtype, [STAGES * 2, 64, 256], q_desc.layout)  # noqa: SLF001
    rope_blocks = rope_keys._reinterpret(dtype, [STAGES, 64, 64], q_desc.layout)  # noqa: SLF001
    barriers = (stage_full, stage_empty, signals)
    plan = (tile_first_blocks_ptr, tiles_ptr, parts_ptr, seq_lens_ptr, query_start_loc_ptr)
    results = (out_desc, partial_out_ptr)
    sources = (q_desc, rope_desc, kv_desc, block_tables_ptr, table_stride)
    gl.warp_specialize(
        [
            (
                _score_and_sum,
                (
                    query_blocks,
                    rope_blocks,
                    latent_blocks,
                    latent_halves,
                    weights,
                    row_factors,
                    barriers,
                    plan,
                    results,
                    partial_lse_ptr,
                    scale_log2,
                )
                + (NUM_HEADS, STAGES),
            ),
            (
                _sum_second_half,
                (latent_blocks, latent_halves, weights, row_factors, barriers, plan, results, NUM_HEADS, STAGES),
            ),
            (_copy_inputs, (query_blocks, latents, rope_keys, barriers, plan, sources, NUM_HEADS, PAGE_SIZE, STAGES)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _copy_inputs(
    query_blocks,
    latents,
    rope_keys,
    barriers,
    plan,
    sources,
    NUM_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run in the copying warp: for each tile, copy the queries, then the latents into the stages."""
    stage_full, stage_empty, signals = barriers
    q_desc, rope_desc, kv_desc, block_tables_ptr, table_stride = sources
    STAGE_PAGES: gl.constexpr = 64 // PAGE_SIZE
    queries_ready, queries_free = signals.index(0), signals.index(1)
    num_blocks_done = 0  # Counts blocks of 64 latents. A stage holds one block.
    num_tiles_done = 0
    first_tile, end_tile, head = load_program_tiles(plan, NUM_HEADS)
    for tile in range(first_tile, end_tile):
        request, token, begin, end, _slot = load_tile_share(plan, tile, NUM_HEADS)
        # At the first tile, no queries are in shared memory yet, and this wait returns at once.
        mbarrier.wait(queries_free, (num_tiles_done + 1) & 1)
        mbarrier.expect(queries_ready, 9 * 64 * 64 * 2)
        for block in gl.static_range(8):
            tma.async_copy_global_to_shared(
                q_desc, [head, token * 512 + 64 * block], queries_ready, query_blocks.index(block)
            )
        tma.async_copy_global_to_shared(rope_desc, [token * NUM_HEADS + head, 0], queries_ready, query_blocks.index(8))
        num_tiles_done += 1
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        for start in range(begin, end, 64):
            stage = num_blocks_done % STAGES
            latents_ready = stage_full.index(stage)
            pages = ()
            for page in gl.static_range(STAGE_PAGES):
                # Past the request's last page, load the last page again.
                pages = pages + (gl.load(table_ptr + gl.minimum(start + page * PAGE_SIZE, end - 1) // PAGE_SIZE),)
            mbarrier.wait(stage_empty.index(stage), (num_blocks_done // STAGES + 1) & 1)
            mbarrier.expect(latents_ready, 9 * 64 * 64 * 2)
            for page in gl.static_range(STAGE_PAGES):
                row = pages[page] * PAGE_SIZE
                for block in gl.static_range(8):
                    target = latents.index((stage * 8 + block) * STAGE_PAGES + page)
                    tma.async_copy_global_to_shared(kv_desc, [row, 64 * block], latents_ready, target)
                tma.async_copy_global_to_shared(
                    kv_desc, [row, 512], latents_ready, rope_keys.index(stage * STAGE_PAGES + page)
                )
            num_blocks_done += 1


@gluon.jit
def _clear_rows(latent_blocks, first_block, num_rows):
    """Zero rows `num_rows` to 63 of four blocks of latents: a weight of 0 would not cancel a NaN."""
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    is_filled = gl.arange(0, 64, gl.SliceLayout(1, ROW_LAYOUT)) < num_rows
    for block in gl.static_range(4):
        latents = latent_blocks.index(first_block + block).load(ROW_LAYOUT)
        latent_blocks.index(first_block + block).store(gl.where(is_filled[:, None], latents, gl.zeros_like(latents)))


@gluon.jit
def _score_and_sum(
    query_blocks,
    rope_blocks,
    latent_blocks,
    latent_halves,
    weights,
    row_factors,
    barriers,
    plan,
    results,
    partial_lse_ptr,
    scale_log2,
    NUM_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run in the first four warps: compute scores, weights, and the first 256 columns of the results."""
    stage_full, stage_empty, signals = barriers
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    queries_ready, queries_free = signals.index(0), signals.index(1)
    weights_ready, weights_free = signals.index(2), signals.index(3)
    columns = gl.arange(0, 64, gl.SliceLayout(0, SCORE_LAYOUT))
    num_blocks_done = 0
    num_tiles_done = 0
    num_exchanges = 0  # Counts how often these warps have passed weights or row factors to the other warps.
    first_tile, end_tile, head = load_program_tiles(plan, NUM_HEADS)
    for tile in range(first_tile, end_tile):
        _request, token, begin, end, partial_slot = load_tile_share(plan, tile, NUM_HEADS)
        mbarrier.wait(queries_ready, num_tiles_done & 1)
        num_tiles_done += 1
        running_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
        running_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
        sums = gl.zeros([64, 256], gl.float32, SUM_LAYOUT)
        for start in range(begin, end, 64):
            stage = num_blocks_done % STAGES
            mbarrier.wait(stage_full.index(stage), (num_blocks_done // STAGES) & 1)
            scores = gl.zeros([64, 64], gl.float32, SCORE_LAYOUT)
            rope_key = rope_blocks.index(stage).permute((1, 0))
            scores = warpgroup_mma(query_blocks.index(8), rope_key, scores, use_acc=False, is_async=True)
            for block in gl.static_range(8):
                latent = latent_blocks.index(stage * 8 + block).permute((1, 0))
                scores = warpgroup_mma(query_blocks.index(block), latent, scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(queries_free, pred=start + 64 >= end)
            scores = gl.where((start + columns < end)[None, :], scores * scale_log2, float("-inf"))
            new_max = gl.maximum(running_max, gl.max(scores, 1))
            scores = gl.exp2(scores - new_max[:, None])
            rescale = gl.exp2(running_max - new_max)
            running_sum = running_sum * rescale + gl.sum(scores, 1)
            running_max = new_max
            mbarrier.wait(weights_free, (num_exchanges + 1) & 1)
            num_exchanges += 1
            weights.store(scores.to(weights.dtype))
            row_factors.store(rescale)
            if start + 64 > end:
                _clear_rows(latent_blocks, stage * 8, end - start)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(weights_ready)
            sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUM_LAYOUT))[:, None]
            sums = warpgroup_mma(weights, latent_halves.index(stage * 2), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            # Do not release the tile's last stage yet: `_store_half` needs the memory of this stage for results.
            mbarrier.arrive(stage_empty.index(stage), pred=start + 64 < end)
            num_blocks_done += 1
        mbarrier.wait(weights_free, (num_exchanges + 1) & 1)
        num_exchanges += 1
        inverse_sum = 1 / running_sum
        row_factors.store(inverse_sum)
        gl.thread_barrier()
        mbarrier.arrive(weights_ready)
        if partial_slot >= 0:
            rows = gl.arange(0, 64, gl.SliceLayout(1, SCORE_LAYOUT))
            out_rows = partial_rows(partial_slot, head, rows, NUM_HEADS)
            gl.store(partial_lse_ptr + out_rows, running_max + gl.log2(running_sum))
        sums = sums * gl.convert_layout(inverse_sum, gl.SliceLayout(1, SUM_LAYOUT))[:, None]
        stage = (num_blocks_done - 1) % STAGES
        _store_half(sums, latent_halves, latent_blocks, stage * 2, results, token, head, partial_slot, NUM_HEADS)
        mbarrier.arrive(stage_empty.index(stage))


@gluon.jit
def _sum_second_half(
    latent_blocks,
    latent_halves,
    weights,
    row_factors,
    barriers,
    plan,
    results,
    NUM_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run in the other four warps: compute the last 256 columns of the results from the weights."""
    stage_full, stage_empty, signals = barriers
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    weights_ready, weights_free = signals.index(2), signals.index(3)
    num_blocks_done = 0
    num_exchanges = 0
    first_tile, end_tile, head = load_program_tiles(plan, NUM_HEADS)
    for tile in range(first_tile, end_tile):
        _request, token, begin, end, partial_slot = load_tile_share(plan, tile, NUM_HEADS)
        sums = gl.zeros([64, 256], gl.float32, SUM_LAYOUT)
        for start in range(begin, end, 64):
            stage = num_blocks_done % STAGES
            mbarrier.wait(stage_full.index(stage), (num_blocks_done // STAGES) & 1)
            if start + 64 > end:
                _clear_rows(latent_blocks, stage * 8 + 4, end - start)
                fence_async_shared()
                gl.thread_barrier()
            mbarrier.wait(weights_ready, num_exchanges & 1)
            num_exchanges += 1
            sums = sums * row_factors.load(gl.SliceLayout(1, SUM_LAYOUT))[:, None]
            sums = warpgroup_mma(weights, latent_halves.index(stage * 2 + 1), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(weights_free)
            mbarrier.arrive(stage_empty.index(stage), pred=start + 64 < end)
            num_blocks_done += 1
        mbarrier.wait(weights_ready, num_exchanges & 1)
        num_exchanges += 1
        sums = sums * row_factors.load(gl.SliceLayout(1, SUM_LAYOUT))[:, None]
        gl.thread_barrier()
        mbarrier.arrive(weights_free)
        stage = (num_blocks_done - 1) % STAGES
        _store_half(sums, latent_halves, latent_blocks, stage * 2 + 1, results, token, head, partial_slot, NUM_HEADS)
        mbarrier.arrive(stage_empty.index(stage))


@gluon.jit
def _store_half(sums, latent_halves, latent_blocks, half, results, token, head, partial_slot, NUM_HEADS: gl.constexpr):
    """Store half of the result columns for 64 heads from `head` on. If `partial_slot` >= 0, store partial results.

    half: index in `latent_halves` of the memory to store from. An odd index means the last 256 columns.
    """
    out_desc, partial_out_ptr = results
    first_column = (half % 2) * 256
    if partial_slot < 0:
        latent_halves.index(half).store(sums.to(latent_halves.dtype))
        fence_async_shared()
        gl.thread_barrier()
        for block in gl.static_range(4):
            position = [token * NUM_HEADS + head, first_column + 64 * block]
            tma.async_copy_shared_to_global(out_desc, position, latent_blocks.index(half * 4 + block))
        tma.store_wait(0)
        gl.thread_barrier()
    else:
        rows = gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        out_rows = partial_rows(partial_slot, head, rows, NUM_HEADS)
        columns = first_column + gl.arange(0, 256, gl.SliceLayout(0, sums.type.layout))
        gl.store(partial_out_ptr + out_rows[:, None] * 512 + columns[None, :], sums)
