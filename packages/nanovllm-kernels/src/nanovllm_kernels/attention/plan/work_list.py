"""Plans work lists: the device cuts the attention work of a step into parts of equal length.

The host only needs upper bounds on lengths, so that one captured graph serves all lengths within the bounds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.platform import INTERPRETER_SMS, describe_device

__all__ = ["NO_LIMIT", "WorkList", "WorkListFilter", "make_work_list", "split_query_lens"]

NO_LIMIT = 2**31 - 1  # The largest int32. Numbers of queries and requests never exceed this number.


class WorkList(NamedTuple):
    """Holds the work of one attention launch.

    A tile is up to `block_q` consecutive queries of one request. The keys that a tile's queries see are cut into blocks
    of `block_n` keys. The sequence of all tiles' blocks is cut into parts of equal length (Osama et al. 2023). A part
    may begin within a tile. One program computes one part for one block of heads.

    tile_first_blocks: int64 [max_tiles + 1], index of each tile's first block, then the total number of blocks.
    tiles: int32 [max_tiles, 2], pairs (request, index of the tile's first query within the request).
    parts: int64 [num_parts + 1, 2], pairs (index of the part's first block, index of the block's tile). The
        last row, and the rows of empty parts, are (total number of blocks, total number of tiles).
    """

    tile_first_blocks: Tensor
    tiles: Tensor
    parts: Tensor

    @property
    def num_parts(self) -> int:
        """Number of parts, including empty parts."""
        return self.parts.shape[0] - 1


class WorkListFilter(NamedTuple):
    """Decides which requests with several queries stay in work lists. Another kernel computes the excluded requests.

    The filter excludes each request that has at least `query_limit` queries, or fewer than `min_context` tokens before
    its first query. If the remaining requests have at least `query_limit` queries in total, the filter excludes these
    requests too.

    max_excluded: maximum number of excluded requests. Further requests stay in work lists.
    """

    query_limit: int = NO_LIMIT
    min_context: int = 0
    max_excluded: int = NO_LIMIT


def split_query_lens(
    narrow_tile_queries: int, wide_tile_queries: int, min_query_len: int, max_query_len: int
) -> tuple[range, range]:
    """Return the query lengths (queries per request) for narrow tiles, then for wide tiles. A range may be empty.

    narrow_tile_queries, wide_tile_queries: number of query positions in a tile.
    min_query_len: 1, or 2 if another kernel computes decodes (requests with one query).
    max_query_len: the host's bound on query lengths.
    """
    if max_query_len <= narrow_tile_queries and wide_tile_queries != narrow_tile_queries:
        return range(min_query_len, max_query_len + 1), range(0)
    # Without decodes, a launch of narrow tiles would be mostly idle. Use only wide tiles.
    uses_narrow = min_query_len == 1 and wide_tile_queries != narrow_tile_queries
    narrow = range(min_query_len, narrow_tile_queries + 1) if uses_narrow else range(0)
    return narrow, range(narrow.stop or min_query_len, max_query_len + 1)


def make_work_list(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query_lens: range,
    request_filter: WorkListFilter,
    config: tile_configs.TileConfig,
    *,
    block_q: int,
    num_head_blocks: int,
    num_tokens: int,
) -> tuple[WorkList, Tensor]:
    """Plan the requests that `request_filter` leaves in work lists and whose number of queries is in `query_lens`.

    seq_lens, query_start_loc: see `AttentionBatch`.
    block_q: number of query positions in a tile.
    num_head_blocks: number of programs that compute the same part for different heads.
    num_tokens: upper bound on the number of tokens in the step.
    Returns: the work list, and the number of queries of each excluded request (int32 [B], 0 for other requests).
    """
    num_reqs = seq_lens.shape[0]
    max_query_len = query_lens.stop - 1
    # The last tile of each request may be partial, which adds less than one tile per request.
    max_tiles = min(num_tokens // block_q + num_reqs, num_reqs * -(-max_query_len // block_q))
    num_programs = (describe_device(seq_lens.device).num_sms or INTERPRETER_SMS) * config.ctas_per_sm
    *work, excluded_query_lens = _plan_work_op(
        seq_lens,
        query_start_loc,
        max_tiles,
        tile_configs.choose_num_parts(num_head_blocks, num_programs),
        block_q,
        config.block_n,
        tile_configs.min_part_blocks(config),
        query_lens.start,
        max_query_len,
        *request_filter,
    )
    return WorkList(*work), excluded_query_lens


@torch.library.custom_op("nanovllm::plan_work", mutates_args=())
def _plan_work_op(
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
    """Return the three tensors of a `WorkList`, then the number of queries of each excluded request (int32 [B]).

    min_part_blocks: minimum number of blocks in a part. Other arguments: see `make_work_list` and `WorkListFilter`.
    """
    from nanovllm_kernels.attention.plan import triton_work_list

    return triton_work_list.plan_work(
        seq_lens,
        query_start_loc,
        max_tiles,
        num_parts,
        block_q,
        block_n,
        min_part_blocks,
        min_query_len,
        max_query_len,
        query_limit,
        min_context,
        max_excluded,
    )


@_plan_work_op.register_fake
def _(
    seq_lens: Tensor, _query_start_loc: Tensor, max_tiles: int, num_parts: int, *_: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        seq_lens.new_empty((max_tiles + 1,), dtype=torch.int64),
        seq_lens.new_empty((max_tiles, 2)),
        seq_lens.new_empty((num_parts + 1, 2), dtype=torch.int64),
        seq_lens.new_empty((seq_lens.shape[0],)),
    )
