"""Paged attention in plain torch: the reference for the kernels' tests, and the CPU path.

Decodes are gathered and computed together, a bounded number of tokens at a time; prefills one request at a time. The
gathers are planned once per step, because the planning code is slow in each layer: weights evict it from the caches.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels import fp8

# Most tokens gathered at once: beyond a few megabytes of keys, most of the time goes into fresh pages of memory.
GATHER_TOKENS = 8192


class DecodeGroup(NamedTuple):
    """Requests begin..end with one query each; request i's query is token i.

    index: what to gather, request after request: pages if all lengths are equal, else slots. A slice if they are
        consecutive and need no gathering.
    longest: their greatest length in tokens.
    mask: [n, 1, 1, longest], 0 for tokens that a query attends to and -inf for others. None: all have this length.
    """

    begin: int
    end: int
    index: Tensor | slice
    longest: int
    mask: Tensor | None


class Prefill(NamedTuple):
    """One request with queries begin..end, which are the last of its `length` tokens in `pages`.

    mask: [end - begin, length], 0 for tokens that a query attends to and -inf for others. None: every token of the
        request is a query.
    """

    begin: int
    end: int
    pages: Tensor | slice
    length: int
    mask: Tensor | None


class Gathers(NamedTuple):
    """A step's decodes and prefills."""

    decodes: list[DecodeGroup]
    prefills: list[Prefill]


