"""Plans work lists on the device, in one program. `work_list.WorkList` defines tiles, key blocks and parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of requests, tiles or parts that the program processes at once.
PLAN_BLOCK = 512


def plan_work(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_tiles: int,
    num_parts: int,
    block_q: int,
    block_n: int,
    min_part_blocks: int,
    min_query_len: int,
    max_query_len: int,
    query_limit: int,
    min_context: int,
    max_excluded: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implement the operator `work_list._plan_work_op`, which describes the arguments and results."""
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
        min_part_blocks,
        min_query_len,
        max_query_len,
        query_limit,
        min_context,
        max_excluded,
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        BLOCK=PLAN_BLOCK,
        num_warps=4,
    )
    return outputs


@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_parts",
        "request_search_steps",
        "tile_search_steps",
        "min_query_len",
        "max_query_len",
        "query_limit",
        "min_context",
        "max_excluded",
        "min_part_blocks",
    ],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"],
)
def _plan_work(
    seq_lens_ptr,
    query_start_loc_ptr,
    tile_ends_ptr,
    tile_first_blocks_ptr,
    tiles_ptr,
    parts_ptr,
    excluded_query_lens_ptr,
    num_reqs,
    num_parts,
    request_search_steps,
    tile_search_steps,
    min_part_blocks,
    min_query_len,
    max_query_len,
    query_limit,
    min_context,
    max_excluded,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the work list. Search steps are iterations of a binary search. Arguments: see `work_list._plan_work_op`."""
    lanes = tl.arange(0, BLOCK)
    # Count the queries of candidates: requests with few queries and a long context. If the candidates have at
    # least `query_limit` queries in total, set `query_limit` to 0, which excludes the candidates too.
    num_candidate_queries = 0
    for first in tl.range(0, num_reqs, BLOCK):
        requests = first + lanes
        query_lens, context_lens = _load_lengths(seq_lens_ptr, query_start_loc_ptr, requests, requests < num_reqs)
        is_candidate = (query_lens > 1) & (query_lens < query_limit) & (context_lens >= min_context)
        num_candidate_queries += tl.sum(tl.where(is_candidate, query_lens, 0), 0)
    query_limit = tl.where(num_candidate_queries < query_limit, query_limit, 0)

    # Store the total number of tiles up to the end of each request.
    num_tiles = 0
    num_excluded = 0
    for first in tl.range(0, num_reqs, BLOCK):
        requests = first + lanes
        in_range = requests < num_reqs
        query_lens, context_lens = _load_lengths(seq_lens_ptr, query_start_loc_ptr, requests, in_range)
        is_excluded = (query_lens > 1) & ((query_lens >= query_limit) | (context_lens < min_context))
        ranks = num_excluded + tl.cumsum(is_excluded.to(tl.int32), 0)
        num_excluded += tl.sum(is_excluded.to(tl.int32), 0)
        is_excluded &= ranks <= max_excluded
        is_listed = (is_excluded == 0) & (query_lens >= min_query_len) & (query_lens <= max_query_len)
        request_tiles = tl.where(is_listed, tl.cdiv(query_lens, BLOCK_Q), 0)
        tl.store(tile_ends_ptr + requests, num_tiles + tl.cumsum(request_tiles, 0), mask=in_range)
        tl.store(excluded_query_lens_ptr + requests, tl.where(is_excluded, query_lens, 0), mask=in_range)
        num_tiles += tl.sum(request_tiles, 0)
    tl.debug_barrier()

    # Find each tile's request and first query, and store the number of key blocks up to the end of each tile.
    num_blocks = tl.zeros((), tl.int64)
    tl.store(tile_first_blocks_ptr, num_blocks)
    for first in tl.range(0, num_tiles, BLOCK):
        tiles = first + lanes
        in_range = tiles < num_tiles
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + (num_reqs - 1)
        for _ in tl.range(0, request_search_steps):
            middle = (low + high) // 2
            ends_before_tile = tl.load(tile_ends_ptr + middle, mask=in_range, other=0) <= tiles
            low = tl.where(ends_before_tile & in_range, middle + 1, low)
            high = tl.where(ends_before_tile, high, middle)
        first_tiles = tl.load(tile_ends_ptr + low - 1, mask=in_range & (low > 0), other=0)
        first_queries = (tiles - first_tiles) * BLOCK_Q  # `low` is now each tile's request.
        query_lens, context_lens = _load_lengths(seq_lens_ptr, query_start_loc_ptr, low, in_range)
        tile_blocks = tl.cdiv(context_lens + tl.minimum(first_queries + BLOCK_Q, query_lens), BLOCK_N)
        tile_blocks = tl.where(in_range, tile_blocks, 0).to(tl.int64)
        tl.store(tile_first_blocks_ptr + tiles + 1, num_blocks + tl.cumsum(tile_blocks, 0), mask=in_range)
        tl.store(tiles_ptr + 2 * tiles, low, mask=in_range)
        tl.store(tiles_ptr + 2 * tiles + 1, first_queries, mask=in_range)
        num_blocks += tl.sum(tile_blocks, 0)
    tl.debug_barrier()

    # Find the block and the tile at which each part begins.
    blocks_per_part = tl.maximum(tl.cdiv(num_blocks, num_parts), min_part_blocks)
    for first in tl.range(0, num_parts + 1, BLOCK):
        parts = first + lanes
        in_range = parts <= num_parts
        part_starts = tl.minimum(parts.to(tl.int64) * blocks_per_part, num_blocks)
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + num_tiles
        for _ in tl.range(0, tile_search_steps):
            middle = (low + high) // 2
            is_searching = in_range & (low < high)
            ends_before_part = tl.load(tile_first_blocks_ptr + middle + 1, mask=is_searching, other=0) <= part_starts
            low = tl.where(ends_before_part & is_searching, middle + 1, low)
            high = tl.where(ends_before_part, high, middle)
        tl.store(parts_ptr + 2 * parts, part_starts, mask=in_range)
        tl.store(parts_ptr + 2 * parts + 1, low.to(tl.int64), mask=in_range)


@triton.jit
def _load_lengths(seq_lens_ptr, query_start_loc_ptr, requests, mask):
    """Return (number of queries, number of tokens before the queries) of each request."""
    query_starts = tl.load(query_start_loc_ptr + requests, mask=mask, other=0)
    query_lens = tl.load(query_start_loc_ptr + requests + 1, mask=mask, other=0) - query_starts
    return query_lens, tl.load(seq_lens_ptr + requests, mask=mask, other=0) - query_lens
