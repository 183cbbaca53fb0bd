"""Attention of requests with several queries each, by FlashAttention's CuTe build (Shah et al. 2024), on Hopper.

FlashAttention doesn't cut keys, so `list_rule` leaves short chunks over long contexts to work lists.
"""

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention.work_list import Rule
from nanovllm_kernels.platform import kept_directory

HEAD_DIMS = (64, 96, 128, 256)
# Of keys and of values, where these are no pages but rows.
PLAIN_HEAD_DIMS = ((192, 128),)
# Of what a whole batch fits into one tile FlashAttention makes a kernel of its own, compiled when such a batch first
# comes. The bound it is given need not be tight: with one above a tile's rows, there is one kernel for all batches.
LEAST_BOUND = 256
# Captured steps of fewer tokens go without: their chunks would leave most of the device idle.
LEAST_CAPTURED = 512
# Rows of a tile: query positions times the query heads of one key-value head.
TILE_ROWS = 128
# FlashAttention reads pages of as many tokens as its tile of keys has by the bulk copy engine (TMA), and smaller ones
# token by token, at 0.83 to 0.92 of that rate.
COPIED_PAGE_SIZE = 128
COPIED_HEAD_DIMS = (64, 96, 128)
# Chunks that together fill more than this share of the device are left to FlashAttention, whose tiles are faster than
# ours: on one H200, 32/8 heads, 100 queries over 32,768 tokens take 293 us by lists and 423 by FlashAttention, 256 take
# 541 and 432.
LEAST_FILLED = 0.35
# Below this context a chunk takes so little time that the share of the device matters less than the launch.
LEAST_CONTEXT = 1024
# FlashAttention gets at most so many requests of a step: each place of a launch costs time, also an empty one (one
# H200, 32/8 heads: 46 us for 256 empty places). More requests in a step are short ones.
MAX_REQUESTS = 32


class FlashRequests(NamedTuple):
    """The requests of one launch, each in a place. A place may be empty.

    query_starts: int32 [P + 1], the token at which each request's queries begin; the last entry is not used.
    query_lens: int32 [P], 0 for an empty place.
    seq_lens: int32 [P], or None where the requests' keys and values lie beside their queries.
    block_tables: int32 [P, max_blocks], or None likewise.
    """

    query_starts: Tensor
    query_lens: Tensor
    seq_lens: Tensor | None = None
    block_tables: Tensor | None = None


def list_rule(num_heads: int, num_sms: int) -> Rule:
    """Which requests with several queries are left to work lists, on a device with `num_sms`."""
    return Rule(int(LEAST_FILLED * TILE_ROWS * num_sms / num_heads), LEAST_CONTEXT, MAX_REQUESTS)


def whole_requests(query_start_loc: Tensor) -> FlashRequests:
    """The requests with several queries by `query_start_loc` int32 [B + 1], whose keys lie beside their queries."""
    lengths = query_start_loc.diff()
    return FlashRequests(query_start_loc, lengths * (lengths > 1))


def gather_requests(
    query_lens: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_tables: Tensor, page_size: int
) -> FlashRequests:
    """The requests that `query_lens` int32 [B] leaves queries, at most MAX_REQUESTS. The rest as for `plan_batch`."""
    num_places = min(len(query_lens), MAX_REQUESTS)
    found = _gather_requests_op(query_lens, seq_lens, query_start_loc, block_tables, num_places, page_size)
    return FlashRequests(*found)


@torch.library.custom_op("nanovllm::gather_requests", mutates_args=())
def _gather_requests_op(
    query_lens: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_tables: Tensor,
    num_places: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of `FlashRequests`. Of a block table only the pages up to the request's length are copied."""
    from nanovllm_kernels.attention import triton_gather_requests

    return triton_gather_requests.gather_requests(
        query_lens, seq_lens, query_start_loc, block_tables, num_places, page_size
    )


@_gather_requests_op.register_fake
def _(
    query_lens: Tensor,
    _seq_lens: Tensor,
    _query_start_loc: Tensor,
    block_tables: Tensor,
    num_places: int,
    _page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        query_lens.new_empty((num_places + 1,)),
        query_lens.new_empty((num_places,)),
        query_lens.new_empty((num_places,)),
        block_tables.new_empty((num_places, block_tables.shape[1])),
    )


def supports(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashAttention has a kernel for such heads."""
    return head_dim in HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def supports_plain(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether it is used for such heads where keys and values lie in rows."""
    return (key_dim, value_dim) in PLAIN_HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    requests: FlashRequests,
    scale: float,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Attend for `requests` over their pages; writes the rows of `out` that are theirs.

    Only the shapes and the bound shape the launch, so that a captured graph may be replayed for any lengths.
    """
    k_cache, v_cache = kv_cache.chunk(2, 2)
    _forward()(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=requests.query_starts,
        seqused_q=requests.query_lens,
        seqused_k=requests.seq_lens,
        page_table=requests.block_tables,
        max_seqlen_q=max(max_query_len, LEAST_BOUND),
        softmax_scale=scale,
        causal=True,
        out=out,
    )


def plain_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    requests: FlashRequests,
    scale: float,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Attend for `requests`, all of whose tokens are here; writes the rows of `out` that are theirs.

    q [T, H, D], keys [T, K, D], values [T, K, V]: the last dimension contiguous. The rest as in `paged_prefill`.
    """
    bound = max(max_query_len, LEAST_BOUND)
    _forward()(
        q,
        keys,
        values,
        cu_seqlens_q=requests.query_starts,
        cu_seqlens_k=requests.query_starts,
        seqused_q=requests.query_lens,
        max_seqlen_q=bound,
        max_seqlen_k=bound,
        softmax_scale=scale,
        causal=True,
        out=out,
    )


@functools.cache
def _forward() -> Callable[..., object]:
    """FlashAttention's. The public function takes no result to write into, and spends as long as this one on what only
    training needs.
    """
    # Whether it keeps what it compiles it asks once, when it is imported.
    directory = kept_directory("flash_attention")
    if directory is not None:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(directory))
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd
