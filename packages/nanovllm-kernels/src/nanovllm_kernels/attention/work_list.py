"""Work lists: the attention work of a step, cut on the device into parts of equal length.

The host gives bounds on shapes only, so one captured graph serves requests of any lengths.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.platform import describe

__all__ = ["NO_LIMIT", "Rule", "WorkList", "make_work_list", "query_classes"]

NO_LIMIT = 2**31 - 1


class WorkList(NamedTuple):
    """The work of one attention launch.

    A tile is up to BLOCK_Q consecutive queries of one request, and its work is the blocks of keys that they see, of
    BLOCK_N tokens. The blocks of all tiles, one tile after another, are cut into parts of equal length, one for each
    program of a head block (Osama et al. 2023). A part may hold many tiles, and a tile may lie in many parts.

    tile_starts: int64 [max_tiles + 1], the blocks of all tiles before each tile; the last tile's entry is followed by
        the total.
    tiles: int32 [max_tiles, 2], a tile's request, and its first query within the request.
    parts: int64 [parts + 1, 2], the block at which each part begins, at most the total; and the tile in which it
        begins, the number of tiles for a part that begins behind the last.
    """

    tile_starts: Tensor
    tiles: Tensor
    parts: Tensor

    @property
    def num_parts(self) -> int:
        """How many parts there are for each block of heads."""
        return self.parts.shape[0] - 1


class Rule(NamedTuple):
    """Which requests with several queries belong to work lists: those with a context of at least `min_context` tokens
    before the first query, if all of them with fewer queries than `full_query_len` have fewer together, too. Of all
    others the first `max_rest` are left to another kernel.
    """

    full_query_len: int = NO_LIMIT
    min_context: int = 0
    max_rest: int = NO_LIMIT


def query_classes(narrow_q: int, wide_q: int, least: int, max_query_len: int) -> tuple[range, range]:
    """(query lengths for narrow tiles, query lengths for wide tiles), either may be empty.

    narrow_q, wide_q: query positions in a tile of each kind. least: 1, or 2 where another kernel has the decodes.
    max_query_len: the host's bound.
    """
    if max_query_len <= narrow_q and wide_q != narrow_q:
        return range(least, max_query_len + 1), range(0)
    # A launch for a few queries beside the decodes' kernel would mostly be empty: wide tiles take them too.
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
    """Plan the work of the requests whose number of queries is in `query_lens` and which `rule` gives to work lists.

    config, block_q: the tiling of the launch, and the query positions of a tile. head_blocks: programs that do the same
        part for different heads. num_tokens: a bound on the tokens of the step.

    Returns the list, and int32 [B]: the number of queries of each request with several that the rule leaves to another
    kernel, 0 for other requests.
    """
    num_reqs = seq_lens.shape[0]
    longest = query_lens.stop - 1
    # Tiles start afresh at each request, which wastes less than one a request.
    max_tiles = min(num_tokens // block_q + num_reqs, num_reqs * -(-longest // block_q))
    num_slots = (describe(seq_lens.device).num_sms or tiles.INTERPRETER_SMS) * config.ctas_per_sm
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
    """The tensors of a `WorkList`, then what `make_work_list` returns beside it.

    min_blocks: the least blocks of a part. The others are as for `make_work_list` and in `Rule`.
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
