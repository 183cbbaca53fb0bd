"""Calls FlashAttention's CuTe build (Shah et al. 2024) on Hopper, for requests with several queries."""

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.platform import make_cache_directory

# Head sizes that FlashAttention supports in a paged cache.
PAGED_HEAD_DIMS = (64, 96, 128, 256)
# Supported (key size, value size) of a head, if keys and values are rows of tensors instead of pages.
ROW_HEAD_DIMS = ((192, 128),)
# Minimum value to pass as FlashAttention's `max_seqlen_q`. If all queries fit one tile, FlashAttention uses another
# kernel, which it compiles on first use. This minimum exceeds a tile, so that all steps use the same compiled kernel.
MIN_QUERY_LEN_BOUND = 256
# A captured step uses FlashAttention only if one request may have at least this many queries. Smaller captured steps
# use the work-list kernels, because FlashAttention would leave most of the device idle.
MIN_QUERY_LEN_OF_CAPTURED_STEPS = 512
# Page size, in tokens, and head sizes with which the bulk copy engine (TMA) copies pages. Smaller pages are slower.
TMA_PAGE_SIZE = 128
TMA_HEAD_DIMS = (64, 96, 128)


def supports_pages(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether `attend_to_pages` supports this head size and dtype."""
    return head_dim in PAGED_HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def supports_rows(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Return whether `attend_to_step_tokens` supports these head sizes and this dtype."""
    return (key_dim, value_dim) in ROW_HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)


def attend_to_pages(
    q: Tensor, kv_cache: Tensor, requests: FlashRequests, scale: float, max_query_len: int, out: Tensor
) -> None:
    """Compute attention of `requests` over cached pages, and write the results to `out` [T, Hq, D].

    The launch depends only on shapes and `max_query_len`, so that a captured graph can be replayed for any lengths.
    """
    k_cache, v_cache = kv_cache.chunk(2, 2)
    _import_forward()(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=requests.query_starts,
        seqused_q=requests.query_lens,
        seqused_k=requests.seq_lens,
        page_table=requests.block_tables,
        max_seqlen_q=max(max_query_len, MIN_QUERY_LEN_BOUND),
        softmax_scale=scale,
        causal=True,
        out=out,
    )


def attend_to_step_tokens(
    q: Tensor, keys: Tensor, values: Tensor, requests: FlashRequests, scale: float, max_query_len: int, out: Tensor
) -> None:
    """Compute attention of `requests` whose tokens are all in this step, and write the results to `out`.

    q: [T, Hq, D]. keys: [T, Hkv, D]. values: [T, Hkv, Dv]. out: [T, Hq, Dv]. Last dimensions are contiguous.
    """
    query_len_bound = max(max_query_len, MIN_QUERY_LEN_BOUND)
    _import_forward()(
        q,
        keys,
        values,
        cu_seqlens_q=requests.query_starts,
        cu_seqlens_k=requests.query_starts,
        seqused_q=requests.query_lens,
        max_seqlen_q=query_len_bound,
        max_seqlen_k=query_len_bound,
        softmax_scale=scale,
        causal=True,
        out=out,
    )


@functools.cache
def _import_forward() -> Callable[..., object]:
    """Import FlashAttention's private forward function, because the public function takes no `out`."""
    # FlashAttention reads its environment variables once, at import.
    directory = make_cache_directory("flash_attention")
    if directory is not None:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(directory))
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd
