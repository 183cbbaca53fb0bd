"""Paged attention in plain torch: the oracle of the kernels, and the CPU path.

Decodes are gathered and computed together, a bounded number of tokens at a time; prefills one request after another.
What to gather is worked out once a step, not once a layer: on a CPU a layer's weights drive the code out of the caches,
and a call costs twice what it does when it is repeated. Measured on two cores in bf16 against explicit products with a
softmax between: scaled_dot_product_attention with the query heads of a group folded into its query length is 2.5x
faster at one request of 200 tokens, 2x at 64 of 2000.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels import fp8

# Tokens gathered at once. Beyond a few megabytes of keys, fresh pages from the system took most of the time.
GATHER_TOKENS = 8192


class DecodeGroup(NamedTuple):
    """Requests begin..end, one query each, which is token begin..end.

    index: what to gather, request after request: pages when all have the same length, else slots; a slice where they
    follow one another and need no gathering. longest: of their lengths. mask: [n, 1, 1, longest], 0 for what a query
    attends to and -inf for the rest, or None when all have that length.
    """

    begin: int
    end: int
    index: Tensor | slice
    longest: int
    mask: Tensor | None


class Prefill(NamedTuple):
    """One request with queries begin..end, the last of `length` tokens in `pages`.

    mask: [end - begin, length], 0 for what a query attends to and -inf for the rest, or None when the queries are all
    there is.
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
    """See the package's `plan_batch`. Never points at a slot beyond a request's length that a mask does not cover.

    dtype: of the masks, best that of the queries; by default float32. Masks are numbers, because torch would turn bools
        into numbers in each layer.
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
    """Cut the decodes into runs that, padded to the longest, gather at most GATHER_TOKENS (or are one request)."""
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
    # A slot that a request hasn't filled may hold anything, and an infinity or a NaN would survive the mask: read the
    # request's first slot in its place. Costs a tenth more than gathering whole pages.
    offsets = torch.arange(longest, dtype=torch.int32, device=seq_lens.device)
    filled = offsets < seq_lens.unsqueeze(1)
    slots = tables.repeat_interleave(page_size, 1)[:, :longest] * page_size + offsets % page_size
    slots = torch.where(filled, slots, slots[:, :1])
    mask = torch.zeros(filled.shape, dtype=dtype, device=filled.device).masked_fill_(~filled, -torch.inf)
    return DecodeGroup(begin, end, slots.view(-1), longest, mask[:, None, None])


def _pages(numbers: Tensor) -> Tensor | slice:
    """Page numbers, or the slice that they are: a lone request's often follow one another, and are read in place."""
    listed: list[int] = numbers.tolist()
    first, count = listed[0], len(listed)
    return slice(first, first + count) if listed == list(range(first, first + count)) else numbers


def gather(kv_cache: Tensor, kv_scales: Tensor | None, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """The pages `index`, one after another, as they are or dequantised to `dtype`: [tokens, heads cached, D]."""
    _, _, num_cached, head_dim = kv_cache.shape
    pages = _take(kv_cache, index).view(-1, num_cached, head_dim)
    if kv_scales is None:
        return pages
    return fp8.dequantize(pages, _take(kv_scales, index).transpose(1, 2).reshape(-1, num_cached), dtype)


def gather_slots(kv_cache: Tensor, kv_scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """As `gather`, of single slots."""
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
    """One query a request: q [n, Hq, D] to [n, Hq, D]."""
    num_reqs, num_heads, head_dim = q.shape
    num_cached = kv_cache.shape[2]
    num_kv_heads = num_cached // 2
    take = gather if group.mask is None else gather_slots
    kv = take(kv_cache, kv_scales, group.index, q.dtype)
    # Two calls instead of the five that `view`, a slice, `transpose` and `chunk` would take.
    shape = (num_reqs, num_kv_heads, group.longest, head_dim)
    strides = (kv.numel() // num_reqs, head_dim, num_cached * head_dim, 1)
    first = kv.storage_offset()
    k = kv.as_strided(shape, strides, first)
    v = kv.as_strided(shape, strides, first + num_kv_heads * head_dim)
    grouped = q.view(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = functional.scaled_dot_product_attention(grouped, k, v, mask_in(q.dtype, group.mask), scale=scale)
    return out.reshape(num_reqs, num_heads, head_dim)


def _prefill(q: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, prefill: Prefill, scale: float) -> Tensor:
    """All queries of one request: q [n, Hq, D] to [n, Hq, D]."""
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
