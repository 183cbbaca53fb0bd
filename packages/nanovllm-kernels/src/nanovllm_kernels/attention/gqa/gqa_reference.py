"""Computes grouped-query attention in plain torch: the reference for the kernels' tests, and the CPU path.

The decodes of one gather (see `plan.gathers`) are computed together. Prefills are computed one request at a time.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels import fp8
from nanovllm_kernels.attention.plan.gathers import DecodeGather, GatherPlan, PrefillGather


def paged_attention(
    q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather_plan: GatherPlan, scale: float
) -> Tensor:
    """Compute the package's `paged_attention` for all gathers of `gather_plan`."""
    decodes, prefills = gather_plan
    if len(decodes) == 1 and not prefills:
        return _attend_decodes(q, kv_cache, kv_scales, decodes[0], scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for gather in decodes:
        queries = q[gather.begin : gather.end]
        out[gather.begin : gather.end] = _attend_decodes(queries, kv_cache, kv_scales, gather, scale)
    for gather in prefills:
        queries = q[gather.begin : gather.end]
        out[gather.begin : gather.end] = _attend_prefill(queries, kv_cache, kv_scales, gather, scale)
    return out


def gather_decodes(kv_cache: Tensor, kv_scales: Tensor | None, gather: DecodeGather, dtype: torch.dtype) -> Tensor:
    """Return the cached tokens of decodes [tokens, heads per slot, D], dequantised to `dtype` if FP8.

    If `gather.mask` is None, the result has all slots of each request's pages, including slots past `max_len`.
    """
    if gather.mask is None:
        return gather_pages(kv_cache, kv_scales, gather.pages_or_slots, dtype)
    _, page_size, heads_per_slot, head_dim = kv_cache.shape
    slots = gather.pages_or_slots
    tokens = kv_cache.view(-1, heads_per_slot * head_dim).index_select(0, slots).view(-1, heads_per_slot, head_dim)
    if kv_scales is None:
        return tokens
    return fp8.dequantize(tokens, kv_scales[slots // page_size, :, slots % page_size], dtype)


def gather_pages(kv_cache: Tensor, kv_scales: Tensor | None, pages: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Return the cached tokens of pages [tokens, heads per slot, D], dequantised to `dtype` if FP8."""
    _, _, heads_per_slot, head_dim = kv_cache.shape
    tokens = _select(kv_cache, pages).view(-1, heads_per_slot, head_dim)
    if kv_scales is None:
        return tokens
    return fp8.dequantize(tokens, _select(kv_scales, pages).transpose(1, 2).reshape(-1, heads_per_slot), dtype)


def _select(cache: Tensor, pages: Tensor | slice) -> Tensor:
    return cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)


def convert_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask to the dtype of the queries."""
    return None if mask is None else mask.to(dtype)


def _attend_decodes(
    q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather: DecodeGather, scale: float
) -> Tensor:
    """Attend for one query per request. q and the result are [n, Hq, D]."""
    num_reqs, num_heads, head_dim = q.shape
    heads_per_slot = kv_cache.shape[2]
    num_kv_heads = heads_per_slot // 2
    kv = gather_decodes(kv_cache, kv_scales, gather, q.dtype)
    # `as_strided` takes less time than `view`, slicing, `transpose` and `chunk`.
    shape = (num_reqs, num_kv_heads, gather.max_len, head_dim)
    strides = (kv.numel() // num_reqs, head_dim, heads_per_slot * head_dim, 1)
    offset = kv.storage_offset()
    k = kv.as_strided(shape, strides, offset)
    v = kv.as_strided(shape, strides, offset + num_kv_heads * head_dim)
    # Pass the query heads of a key-value head as queries of one head: faster on a CPU than explicit products.
    grouped = q.view(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = convert_mask(gather.mask, q.dtype)
    out = functional.scaled_dot_product_attention(grouped, k, v, mask, scale=scale)
    return out.reshape(num_reqs, num_heads, head_dim)


def _attend_prefill(
    q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather: PrefillGather, scale: float
) -> Tensor:
    """Attend for all queries of one request. q and the result are [n, Hq, D]."""
    _, num_heads, head_dim = q.shape
    _, _, heads_per_slot, _ = kv_cache.shape
    kv = gather_pages(kv_cache, kv_scales, gather.pages, q.dtype).view(1, -1, heads_per_slot, head_dim)
    k, v = kv[:, : gather.length].transpose(1, 2).chunk(2, 1)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        convert_mask(gather.mask, q.dtype),
        is_causal=gather.mask is None,
        scale=scale,
        enable_gqa=2 * num_heads != heads_per_slot,
    )
    return out.squeeze(0).transpose(0, 1)
