"""Attention of requests with several queries by FlashAttention's CuTe build (Shah et al. 2024), on Hopper.

FlashAttention does not split keys, so `list_rule` leaves short chunks over long contexts to work lists.
"""

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm_kernels.attention.work_list import Rule
from nanovllm_kernels.platform import make_cache_directory

HEAD_DIMS = (64, 96, 128, 256)
# Key and value dimensions for keys and values in rows instead of pages.
PLAIN_HEAD_DIMS = ((192, 128),)
# Least bound on query lengths given to FlashAttention: for batches that fit one tile it would compile another kernel,
# on first use. Bounds need not be tight, so a bound above a tile's rows keeps one kernel for all batches.
LEAST_BOUND = 256
# Captured steps with fewer tokens do not use FlashAttention: their chunks would leave most of the device idle.
LEAST_CAPTURED = 512
# Rows of a tile: query positions times query heads per key-value head.
TILE_ROWS = 128
# FlashAttention copies pages of this size, its tile of keys, by the bulk copy engine (TMA). It copies smaller pages
# token by token, at 0.83 to 0.92 of that rate.
COPIED_PAGE_SIZE = 128
COPIED_HEAD_DIMS = (64, 96, 128)
# FlashAttention's tiles are faster than ours once chunks fill this share of the device. On an H200 with 32/8 heads over
# 32,768 tokens, 100 queries take 293 us by lists and 423 by FlashAttention; 256 take 541 and 432.
LEAST_FILLED = 0.35
# Below this context a chunk is so short that the launch costs more than idle multiprocessors.
LEAST_CONTEXT = 1024
# Most requests of a FlashAttention launch: empty places cost time (46 us for 256 on an H200 with 32/8 heads). A step
# with more requests has short ones.
MAX_REQUESTS = 32


class FlashRequests(NamedTuple):
    """The requests of one launch, one per place. A place may be empty.

    query_starts: int32 [P + 1], token at which each request's queries begin; the last entry is not used.
    query_lens: int32 [P], 0 for an empty place.
    seq_lens: int32 [P]. None: keys and values are the step's own, in rows like the queries.
    block_tables: int32 [P, max_blocks]. None: likewise.
    """

    query_starts: Tensor
    query_lens: Tensor
    seq_lens: Tensor | None = None
    block_tables: Tensor | None = None


def list_rule(num_heads: int, num_sms: int) -> Rule:
    """Return the rule by which requests with several queries are left to work lists on a device with `num_sms`."""
    return Rule(int(LEAST_FILLED * TILE_ROWS * num_sms / num_heads), LEAST_CONTEXT, MAX_REQUESTS)


def whole_requests(query_start_loc: Tensor) -> FlashRequests:
    """Return the requests with several queries, whose keys are the step's own. query_start_loc: int32 [B + 1]."""
    lengths = query_start_loc.diff()
    return FlashRequests(query_start_loc, lengths * (lengths > 1))


def gather_requests(
    query_lens: Tensor, seq_lens: Tensor, query_start_loc: Tensor, block_tables: Tensor, page_size: int
) -> FlashRequests:
    """Return the requests with `query_lens` int32 [B] > 0, at most MAX_REQUESTS. Other arguments: see `plan_batch`."""
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
    """Return the tensors of `FlashRequests`. Only the pages up to a request's length are copied."""
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
    """Whether FlashAttention is used for paged keys and values of this head size."""
    return head_dim in HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def supports_plain(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashAttention is used for keys and values of these sizes in rows."""
    return (key_dim, value_dim) in PLAIN_HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    requests: FlashRequests,
    scale: float,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Attend for `requests` over their pages, and write their rows of `out`.

    Only shapes and `max_query_len` shape the launch, so that a captured graph can be replayed for any lengths.
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
    """Attend for `requests` whose tokens are all in this step, and write their rows of `out`.

    q: [T, H, D], keys: [T, K, D], values: [T, K, V], the last dimension contiguous. Others: see `paged_prefill`.
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
    """Import FlashAttention's forward function. The public one takes no `out`, and costs twice the host time."""
    # FlashAttention reads these variables once, at import.
    directory = make_cache_directory("flash_attention")
    if directory is not None:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(directory))
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd
