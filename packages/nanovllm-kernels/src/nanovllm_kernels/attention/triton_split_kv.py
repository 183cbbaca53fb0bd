"""Reads work lists, stores results of tiles, and merges the partial results of a tile.

`WorkList` explains tiles, blocks and parts. A tile may span several parts. One program computes one part.
Split-KV attention merges partial results in the same way (Dao et al. 2023).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.work_list import WorkList
from nanovllm_kernels.platform import can_overlap_launches

# Approximate maximum number of programs in a merge launch: about as many as the device runs at once.
MERGE_PROGRAMS = 2048
# Elements of partial results that one program of a merge launch loads at once.
MERGE_ELEMENTS = 4096


class PartialResults(NamedTuple):
    """Holds the results of tiles that span several parts: one partial result per tile and part.

    Part p has two slots: 2p is for a tile that began in an earlier part, 2p + 1 for a tile that begins in part p.

    out: float32 [slots, head blocks, rows, D], attention over the keys of one part. Row r of head block b (a group of
        query heads) is for query r // block_heads of the tile, and for head b * block_heads + r % block_heads.
    lse: float32 [slots, head blocks, rows], log2 of the softmax's normalizer; -inf for rows that saw no key.
    """

    out: Tensor
    lse: Tensor


def allocate_partial_results(
    work: WorkList, num_head_blocks: int, num_rows: int, head_dim: int, device: torch.device
) -> PartialResults:
    """Allocate uninitialised results. num_rows: number of rows of a tile."""
    shape = (2 * work.num_parts, num_head_blocks, num_rows)
    return PartialResults(
        torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def merge_parts(
    partial: PartialResults, query_start_loc: Tensor, work: WorkList, block_heads: int, block_q: int, out: Tensor
) -> None:
    """Merge the results of each tile that spans several parts, and write the tile's rows of `out` [T, H, D].

    block_heads: query heads per head block. block_q: query positions per tile.
    """
    num_parts = work.num_parts
    if num_parts == 1:
        return
    _, num_head_blocks, num_rows, head_dim = partial.out.shape
    padded_dim = tile_configs.next_power_of_2(head_dim)
    # Slots and rows that a program merges at once. A tile of many rows spans few parts, so few slots suffice.
    merged_slots = max(16, MERGE_ELEMENTS // padded_dim) if num_rows <= 64 else 4
    merged_rows = max(1, MERGE_ELEMENTS // merged_slots // padded_dim)
    row_programs = max(1, min(num_rows // merged_rows, MERGE_PROGRAMS // ((num_parts - 1) * num_head_blocks)))
    overlap = can_overlap_launches(out.device)
    _merge_parts[(num_parts - 1, num_head_blocks, row_programs)](
        *partial,
        query_start_loc,
        *work,
        out,
        num_parts,
        NUM_HEADS=out.shape[1],
        BLOCK_HEADS=block_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_M=num_rows,
        BLOCK_Q=block_q,
        MERGED_SLOTS=merged_slots,
        MERGED_ROWS=merged_rows,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


@triton.jit
def load_part(tile_first_blocks_ptr, parts_ptr, part):
    """Return (first key block, end of the blocks, first tile, end of the tiles) of part `part`. Ends are exclusive."""
    part_start = tl.load(parts_ptr + 2 * part)
    first_tile = tl.load(parts_ptr + 2 * part + 1).to(tl.int32)
    part_end = tl.load(parts_ptr + 2 * part + 2)
    next_tile = tl.load(parts_ptr + 2 * part + 3).to(tl.int32)
    # The first tile of the next part may begin in this part.
    end_tile = next_tile + (tl.load(tile_first_blocks_ptr + next_tile) < part_end).to(tl.int32)
    return part_start, part_end, first_tile, end_tile


@triton.jit
def load_segment(tile_first_blocks_ptr, tile, part, part_start, part_end):
    """Return (first block, exclusive end of the blocks, slot) for the blocks of `tile` that are in part `part`.

    Blocks are counted from the tile's first block. slot: index in the partial results, -1 if the part has all blocks.
    """
    tile_start = tl.load(tile_first_blocks_ptr + tile)
    tile_end = tl.load(tile_first_blocks_ptr + tile + 1)
    start = tl.maximum(tile_start, part_start)
    end = tl.minimum(tile_end, part_end)
    is_whole = (start == tile_start) & (end == tile_end)
    partial_slot = tl.where(is_whole, -1, 2 * part + (start == tile_start).to(tl.int32))
    return (start - tile_start).to(tl.int32), (end - tile_start).to(tl.int32), partial_slot


@triton.jit
def load_tile(tiles_ptr, seq_lens_ptr, query_start_loc_ptr, tile):
    """Return (request, tile's first query, request's first query, request's number of queries, context length).

    The tile's first query is an index within the request. The request's first query is an index within the step. The
    context is the request's tokens before its first query.
    """
    request = tl.load(tiles_ptr + 2 * tile)
    first_query = tl.load(tiles_ptr + 2 * tile + 1)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    return request, first_query, query_start, query_len, tl.load(seq_lens_ptr + request) - query_len


@triton.jit
def store_tile(
    out_pointers, softmax_state, partial_slot, head_block, out_rows, row_mask, num_head_blocks, HEAD_DIM: tl.constexpr
):
    """Divide a tile's rows by their sums of weights. Store the rows.

    partial_slot: slot of the partial results that receives the rows. -1: store the rows in `out`.
    out_pointers: pointers to `out`, `PartialResults.out` and `PartialResults.lse`.
    softmax_state: (sums of weighted values, maximum score, sum of weights) of each row.
    out_rows: row of `out` for each row of the tile. row_mask: false for rows without a query.
    """
    out_ptr, partial_out_ptr, partial_lse_ptr = out_pointers
    acc, running_max, running_sum = softmax_state
    dims = tl.arange(0, acc.shape[1])
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    # Avoid 0 / 0: a tile's first queries may see no key of this part.
    safe_sum = tl.where(running_sum > 0, running_sum, 1.0)
    acc = acc / safe_sum[:, None]
    if partial_slot < 0:
        out_ptrs = out_ptr + (out_rows * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        rows = tl.arange(0, acc.shape[0])
        partial_rows = (partial_slot.to(tl.int64) * num_head_blocks + head_block) * acc.shape[0] + rows
        tl.store(partial_out_ptr + partial_rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        lse = tl.where(running_sum > 0, running_max + tl.log2(safe_sum), float("-inf"))
        tl.store(partial_lse_ptr + partial_rows, lse, mask=row_mask)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["query_start_loc_ptr"])
def _merge_parts(
    partial_out_ptr,
    partial_lse_ptr,
    query_start_loc_ptr,
    tile_first_blocks_ptr,
    tiles_ptr,
    parts_ptr,
    out_ptr,
    num_parts,
    NUM_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MERGED_SLOTS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the partial results of one tile. A cut is the boundary between two parts.

    A cut's programs merge the tile that the cut divides. If several cuts divide one tile, the programs of these cuts
    share the tile's rows.

    BLOCK_M: rows of a tile. OVERLAP: whether this launch may start before the previous kernel ends (PDL).
    """
    if OVERLAP:
        # This launch may start before attention ends. If this launch called gdc_launch_dependents, the next kernel
        # could also start before attention ends, and its loads of weights would slow down attention.
        gdc_wait()
    cut = tl.program_id(0) + 1
    cut_block = tl.load(parts_ptr + 2 * cut)
    if cut_block == tl.load(parts_ptr + 2 * num_parts):
        return
    tile = tl.load(parts_ptr + 2 * cut + 1)
    tile_start = tl.load(tile_first_blocks_ptr + tile)
    if tile_start == cut_block:
        return
    # The index of part 1's first block is the number of blocks per part. Only the last parts may have fewer blocks.
    blocks_per_part = tl.load(parts_ptr + 2)
    first_part = (tile_start // blocks_per_part).to(tl.int32)
    last_part = ((tl.load(tile_first_blocks_ptr + tile + 1) - 1) // blocks_per_part).to(tl.int32)
    request = tl.load(tiles_ptr + 2 * tile)
    first_query = tl.load(tiles_ptr + 2 * tile + 1)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    head_block = tl.program_id(1)
    num_head_blocks = tl.num_programs(1)
    num_rows = tl.minimum(BLOCK_Q, query_len - first_query) * BLOCK_HEADS
    dims = tl.arange(0, PADDED_DIM)
    program_in_tile = (cut - 1 - first_part) * tl.num_programs(2) + tl.program_id(2)
    programs_per_tile = (last_part - first_part) * tl.num_programs(2)
    for first_row in tl.range(program_in_tile * MERGED_ROWS, num_rows, programs_per_tile * MERGED_ROWS):
        rows = first_row + tl.arange(0, MERGED_ROWS)
        heads = head_block * BLOCK_HEADS + rows % BLOCK_HEADS
        row_mask = (rows < num_rows) & (heads < NUM_HEADS)
        acc = tl.zeros([MERGED_ROWS, PADDED_DIM], dtype=tl.float32)
        running_max = tl.full([MERGED_ROWS], float("-inf"), dtype=tl.float32)
        running_sum = tl.zeros([MERGED_ROWS], dtype=tl.float32)
        for first in tl.range(first_part, last_part + 1, MERGED_SLOTS):
            parts = first + tl.arange(0, MERGED_SLOTS)
            # The part in which the tile begins uses an odd slot.
            slots = (2 * parts + (parts == first_part).to(tl.int32)).to(tl.int64)
            partial_rows = (slots[:, None] * num_head_blocks + head_block) * BLOCK_M + rows[None, :]
            mask = (parts <= last_part)[:, None] & row_mask[None, :]
            lse = tl.load(partial_lse_ptr + partial_rows, mask=mask, other=float("-inf"))
            partial_out = tl.load(
                partial_out_ptr + partial_rows[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
                other=0.0,
            )
            new_max = tl.maximum(running_max, tl.max(lse, 0))
            # Avoid infinity minus infinity in rows that have seen no key yet.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(lse - shift[None, :])
            rescale = tl.exp2(running_max - shift)
            running_sum = running_sum * rescale + tl.sum(weights, 0)
            acc = acc * rescale[:, None] + tl.sum(partial_out * weights[:, :, None], 0)
            running_max = new_max
        # Rows past the tile's last row have a sum of 0, and are not stored below.
        acc = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
        tokens = (query_start + first_query + rows // BLOCK_HEADS).to(tl.int64)
        out_ptrs = out_ptr + ((tokens * NUM_HEADS + heads) * HEAD_DIM)[:, None] + dims[None, :]
        mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
