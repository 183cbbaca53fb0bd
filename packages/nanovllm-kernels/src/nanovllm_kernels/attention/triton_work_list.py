"""Work lists on the device: the planning kernel, functions with which attention reads a list, and the merge of parts.

`work_list.WorkList` describes the tensors.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.attention.work_list import WorkList
from nanovllm_kernels.platform import can_overlap_launches

# Requests, tiles or parts that the planning program processes at once.
PLAN_BLOCK = 512
# Approximate size of a merge launch: all programs fit on the device at once, so that an empty launch is short.
MERGE_PROGRAMS = 2048
# Elements of partial results that a merging program loads at once.
MERGE_NUMBERS = 4096


def plan_work(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_tiles: int,
    num_parts: int,
    block_q: int,
    block_n: int,
    min_blocks: int,
    min_query_len: int,
    max_query_len: int,
    full_query_len: int,
    min_context: int,
    max_rest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `work_list._plan_work_op`."""
    num_reqs = seq_lens.shape[0]
    tile_ends = seq_lens.new_empty((num_reqs,))
    outputs = (
        seq_lens.new_empty((max_tiles + 1,), dtype=torch.int64),
        seq_lens.new_empty((max_tiles, 2)),
        seq_lens.new_empty((num_parts + 1, 2), dtype=torch.int64),
        seq_lens.new_empty((num_reqs,)),
    )
    _plan_work[(1,)](
        seq_lens,
        query_start_loc,
        tile_ends,
        *outputs,
        num_reqs,
        num_parts,
        num_reqs.bit_length(),
        max_tiles.bit_length(),
        min_query_len,
        max_query_len,
        full_query_len,
        min_context,
        max_rest,
        min_blocks,
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        BLOCK=PLAN_BLOCK,
        num_warps=4,
    )
    return outputs