def plan_gathers(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_decodes: int,
    page_size: int,
    dtype: torch.dtype | None = None,
) -> Gathers:
    """See the package's `plan_batch`. No index reads a slot past a request's length unless a mask covers the slot.

    dtype: of the masks, best that of the queries; by default float32. Masks are numbers, because torch would convert
        bools to numbers in each layer.
    """
    dtype = dtype or torch.float32
    lengths: list[int] = seq_lens.tolist()
    decodes = [
        _decode_group(begin, end, block_tables[begin:end], seq_lens[begin:end], lengths[begin:end], page_size, dtype)
        for begin, end in _runs(lengths[:num_decodes])
    ]
    prefills: list[Prefill] = []
    if num_decodes < len(lengths):
        starts: list[int] = query_start_loc.tolist()
        for request in range(num_decodes, len(lengths)):
            begin, end, length = starts[request], starts[request + 1], lengths[request]
            mask = None
            if end - begin != length:
                mask = torch.full((end - begin, length), -torch.inf, dtype=dtype, device=seq_lens.device)
                mask.triu_(length - (end - begin) + 1)
            pages = _pages(block_tables[request, : -(-length // page_size)])
            prefills.append(Prefill(begin, end, pages, length, mask))
    return Gathers(decodes, prefills)


def paged_attention(q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gathers: Gathers, scale: float) -> Tensor:
    """See the package's `paged_attention`."""
    decodes, prefills = gathers
    if len(decodes) == 1 and not prefills:
        return _decode(q, kv_cache, kv_scales, decodes[0], scale)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in decodes:
        out[group.begin : group.end] = _decode(q[group.begin : group.end], kv_cache, kv_scales, group, scale)
    for prefill in prefills:
        queries = q[prefill.begin : prefill.end]
        out[prefill.begin : prefill.end] = _prefill(queries, kv_cache, kv_scales, prefill, scale)
    return out


def _runs(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Cut decodes into runs that gather at most GATHER_TOKENS tokens when padded, or that have one request."""
    begin = longest = 0
    for index, length in enumerate(lengths):
        if index > begin and max(longest, length) * (index + 1 - begin) > GATHER_TOKENS:
            yield begin, index
            begin, longest = index, length
        longest = max(longest, length)
    if lengths:
        yield begin, len(lengths)


def _decode_group(
    begin: int,
    end: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    lengths: list[int],
    page_size: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    longest = max(lengths)
    tables = block_tables[:, : -(-longest // page_size)]
    if min(lengths) == longest:
        return DecodeGroup(begin, end, _pages(tables.reshape(-1)), longest, None)
    # An unfilled slot may hold an infinity or NaN, which would survive the mask: read the request's first slot instead.
    # This costs 10% more than gathering whole pages.
    offsets = torch.arange(longest, dtype=torch.int32, device=seq_lens.device)
    filled = offsets < seq_lens.unsqueeze(1)
    slots = tables.repeat_interleave(page_size, 1)[:, :longest] * page_size + offsets % page_size
    slots = torch.where(filled, slots, slots[:, :1])
    mask = torch.zeros(filled.shape, dtype=dtype, device=filled.device).masked_fill_(~filled, -torch.inf)
    return DecodeGroup(begin, end, slots.view(-1), longest, mask[:, None, None])


def _pages(numbers: Tensor) -> Tensor | slice:
    """Return the page numbers, or a slice if they are consecutive: a single request's pages are then read in place."""
    listed: list[int] = numbers.tolist()
    first, count = listed[0], len(listed)
    return slice(first, first + count) if listed == list(range(first, first + count)) else numbers


def gather(kv_cache: Tensor, kv_scales: Tensor | None, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Return the pages `index` as [tokens, cached heads, D], one after another, dequantised to `dtype` if FP8."""
    _, _, num_cached, head_dim = kv_cache.shape
    pages = _take(kv_cache, index).view(-1, num_cached, head_dim)
    if kv_scales is None:
        return pages
    return fp8.dequantize(pages, _take(kv_scales, index).transpose(1, 2).reshape(-1, num_cached), dtype)


def gather_slots(kv_cache: Tensor, kv_scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Like `gather`, for single slots."""
    _, page_size, num_cached, head_dim = kv_cache.shape
    found = kv_cache.view(-1, num_cached * head_dim).index_select(0, slots).view(-1, num_cached, head_dim)
    if kv_scales is None:
        return found
    return fp8.dequantize(found, kv_scales[slots // page_size, :, slots % page_size], dtype)


def _take(cache: Tensor, index: Tensor | slice) -> Tensor:
    return cache[index] if isinstance(index, slice) else cache.index_select(0, index)


def mask_in(dtype: torch.dtype, mask: Tensor | None) -> Tensor | None:
    """`mask` for queries of `dtype`."""
    return None if mask is None else mask.to(dtype)


def _decode(q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, group: DecodeGroup, scale: float) -> Tensor:
    """Attend for one query per request: q [n, Hq, D] to [n, Hq, D]."""
    num_reqs, num_heads, head_dim = q.shape
    num_cached = kv_cache.shape[2]
    num_kv_heads = num_cached // 2
    take = gather if group.mask is None else gather_slots
    kv = take(kv_cache, kv_scales, group.index, q.dtype)
    # Two calls instead of the five of `view`, slicing, `transpose` and `chunk`.
    shape = (num_reqs, num_kv_heads, group.longest, head_dim)
    strides = (kv.numel() // num_reqs, head_dim, num_cached * head_dim, 1)
    first = kv.storage_offset()
    k = kv.as_strided(shape, strides, first)
    v = kv.as_strided(shape, strides, first + num_kv_heads * head_dim)
    # Folding a group's heads into the query length is at least 2x faster than explicit products on two cores in bf16.
    grouped = q.view(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = functional.scaled_dot_product_attention(grouped, k, v, mask_in(q.dtype, group.mask), scale=scale)
    return out.reshape(num_reqs, num_heads, head_dim)


def _prefill(q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, prefill: Prefill, scale: float) -> Tensor:
    """Attend for all queries of one request: q [n, Hq, D] to [n, Hq, D]."""
    _, num_heads, head_dim = q.shape
    _, _, num_cached, _ = kv_cache.shape
    _, _, pages, length, mask = prefill
    kv = gather(kv_cache, kv_scales, pages, q.dtype).view(1, -1, num_cached, head_dim)
    k, v = kv[:, :length].transpose(1, 2).chunk(2, 1)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        mask_in(q.dtype, mask),
        is_causal=mask is None,
        scale=scale,
        enable_gqa=2 * num_heads != num_cached,
    )
    return out.squeeze(0).transpose(0, 1)
