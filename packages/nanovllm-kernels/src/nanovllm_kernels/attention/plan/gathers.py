"""Plans how plain torch copies cached tokens in groups, for grouped-query and latent attention."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Maximum number of tokens copied for several decodes at once. A larger copy mostly waits for page faults of new memory.
MAX_GATHER_TOKENS = 8192
# On a CPU with AMX, torch compiles bf16 kernels for each pair (number of queries, number of keys). Padding both numbers
# to multiples of this number keeps such pairs few.
BF16_PADDED_TOKENS = 16


class DecodeGroup(NamedTuple):
    """Describes requests with one query each, whose cached tokens are copied together.

    begin: index of the group's first request, and of the request's query in the step.
    end: index after the group's last request.
    pages_or_slots: page numbers if all requests have the same length. If not, slot numbers (positions in the cache) of
        each request's tokens, padded to `max_len`. A slice means consecutive pages, which are read in place.
    mask: [requests, 1, 1, max_len], 0 for a request's tokens, -inf for padding. None: all lengths are equal.
    """

    begin: int
    end: int
    pages_or_slots: Tensor | slice
    max_len: int  # Tokens of the longest request. With a bf16 mask, padded to a multiple of BF16_PADDED_TOKENS.
    mask: Tensor | None


class PrefillRequest(NamedTuple):
    """Describes one request with `length` tokens in `pages`.

    begin, end: range of the request's queries in the step.
    mask: [queries, tokens], 0 for visible tokens, -inf for others. If the mask is bf16, both dimensions are padded to
        multiples of BF16_PADDED_TOKENS. None: all of the request's tokens are queries of this step.
    """

    begin: int
    end: int
    pages: Tensor | slice
    length: int
    mask: Tensor | None


class GatherPlan(NamedTuple):
    """Groups a step's requests for plain torch."""

    decodes: list[DecodeGroup]
    prefills: list[PrefillRequest]


def plan_gathers(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_decodes: int,
    page_size: int,
    dtype: torch.dtype | None = None,
) -> GatherPlan:
    """Plan the copies of cached tokens for a step.

    num_decodes: number of requests with exactly one query. These requests come first. Other requests may have no query.
    dtype: dtype of the masks. None: float32. If the queries have another dtype, every layer converts the masks.
    """
    dtype = dtype or torch.float32
    lengths: list[int] = seq_lens.tolist()
    decodes = [
        _plan_decodes(begin, end, block_tables[begin:end], seq_lens[begin:end], lengths[begin:end], page_size, dtype)
        for begin, end in _split_decodes(lengths[:num_decodes])
    ]
    prefills: list[PrefillRequest] = []
    if num_decodes < len(lengths):
        starts: list[int] = query_start_loc.tolist()
        for request in range(num_decodes, len(lengths)):
            begin, end, length = starts[request], starts[request + 1], lengths[request]
            if begin == end:
                continue
            mask = None
            if end - begin != length:
                shape = [round_up_tokens(number, dtype) for number in (end - begin, length)]
                mask = torch.full(shape, -torch.inf, dtype=dtype, device=seq_lens.device)
                mask.triu_(length - (end - begin) + 1)
            pages = _slice_if_consecutive(block_tables[request, : -(-length // page_size)])
            prefills.append(PrefillRequest(begin, end, pages, length, mask))
    return GatherPlan(decodes, prefills)


def round_up_tokens(num_tokens: int, dtype: torch.dtype) -> int:
    """Return the number of queries or keys to which `num_tokens` are padded for attention in `dtype`."""
    return -(-num_tokens // BF16_PADDED_TOKENS) * BF16_PADDED_TOKENS if dtype == torch.bfloat16 else num_tokens


def _split_decodes(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges (begin, end) of decodes, one per `DecodeGroup`.

    A range of several decodes has at most MAX_GATHER_TOKENS tokens, with all lengths padded to the longest.
    """
    begin = max_len = 0
    for index, length in enumerate(lengths):
        if index > begin and max(max_len, length) * (index + 1 - begin) > MAX_GATHER_TOKENS:
            yield begin, index
            begin, max_len = index, length
        max_len = max(max_len, length)
    if lengths:
        yield begin, len(lengths)


def _plan_decodes(
    begin: int, end: int, block_tables: Tensor, seq_lens: Tensor, lengths: list[int], page_size: int, dtype: torch.dtype
) -> DecodeGroup:
    max_len = max(lengths)
    num_pages = -(-max_len // page_size)
    if min(lengths) == max_len:
        pages = _slice_if_consecutive(block_tables[:, :num_pages].reshape(-1))
        return DecodeGroup(begin, end, pages, max_len, None)
    max_len = round_up_tokens(max_len, dtype)
    # An unfilled slot may hold NaN, which a mask does not remove. Read the request's first slot instead.
    offsets = torch.arange(max_len, dtype=torch.int32, device=seq_lens.device)
    is_filled = offsets < seq_lens.unsqueeze(1)
    page_indices = (offsets // page_size).clamp(max=num_pages - 1)
    slots = block_tables[:, page_indices] * page_size + offsets % page_size
    slots = torch.where(is_filled, slots, slots[:, :1])
    mask = torch.zeros(is_filled.shape, dtype=dtype, device=is_filled.device).masked_fill_(~is_filled, -torch.inf)
    return DecodeGroup(begin, end, slots.view(-1), max_len, mask[:, None, None])


def _slice_if_consecutive(page_numbers: Tensor) -> Tensor | slice:
    """Convert page numbers to a slice if they are consecutive."""
    numbers: list[int] = page_numbers.tolist()
    first, num_pages = numbers[0], len(numbers)
    return slice(first, first + num_pages) if numbers == list(range(first, first + num_pages)) else page_numbers
