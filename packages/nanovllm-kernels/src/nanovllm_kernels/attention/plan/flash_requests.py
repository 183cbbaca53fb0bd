"""Selects the requests for which FlashAttention computes attention.

In FlashAttention, one program reads all keys of a tile (a block of queries). A short chunk with a long context would
leave most of the device idle. Such chunks go to work lists, which divide a tile's keys among programs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention.plan.work_list import WorkListFilter

# Rows of FlashAttention's tile. Each query position has one row per query head that shares a key-value head.
FLASH_TILE_ROWS = 128
# FlashAttention is faster than work lists once the tiles of chunks fill this share of the device (measured on an H200).
MIN_FILLED_SHARE = 0.35
# Minimum number of tokens before a chunk in a work list. With fewer tokens, the extra launch costs more time than the
# work list saves.
MIN_WORK_LIST_CONTEXT = 1024
# Maximum number of entries (requests) in a launch. Even an unused entry costs time.
MAX_FLASH_REQUESTS = 32


class FlashRequests(NamedTuple):
    """Holds the requests of one FlashAttention launch. Each of the E entries holds one request, or is unused.

    query_starts: int32 [E + 1], index of each request's first query in the step. The last element is not read.
    query_lens: int32 [E], number of each request's queries, 0 for an unused entry.
    seq_lens: int32 [E], number of each request's tokens. None: the requests attend only to this step's tokens.
    block_tables: int32 [E, max_blocks], page numbers of each request. None if `seq_lens` is None.
    """

    query_starts: Tensor
    query_lens: Tensor
    seq_lens: Tensor | None = None
    block_tables: Tensor | None = None


def work_list_filter(num_heads: int, num_sms: int) -> WorkListFilter:
    """Return a filter that leaves a chunk in work lists if FlashAttention would be slower."""
    query_limit = int(MIN_FILLED_SHARE * FLASH_TILE_ROWS * num_sms / num_heads)
    return WorkListFilter(query_limit, MIN_WORK_LIST_CONTEXT, MAX_FLASH_REQUESTS)


def select_whole_prompts(query_start_loc: Tensor) -> FlashRequests:
    """Return all requests with several queries. All tokens of these requests must be in the step."""
    query_lens = query_start_loc.diff()
    return FlashRequests(query_start_loc, query_lens * (query_lens > 1))


def gather_flash_requests(
    query_lens: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_tables: Tensor, page_size: int
) -> FlashRequests:
    """Return the requests with `query_lens` > 0, in order.

    query_lens: int32 [B], number of each request's queries. At most MAX_FLASH_REQUESTS numbers may be above 0.
    """
    num_entries = min(len(query_lens), MAX_FLASH_REQUESTS)
    tensors = _gather_requests_op(query_lens, seq_lens, query_start_loc, block_tables, num_entries, page_size)
    return FlashRequests(*tensors)


@torch.library.custom_op("nanovllm::gather_requests", mutates_args=())
def _gather_requests_op(
    query_lens: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_tables: Tensor,
    num_entries: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of `FlashRequests`. Page numbers past a request's length may be undefined."""
    from nanovllm_kernels.attention.plan import triton_flash_requests

    return triton_flash_requests.gather_requests(
        query_lens, seq_lens, query_start_loc, block_tables, num_entries, page_size
    )


@_gather_requests_op.register_fake
def _(
    query_lens: Tensor,
    _seq_lens: Tensor,
    _query_start_loc: Tensor,
    block_tables: Tensor,
    num_entries: int,
    _page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        query_lens.new_empty((num_entries + 1,)),
        query_lens.new_empty((num_entries,)),
        query_lens.new_empty((num_entries,)),
        block_tables.new_empty((num_entries, block_tables.shape[1])),
    )
