"""Computes grouped-query attention in plain torch: the reference for the kernels' tests, and the CPU path.

Requests with one query (decodes) are computed in groups. Other requests (prefills) are computed one at a time.
A slot of the cache holds `heads_per_slot` heads of one token: all key heads, then all value heads.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels import fp8
from nanovllm_kernels.attention.plan.gathers import DecodeGroup, GatherPlan, PrefillRequest, round_up_tokens


def paged_attention(
    q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather_plan: GatherPlan, scale: float
) -> Tensor:
    """Compute grouped-query attention for all requests of `gather_plan`. q: [T, Hq, D].

    The results of tokens that belong to no request are undefined.
    """
    decode_groups, prefills = gather_plan
    if len(decode_groups) == 1 and not prefills and decode_groups[0].end == len(q):
        return _attend_decodes(q, kv_cache, kv_scales, decode_groups[0], scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in decode_groups:
        queries = q[group.begin : group.end]
        out[group.begin : group.end] = _attend_decodes(queries, kv_cache, kv_scales, group, scale)
    for prefill in prefills:
        queries = q[prefill.begin : prefill.end]
        out[prefill.begin : prefill.end] = _attend_prefill(queries, kv_cache, kv_scales, prefill, scale)
    return out


def gather_decodes(kv_cache: Tensor, kv_scales: Tensor | None, group: DecodeGroup, dtype: torch.dtype) -> Tensor:
    """Return the cached keys and values of `group`, [tokens, 2 Hkv, D]. FP8 elements are converted to `dtype`.

    If the group has no mask, the result has all slots of each request's pages, including slots past the last token.
    """
    if group.mask is None:  # Without a mask, `pages_or_slots` holds page numbers; with a mask, slot numbers.
        return gather_pages(kv_cache, kv_scales, group.pages_or_slots, dtype)
    _, page_size, heads_per_slot, head_dim = kv_cache.shape
    slots = group.pages_or_slots
    kv = kv_cache.view(-1, heads_per_slot * head_dim).index_select(0, slots).view(-1, heads_per_slot, head_dim)
    if kv_scales is None:
        return kv
    return fp8.dequantize(kv, kv_scales[slots // page_size, :, slots % page_size], dtype)


def gather_pages(kv_cache: Tensor, kv_scales: Tensor | None, pages: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Return the keys and values in `pages`, [tokens, 2 Hkv, D]. FP8 elements are converted to `dtype`."""
    _, _, heads_per_slot, head_dim = kv_cache.shape
    kv = _select_pages(kv_cache, pages).view(-1, heads_per_slot, head_dim)
    if kv_scales is None:
        return kv
    return fp8.dequantize(kv, _select_pages(kv_scales, pages).transpose(1, 2).reshape(-1, heads_per_slot), dtype)


def _select_pages(cache: Tensor, pages: Tensor | slice) -> Tensor:
    return cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)


def convert_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert `mask`, if any, to `dtype`."""
    return None if mask is None else mask.to(dtype)


def _attend_decodes(q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, group: DecodeGroup, scale: float) -> Tensor:
    """Compute attention of one query per request. q and the result are [requests, Hq, D]."""
    num_reqs, num_heads, head_dim = q.shape
    heads_per_slot = kv_cache.shape[2]
    num_kv_heads = heads_per_slot // 2
    kv = gather_decodes(kv_cache, kv_scales, group, q.dtype)
    # `as_strided` takes less time than `view`, slicing, `transpose` and `chunk`.
    shape = (num_reqs, num_kv_heads, group.max_len, head_dim)
    strides = (kv.numel() // num_reqs, head_dim, heads_per_slot * head_dim, 1)
    offset = kv.storage_offset()
    k = kv.as_strided(shape, strides, offset)
    v = kv.as_strided(shape, strides, offset + num_kv_heads * head_dim)
    # Query heads that share a key-value head become queries of one head.
    grouped_queries = q.view(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = convert_mask(group.mask, q.dtype)
    out = functional.scaled_dot_product_attention(grouped_queries, k, v, mask, scale=scale)
    return out.reshape(num_reqs, num_heads, head_dim)


def _attend_prefill(
    q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, prefill: PrefillRequest, scale: float
) -> Tensor:
    """Compute attention of all queries of one request. q and the result are [queries, Hq, D]."""
    _, num_heads, head_dim = q.shape
    heads_per_slot = kv_cache.shape[2]
    kv = gather_pages(kv_cache, kv_scales, prefill.pages, q.dtype).view(1, -1, heads_per_slot, head_dim)
    k, v = kv[:, : prefill.length].transpose(1, 2).chunk(2, 1)
    num_queries = len(q)
    num_padded_queries = num_keys = round_up_tokens(num_queries, q.dtype)
    if prefill.mask is not None:
        num_padded_queries, num_keys = prefill.mask.shape
    # No query sees the padded keys: the mask hides these keys, or causal attention does. Pad with zeros instead of
    # unfilled slots: a slot may hold NaN, and a weight of 0 times NaN is NaN.
    queries = _pad_tokens(q.transpose(0, 1).unsqueeze(0), num_padded_queries)
    out = functional.scaled_dot_product_attention(
        queries,
        _pad_tokens(k, num_keys),
        _pad_tokens(v, num_keys),
        convert_mask(prefill.mask, q.dtype),
        is_causal=prefill.mask is None,
        scale=scale,
        enable_gqa=2 * num_heads != heads_per_slot,
    )
    return out.squeeze(0).transpose(0, 1)[:num_queries]


def _pad_tokens(x: Tensor, num_tokens: int) -> Tensor:
    """Append zeros to `x` [1, heads, n, D]. Returns [1, heads, num_tokens, D]."""
    return functional.pad(x, (0, 0, 0, num_tokens - x.shape[2])) if num_tokens > x.shape[2] else x
