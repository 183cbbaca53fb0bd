"""Attention of requests with several queries each, by FlashAttention's CuTe build (Shah et al. 2024), on Hopper.

FlashAttention doesn't cut keys, so `list_rule` leaves short chunks over long contexts to work lists.
"""

import functools
import os
from collections.abc import Callable

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
# Chunks that together fill more than this share of the device are left to FlashAttention, whose tiles are faster than
# ours: on one H200, 32/8 heads, 100 queries over 32,768 tokens take 293 us by lists and 423 by FlashAttention, 256 take
# 541 and 432.
LEAST_FILLED = 0.35
# Below this context a chunk takes so little time that the share of the device matters less than the launch.
LEAST_CONTEXT = 1024


def list_rule(num_heads: int, num_sms: int) -> Rule:
    """Which requests with several queries are left to work lists, on a device with `num_sms`."""
    return Rule(int(LEAST_FILLED * TILE_ROWS * num_sms / num_heads), LEAST_CONTEXT)


def supports(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashAttention has a kernel for such heads."""
    return head_dim in HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def supports_plain(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether it is used for such heads where keys and values lie in rows."""
    return (key_dim, value_dim) in PLAIN_HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    query_lens: Tensor,
    scale: float,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Attend for requests with `query_lens` int32 [B] queries, of which none leaves a request out, however many it has
    by `query_start_loc` int32 [B + 1]; writes the rows of `out` that are theirs.

    Only the shapes and the bound shape the launch, so that a captured graph may be replayed for any lengths.
    """
    k_cache, v_cache = kv_cache.chunk(2, 2)
    _forward()(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=query_start_loc,
        seqused_q=query_lens,
        seqused_k=seq_lens,
        page_table=block_tables,
        max_seqlen_q=max(max_query_len, LEAST_BOUND),
        softmax_scale=scale,
        causal=True,
        out=out,
    )


def plain_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_start_loc: Tensor,
    query_lens: Tensor,
    scale: float,
    max_query_len: int,
    out: Tensor,
) -> None:
    """Attend for requests of which all tokens are here, `query_lens` int32 [B] of them, none leaving a request out.

    q [T, H, D], keys [T, H, D], values [T, H, V]: the last dimension contiguous. The rest as in `paged_prefill`.
    """
    bound = max(max_query_len, LEAST_BOUND)
    _forward()(
        q,
        keys,
        values,
        cu_seqlens_q=query_start_loc,
        cu_seqlens_k=query_start_loc,
        seqused_q=query_lens,
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
