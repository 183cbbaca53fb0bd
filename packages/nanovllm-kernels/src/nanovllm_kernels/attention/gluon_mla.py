"""Absorbed latent attention with many heads on Hopper by specialised warps, in Gluon, for decodes and prompt chunks.

A program takes one part of a work list (see `gluon_mla_work`). One warp copies queries and latents and runs ahead into
the next token. Four warps compute scores and weights; they and four other warps each compute half of the 64 x 512
results, which exceed the registers of four. `triton_mla_tile.specializes` gives the supported shapes.
"""

# ruff: noqa: N803, N806 - a kernel's compile-time constants are written in capitals, as Triton's users do
# ruff: noqa: RUF005, SIM113 - kernels know neither unpacking into tuples nor `enumerate`

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

from nanovllm_kernels.attention.gluon_mla_work import load_part, load_work, place_partial
from nanovllm_kernels.attention.triton_mla_tile import LATENT_HEADS
from nanovllm_kernels.attention.triton_tile import LOG2_E
from nanovllm_kernels.attention.work_list import WorkList
from nanovllm_kernels.platform import can_overlap_launches

# Tiles of latents in shared memory: as many as fit beside the queries.
STAGES = 2
# Shared memory layout that the tensor cores require, with 64 elements per row.
SHARED = gl.NVMMASharedLayout(128, 16, 2)
BOX = 64
# Registers per thread: at launch, in the copying warp, and in the multiplying warps (128 of which hold results).
LAUNCH_REGISTERS, FETCH_REGISTERS, GROUP_REGISTERS = 168, 32, 232


