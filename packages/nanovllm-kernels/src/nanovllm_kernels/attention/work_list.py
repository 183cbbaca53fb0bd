"""Work lists: the attention work of a step, cut on the device into parts of equal length.

The host gives bounds on shapes only, so that one captured graph serves requests of any lengths.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.platform import describe_device

__all__ = ["NO_LIMIT", "Rule", "WorkList", "make_work_list", "query_classes"]

NO_LIMIT = 2**31 - 1


class WorkList(NamedTuple):
    """The work of one attention launch.

    A tile is up to BLOCK_Q consecutive queries of one request. Its work is the blocks of BLOCK_N keys that these see.
    The blocks of all tiles are cut into parts of equal length, one per program of a head block (Osama et al. 2023). A
    part may hold many tiles, and a tile may span many parts.

    tile_starts: int64 [max_tiles + 1], the number of blocks before each tile; then the total.
    tiles: int32 [max_tiles, 2], each tile's request, and its first query within the request.
    parts: int64 [parts + 1, 2], the block at which each part begins, at most the total, and the tile that contains it
        (the number of tiles for parts after the last block).
    """

    tile_starts: Tensor
    tiles: Tensor
    parts: Tensor

    @property
    def num_parts(self) -> int:
        """Number of parts per block of heads."""
        return self.parts.shape[0] - 1


class Rule(NamedTuple):
    """Selects the requests with several queries that belong to work lists.

    These have a context (tokens before the first query) of at least `min_context` and fewer than `full_query_len`
    queries, each and together. Of all others the first `max_rest` are left to another kernel.
    """

    full_query_len: int = NO_LIMIT
    min_context: int = 0
    max_rest: int = NO_LIMIT


def query_classes(narrow_q: int, wide_q: int, least: int, max_query_len: int) -> tuple[range, range]:
    """Return the ranges of query lengths for narrow and for wide tiles; either may be empty.

    narrow_q, wide_q: query positions in a tile of each kind.
    least: 1, or 2 if another kernel takes decodes.
    max_query_len: the host's bound.
    """
    if max_query_len <= narrow_q and wide_q != narrow_q:
        return range(least, max_query_len + 1), range(0)
    # Beside the decode kernel, a launch for a few queries would be mostly empty: wide tiles take them too.
    narrow = range(least, narrow_q + 1) if least == 1 and wide_q != narrow_q else range(0)
    return narrow, range(narrow.stop or least, max_query_len + 1)


def make_work_list(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query_lens: range,
    rule: Rule,
    config: tiles.TileConfig,
    *,
    block_q: int,
    head_blocks: int,
    num_tokens: int,
) -> tuple[WorkList, Tensor]:
    """Plan the work of the requests with a number of queries in `query_lens` that `rule` gives to work lists.

    config, block_q: tile of the launch, and its query positions.
    head_blocks: programs that compute the same part for different heads.
    num_tokens: bound on the tokens of the step.
    Returns: the list, and int32 [B], the number of queries of each request with several that the rule leaves to another
        kernel, else 0.
    """
    num_reqs = seq_lens.shape[0]
    longest = query_lens.stop - 1
    # Each request begins a new tile, which adds less than one tile per request.
    max_tiles = min(num_tokens // block_q + num_reqs, num_reqs * -(-longest // block_q))
    num_slots = (describe_device(seq_lens.device).num_sms or tiles.INTERPRETER_SMS) * config.ctas_per_sm
    *work, rest_lens = _plan_work_op(
        seq_lens,
        query_start_loc,
        max_tiles,
        tiles.choose_parts(head_blocks, num_slots),
        block_q,
        config.block_n,
        tiles.least_blocks(config),
        query_lens.start,
        longest,
        *rule,
    )
    return WorkList(*work), rest_lens


@torch.library.custom_op("nanovllm::plan_work", mutates_args=())
def _plan_work_op(
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
    """Return the tensors of a `WorkList`, then the second result of `make_work_list`.

    min_blocks: least number of blocks in a part. Other arguments: see `make_work_list` and `Rule`.
    """
    from nanovllm_kernels.attention import triton_work_list

    return triton_work_list.plan_work(
        seq_lens,
        query_start_loc,
        max_tiles,
        num_parts,
        block_q,
        block_n,
        min_blocks,
        min_query_len,
        max_query_len,
        full_query_len,
        min_context,
        max_rest,
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