def merge_parts(
    partial: Tensor, lse: Tensor, query_start_loc: Tensor, work: WorkList, group: int, block_q: int, out: Tensor
) -> None:
    """Merge the parts of each tile that spans several parts into its rows of `out` [T, H, D].

    partial: float32 [slots, head blocks, rows, D], the softmax results of one part of a tile. Row r of head block b
        holds query r // group of the tile and head b * group + r % group.
    lse: float32 [slots, head blocks, rows], log2 of the softmax's normalizer; -inf for rows that saw no key.
    block_q: query positions of a tile.
    """
    num_parts = work.num_parts
    if num_parts == 1:
        return
    _, head_blocks, num_rows, head_dim = partial.shape
    padded = tiles.next_power_of_2(head_dim)
    # Wide tiles rarely have more than a few parts.
    slots = max(16, MERGE_NUMBERS // padded) if num_rows <= 64 else 4
    rows = max(1, MERGE_NUMBERS // slots // padded)
    row_programs = max(1, min(num_rows // rows, MERGE_PROGRAMS // ((num_parts - 1) * head_blocks)))
    overlap = can_overlap_launches(out.device)
    _merge_parts[(num_parts - 1, head_blocks, row_programs)](
        partial,
        lse,
        query_start_loc,
        *work,
        out,
        num_parts,
        NUM_HEADS=out.shape[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        BLOCK_M=num_rows,
        BLOCK_Q=block_q,
        SLOTS=slots,
        ROWS=rows,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_parts",
        "request_steps",
        "tile_steps",
        "min_query_len",
        "max_query_len",
        "full_query_len",
        "min_context",
        "max_rest",
        "min_blocks",
    ],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"],
)
def _plan_work(
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_ends_ptr,
    tile_starts_ptr,
    tiles_ptr,
    parts_ptr,
    rest_lens_ptr,
    num_reqs,
    num_parts,
    request_steps,
    tile_steps,
    min_query_len,
    max_query_len,
    full_query_len,
    min_context,
    max_rest,
    min_blocks,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Plan in a single program. request_steps, tile_steps: steps of a binary search over requests and over tiles."""
    lanes = tl.arange(0, BLOCK)
    # Count the queries of all chunks that the rule may give to work lists: many of them fill the device without cuts.
    num_queries = 0
    for first in tl.range(0, num_reqs, BLOCK):
        requests = first + lanes
        inside = requests < num_reqs
        begin = tl.load(query_start_loc_ptr + requests, mask=inside, other=0)
        query_lens = tl.load(query_start_loc_ptr + requests + 1, mask=inside, other=0) - begin
        contexts = tl.load(seq_lens_ptr + requests, mask=inside, other=0) - query_lens
        is_short = (query_lens > 1) & (query_lens < full_query_len) & (contexts >= min_context)
        num_queries += tl.sum(tl.where(is_short, query_lens, 0), 0)
    full_query_len = tl.where(num_queries < full_query_len, full_query_len, 0)

    # Count the tiles up to each request.
    num_tiles = 0
    num_rest = 0
    for first in tl.range(0, num_reqs, BLOCK):
        requests = first + lanes
        inside = requests < num_reqs
        begin = tl.load(query_start_loc_ptr + requests, mask=inside, other=0)
        query_lens = tl.load(query_start_loc_ptr + requests + 1, mask=inside, other=0) - begin
        contexts = tl.load(seq_lens_ptr + requests, mask=inside, other=0) - query_lens
        is_rest = (query_lens > 1) & ((query_lens >= full_query_len) | (contexts < min_context))
        ranks = num_rest + tl.cumsum(is_rest.to(tl.int32), 0)
        num_rest += tl.sum(is_rest.to(tl.int32), 0)
        is_rest &= ranks <= max_rest
        listed = (is_rest == 0) & (query_lens >= min_query_len) & (query_lens <= max_query_len)
        counts = tl.where(listed, tl.cdiv(query_lens, BLOCK_Q), 0)
        tl.store(tile_ends_ptr + requests, num_tiles + tl.cumsum(counts, 0), mask=inside)
        tl.store(rest_lens_ptr + requests, tl.where(is_rest, query_lens, 0), mask=inside)
        num_tiles += tl.sum(counts, 0)
    tl.debug_barrier()

    # Find each tile's request and first query, and count the key blocks up to each tile.
    total = tl.zeros((), tl.int64)
    tl.store(tile_starts_ptr, total)
    for first in tl.range(0, num_tiles, BLOCK):
        tile = first + lanes
        inside = tile < num_tiles
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + (num_reqs - 1)
        for _ in tl.range(0, request_steps):
            middle = (low + high) // 2
            behind = tl.load(tile_ends_ptr + middle, mask=inside, other=0) <= tile
            low = tl.where(behind & inside, middle + 1, low)
            high = tl.where(behind, high, middle)
        first_tile = tl.load(tile_ends_ptr + low - 1, mask=inside & (low > 0), other=0)
        query = (tile - first_tile) * BLOCK_Q
        begin = tl.load(query_start_loc_ptr + low, mask=inside, other=0)
        query_lens = tl.load(query_start_loc_ptr + low + 1, mask=inside, other=0) - begin
        contexts = tl.load(seq_lens_ptr + low, mask=inside, other=0) - query_lens
        blocks = tl.cdiv(contexts + tl.minimum(query + BLOCK_Q, query_lens), BLOCK_N)
        blocks = tl.where(inside, blocks, 0).to(tl.int64)
        tl.store(tile_starts_ptr + tile + 1, total + tl.cumsum(blocks, 0), mask=inside)
        tl.store(tiles_ptr + 2 * tile, low, mask=inside)
        tl.store(tiles_ptr + 2 * tile + 1, query, mask=inside)
        total += tl.sum(blocks, 0)
    tl.debug_barrier()

    # Find the block and the tile at which each part begins.
    part_len = tl.maximum(tl.cdiv(total, num_parts), min_blocks)
    for first in tl.range(0, num_parts + 1, BLOCK):
        part = first + lanes
        inside = part <= num_parts
        bounds = tl.minimum(part.to(tl.int64) * part_len, total)
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + num_tiles
        for _ in tl.range(0, tile_steps):
            middle = (low + high) // 2
            searching = inside & (low < high)
            behind = tl.load(tile_starts_ptr + middle + 1, mask=searching, other=0) <= bounds
            low = tl.where(behind & searching, middle + 1, low)
            high = tl.where(behind, high, middle)
        tl.store(parts_ptr + 2 * part, bounds, mask=inside)
        tl.store(parts_ptr + 2 * part + 1, low.to(tl.int64), mask=inside)


@triton.jit
def load_part(tile_starts_ptr, parts_ptr, part):
    """Return (begin of part `part`, its end, its first tile, the tile after its last)."""
    begin = tl.load(parts_ptr + 2 * part)
    first_tile = tl.load(parts_ptr + 2 * part + 1).to(tl.int32)
    end = tl.load(parts_ptr + 2 * part + 2)
    last_tile = tl.load(parts_ptr + 2 * part + 3).to(tl.int32)
    # The part may end exactly at the beginning of its last tile.
    return begin, end, first_tile, last_tile + (tl.load(tile_starts_ptr + last_tile) < end).to(tl.int32)


@triton.jit
def load_segment(tile_starts_ptr, tile, part, part_begin, part_end):
    """Return (first block, end block, slot) of part `part`'s share of a tile.

    slot: index of the partial result, -1 if the part has the whole tile.
    """
    tile_begin = tl.load(tile_starts_ptr + tile)
    tile_end = tl.load(tile_starts_ptr + tile + 1)
    begin = tl.maximum(tile_begin, part_begin)
    end = tl.minimum(tile_end, part_end)
    whole = (begin == tile_begin) & (end == tile_end)
    slot = tl.where(whole, -1, 2 * part + (begin == tile_begin).to(tl.int32))
    return (begin - tile_begin).to(tl.int32), (end - tile_begin).to(tl.int32), slot


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["query_start_loc_ptr"])
def _merge_parts(
    partial_ptr,
    lse_ptr,
    query_start_loc_ptr,
    tile_starts_ptr,
    tiles_ptr,
    parts_ptr,
    out_ptr,
    num_parts,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the parts of the tile that spans a cut, weighted by the share of the softmax that each part saw.

    The programs of all cuts through one tile share its rows.
    """
    if OVERLAP:
        # Followers start only now: an early projection's weight loads would slow down attention's loads.
        gdc_wait()
    cut = tl.program_id(0) + 1
    bound = tl.load(parts_ptr + 2 * cut)
    if bound == tl.load(parts_ptr + 2 * num_parts):
        return
    tile = tl.load(parts_ptr + 2 * cut + 1)
    tile_begin = tl.load(tile_starts_ptr + tile)
    if tile_begin == bound:
        return
    part_len = tl.load(parts_ptr + 2)
    first_part = (tile_begin // part_len).to(tl.int32)
    last_part = ((tl.load(tile_starts_ptr + tile + 1) - 1) // part_len).to(tl.int32)
    request = tl.load(tiles_ptr + 2 * tile)
    first_query = tl.load(tiles_ptr + 2 * tile + 1)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    head_block = tl.program_id(1)
    head_blocks = tl.num_programs(1)
    num_rows = tl.minimum(BLOCK_Q, query_len - first_query) * GROUP
    dims = tl.arange(0, PADDED_DIM)
    share = (cut - 1 - first_part) * tl.num_programs(2) + tl.program_id(2)
    shares = (last_part - first_part) * tl.num_programs(2)
    for first_row in tl.range(share * ROWS, num_rows, shares * ROWS):
        rows = first_row + tl.arange(0, ROWS)
        heads = head_block * GROUP + rows % GROUP
        row_mask = (rows < num_rows) & (heads < NUM_HEADS)
        acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
        running_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        running_sum = tl.zeros([ROWS], dtype=tl.float32)
        for first in tl.range(first_part, last_part + 1, SLOTS):
            parts = first + tl.arange(0, SLOTS)
            # The first part begins the tile, the others continue it.
            slots = (2 * parts + (parts == first_part).to(tl.int32)).to(tl.int64)
            places = (slots[:, None] * head_blocks + head_block) * BLOCK_M + rows[None, :]
            mask = (parts <= last_part)[:, None] & row_mask[None, :]
            lse = tl.load(lse_ptr + places, mask=mask, other=float("-inf"))
            partial = tl.load(
                partial_ptr + places[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=mask[:, :, None] & (dims < HEAD_DIM)[None, None, :],
                other=0.0,
            )
            new_max = tl.maximum(running_max, tl.max(lse, 0))
            # Avoid infinity minus infinity in rows that have seen no key yet.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(lse - shift[None, :])
            rescale = tl.exp2(running_max - shift)
            running_sum = running_sum * rescale + tl.sum(weights, 0)
            acc = acc * rescale[:, None] + tl.sum(partial * weights[:, :, None], 0)
            running_max = new_max
        # Rows past the tile's last have a sum of 0, and are not stored.
        acc = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
        tokens = (query_start + first_query + rows // GROUP).to(tl.int64)
        places = (tokens * NUM_HEADS + heads) * HEAD_DIM
        mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(out_ptr + places[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