def attend(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    work: WorkList,
    scale: float,
    out: Tensor,
    partial: Tensor,
    lse: Tensor,
) -> None:
    """Attend for each part of `work`; write whole tiles to `out`, parts of tiles to `partial` and `lse`.

    q_latent: [H, T, 512], contiguous. q_rope: [T, H, 64], a slice of a contiguous tensor. kv_cache: [N, P, 1, 576].
    work: planned for tiles of one token and blocks of 64 latents.
    """
    num_heads, num_tokens, latent_dim = q_latent.shape
    page_size, width = kv_cache.shape[1], kv_cache.shape[3]
    overlap = can_overlap_launches(q_latent.device)
    rope_rows = q_rope.as_strided((num_tokens * num_heads, q_rope.shape[2]), (q_rope.stride(1), 1))
    num_programs = work.num_parts * (num_heads // LATENT_HEADS)
    _attend_latent_work[(num_programs,)](
        TensorDescriptor.from_tensor(q_latent.view(num_heads, -1), [LATENT_HEADS, BOX], SHARED),
        TensorDescriptor.from_tensor(rope_rows, [LATENT_HEADS, BOX], SHARED),
        TensorDescriptor.from_tensor(kv_cache.view(-1, width), [page_size, BOX], SHARED),
        TensorDescriptor.from_tensor(out.view(-1, latent_dim), [LATENT_HEADS, BOX], SHARED),
        block_tables,
        seq_lens,
        query_start_loc,
        *work,
        partial,
        lse,
        scale * LOG2_E,
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        PAGE_SIZE=page_size,
        STAGES=STAGES,
        GROUP_REGISTERS=GROUP_REGISTERS,
        FETCH_REGISTERS=FETCH_REGISTERS,
        OVERLAP=overlap,
        maxnreg=LAUNCH_REGISTERS,
        num_warps=4,
        launch_pdl=overlap,
    )


@gluon.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend_latent_work(
    q_desc,
    rope_desc,
    kv_desc,
    out_desc,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_starts_ptr,
    tiles_ptr,
    parts_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    table_stride,
    NUM_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Attend for one part of the work list and 64 query heads, token by token."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    dtype: gl.constexpr = out_desc.dtype
    PARTS: gl.constexpr = 64 // PAGE_SIZE
    queries = gl.allocate_shared_memory(dtype, [9, 64, 64], q_desc.layout)
    # Each stage has eight blocks of 64 columns of latents, stored page by page, and one block of rotated key parts.
    latents = gl.allocate_shared_memory(dtype, [STAGES * 8 * PARTS, PAGE_SIZE, 64], kv_desc.layout)
    key_parts = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PAGE_SIZE, 64], kv_desc.layout)
    weights = gl.allocate_shared_memory(dtype, [64, 64], q_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Four signals: queries are loaded, queries may be replaced, weights are stored, weights may be replaced.
    signals = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for signal in gl.static_range(4):
        mbarrier.init(signals.index(signal), count=1)
    fence_async_shared()
    # A tile's pages are laid out like 64 consecutive rows, and its eight blocks like two halves of 256 columns.
    blocks = latents._reinterpret(dtype, [STAGES * 8, 64, 64], q_desc.layout)  # noqa: SLF001 - no public name
    halves = latents._reinterpret(dtype, [STAGES * 2, 64, 256], q_desc.layout)  # noqa: SLF001
    keys = key_parts._reinterpret(dtype, [STAGES, 64, 64], q_desc.layout)  # noqa: SLF001
    barriers = (full, empty, signals)
    plan = (tile_starts_ptr, tiles_ptr, parts_ptr, seq_lens_ptr, query_start_loc_ptr)
    results = (out_desc, partial_ptr)
    filled = (q_desc, rope_desc, kv_desc, block_tables_ptr, table_stride)
    gl.warp_specialize(
        [
            (
                _score,
                (queries, keys, blocks, halves, weights, factors, barriers, plan, results, lse_ptr, scale_log2)
                + (NUM_HEADS, STAGES),
            ),
            (_weigh, (blocks, halves, weights, factors, barriers, plan, results, NUM_HEADS, STAGES)),
            (_fetch, (queries, latents, key_parts, barriers, plan, filled, NUM_HEADS, PAGE_SIZE, STAGES)),
        ],
        [4, 1],
        [GROUP_REGISTERS, FETCH_REGISTERS],
    )


@gluon.jit
def _fetch(
    queries,
    latents,
    key_parts,
    barriers,
    plan,
    sources,
    NUM_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copying warp: for each tile, load the queries, then the latents into the ring."""
    full, empty, signals = barriers
    q_desc, rope_desc, kv_desc, block_tables_ptr, table_stride = sources
    PARTS: gl.constexpr = 64 // PAGE_SIZE
    queries_ready, queries_free = signals.index(0), signals.index(1)
    step = 0
    item = 0
    first_tile, end_tile, head = load_part(plan, NUM_HEADS)
    for tile in range(first_tile, end_tile):
        request, token, begin, end, _slot = load_work(plan, tile, NUM_HEADS)
        # For the first tile this wait returns at once.
        mbarrier.wait(queries_free, (item + 1) & 1)
        mbarrier.expect(queries_ready, 9 * 64 * 64 * 2)
        for block in gl.static_range(8):
            tma.async_copy_global_to_shared(
                q_desc, [head, token * 512 + 64 * block], queries_ready, queries.index(block)
            )
        tma.async_copy_global_to_shared(rope_desc, [token * NUM_HEADS + head, 0], queries_ready, queries.index(8))
        item += 1
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        for start in range(begin, end, 64):
            stage = step % STAGES
            ready = full.index(stage)
            pages = ()
            for part in gl.static_range(PARTS):
                # Past the last page, load the last page again.
                pages = pages + (gl.load(table_ptr + gl.minimum(start + part * PAGE_SIZE, end - 1) // PAGE_SIZE),)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(ready, 9 * 64 * 64 * 2)
            for part in gl.static_range(PARTS):
                row = pages[part] * PAGE_SIZE
                for block in gl.static_range(8):
                    to = latents.index((stage * 8 + block) * PARTS + part)
                    tma.async_copy_global_to_shared(kv_desc, [row, 64 * block], ready, to)
                tma.async_copy_global_to_shared(kv_desc, [row, 512], ready, key_parts.index(stage * PARTS + part))
            step += 1


@gluon.jit
def _clear_rows(blocks, first, num_rows):
    """Zero the rows from `num_rows` on of four blocks of latents: they may hold NaN, which a weight of 0 keeps."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = gl.arange(0, 64, gl.SliceLayout(1, LOADED)) < num_rows
    for block in gl.static_range(4):
        numbers = blocks.index(first + block).load(LOADED)
        blocks.index(first + block).store(gl.where(inside[:, None], numbers, gl.zeros_like(numbers)))


@gluon.jit
def _score(
    queries,
    keys,
    blocks,
    halves,
    weights,
    factors,
    barriers,
    plan,
    results,
    lse_ptr,
    scale_log2,
    NUM_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps: compute scores and weights, and the results' first 256 columns."""
    full, empty, signals = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    queries_ready, queries_free, weights_ready, weights_free = (
        signals.index(0),
        signals.index(1),
        signals.index(2),
        signals.index(3),
    )
    columns = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    step = 0
    item = 0
    turn = 0
    first_tile, end_tile, head = load_part(plan, NUM_HEADS)
    for tile in range(first_tile, end_tile):
        _request, token, begin, end, slot = load_work(plan, tile, NUM_HEADS)
        mbarrier.wait(queries_ready, item & 1)
        item += 1
        running_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        running_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.zeros([64, 256], gl.float32, SUMS)
        for start in range(begin, end, 64):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            scores = gl.zeros([64, 64], gl.float32, SCORES)
            key = keys.index(stage).permute((1, 0))
            scores = warpgroup_mma(queries.index(8), key, scores, use_acc=False, is_async=True)
            for block in gl.static_range(8):
                latent = blocks.index(stage * 8 + block).permute((1, 0))
                scores = warpgroup_mma(queries.index(block), latent, scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(queries_free, pred=start + 64 >= end)
            scores = gl.where((start + columns < end)[None, :], scores * scale_log2, float("-inf"))
            new_max = gl.maximum(running_max, gl.max(scores, 1))
            scores = gl.exp2(scores - new_max[:, None])
            rescale = gl.exp2(running_max - new_max)
            running_sum = running_sum * rescale + gl.sum(scores, 1)
            running_max = new_max
            mbarrier.wait(weights_free, (turn + 1) & 1)
            turn += 1
            weights.store(scores.to(weights.dtype))
            factors.store(rescale)
            if start + 64 > end:
                _clear_rows(blocks, stage * 8, end - start)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(weights_ready)
            sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
            sums = warpgroup_mma(weights, halves.index(stage * 2), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            # The tile's last stage is released later: results are stored through its memory.
            mbarrier.arrive(empty.index(stage), pred=start + 64 < end)
            step += 1
        mbarrier.wait(weights_free, (turn + 1) & 1)
        turn += 1
        factor = 1 / running_sum
        factors.store(factor)
        gl.thread_barrier()
        mbarrier.arrive(weights_ready)
        if slot >= 0:
            rows = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
            places = place_partial(slot, head, rows, NUM_HEADS)
            gl.store(lse_ptr + places, running_max + gl.log2(running_sum))
        sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
        stage = (step - 1) % STAGES
        _store(sums, halves, blocks, stage * 2, results, token, head, slot, NUM_HEADS)
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def _weigh(
    blocks,
    halves,
    weights,
    factors,
    barriers,
    plan,
    results,
    NUM_HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps: compute the results' other 256 columns from the weights."""
    full, empty, signals = barriers
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    weights_ready, weights_free = signals.index(2), signals.index(3)
    step = 0
    turn = 0
    first_tile, end_tile, head = load_part(plan, NUM_HEADS)
    for tile in range(first_tile, end_tile):
        _request, token, begin, end, slot = load_work(plan, tile, NUM_HEADS)
        sums = gl.zeros([64, 256], gl.float32, SUMS)
        for start in range(begin, end, 64):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            if start + 64 > end:
                _clear_rows(blocks, stage * 8 + 4, end - start)
                fence_async_shared()
                gl.thread_barrier()
            mbarrier.wait(weights_ready, turn & 1)
            turn += 1
            sums = sums * factors.load(gl.SliceLayout(1, SUMS))[:, None]
            sums = warpgroup_mma(weights, halves.index(stage * 2 + 1), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(weights_free)
            mbarrier.arrive(empty.index(stage), pred=start + 64 < end)
            step += 1
        mbarrier.wait(weights_ready, turn & 1)
        turn += 1
        sums = sums * factors.load(gl.SliceLayout(1, SUMS))[:, None]
        gl.thread_barrier()
        mbarrier.arrive(weights_free)
        stage = (step - 1) % STAGES
        _store(sums, halves, blocks, stage * 2 + 1, results, token, head, slot, NUM_HEADS)
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def _store(sums, halves, blocks, half, results, token, head, slot, NUM_HEADS: gl.constexpr):
    """Store half of the results of 64 heads from `head` on, as partial results if `slot` >= 0.

    half: the half of a stage through which final results are stored; its parity tells which half of the results it is.
    """
    out_desc, partial_ptr = results
    first = (half % 2) * 256
    if slot < 0:
        halves.index(half).store(sums.to(halves.dtype))
        fence_async_shared()
        gl.thread_barrier()
        for block in gl.static_range(4):
            to = [token * NUM_HEADS + head, first + 64 * block]
            tma.async_copy_shared_to_global(out_desc, to, blocks.index(half * 4 + block))
        tma.store_wait(0)
        gl.thread_barrier()
    else:
        rows = gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        places = place_partial(slot, head, rows, NUM_HEADS)
        columns = first + gl.arange(0, 256, gl.SliceLayout(0, sums.type.layout))
        gl.store(partial_ptr + places[:, None] * 512 + columns[None, :], sums)
