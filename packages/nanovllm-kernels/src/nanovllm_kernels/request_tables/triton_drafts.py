"""Proposes and verifies drafts on CUDA. The search for n-grams reads pieces of a request's tokens in parallel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.request_tables.tables import TokenTables

# Number of positions that a program of `_find_matches` compares at a time.
SEARCH_BLOCK = 1024
# Approximate maximum number of programs of `_find_matches` for all requests: more than a GPU runs at a time.
MAX_SEARCH_PROGRAMS = 2048
# Number of pieces whose matches `_copy_drafts` reads at a time.
PIECE_BLOCK = 128
# Number of drafts that a program of `_verify_drafts` compares at a time.
VERIFY_BLOCK = 32


def verify_drafts(
    table_rows: Tensor, query_start_loc: Tensor, sampled: Tensor, tables: TokenTables, token_counts: Tensor | None
) -> Tensor:
    """See the package's `verify_drafts`."""
    tokens, num_computed = tables
    num_new_tokens = num_computed.new_empty(table_rows.shape)
    _verify_drafts[(table_rows.shape[0],)](
        table_rows,
        query_start_loc,
        sampled,
        tokens,
        num_computed,
        tokens if token_counts is None else token_counts,
        num_new_tokens,
        tokens.shape[1],
        tokens.stride(0),
        0 if token_counts is None else token_counts.stride(0),
        COUNTS_TOKENS=token_counts is not None,
        BLOCK=VERIFY_BLOCK,
        num_warps=1,
    )
    return num_new_tokens


def propose_ngrams(
    table_rows: Tensor, is_sampled: Tensor, tables: TokenTables, num_drafts: int, min_match: int, max_match: int
) -> tuple[Tensor, Tensor]:
    """See the package's `propose_ngrams`."""
    tokens, num_computed = tables
    num_reqs, max_len = table_rows.shape[0], tokens.shape[1]
    num_pieces = min(triton.cdiv(max_len, SEARCH_BLOCK), triton.cdiv(MAX_SEARCH_PROGRAMS, max(num_reqs, 1)))
    matches = tokens.new_empty((num_reqs, num_pieces), dtype=torch.int64)
    drafts = tokens.new_empty((num_reqs, num_drafts))
    num_proposed = num_computed.new_empty((num_reqs,))
    _find_matches[(num_pieces, num_reqs)](
        table_rows,
        is_sampled,
        tokens,
        num_computed,
        matches,
        max_len,
        tokens.stride(0),
        MAX_MATCH=max_match,
        BLOCK=SEARCH_BLOCK,
        num_warps=4,
    )
    _copy_drafts[(num_reqs,)](
        table_rows,
        is_sampled,
        tokens,
        num_computed,
        matches,
        drafts,
        num_proposed,
        max_len,
        tokens.stride(0),
        num_pieces,
        min_match,
        NUM_DRAFTS=num_drafts,
        PADDED_DRAFTS=triton.next_power_of_2(num_drafts),
        BLOCK=PIECE_BLOCK,
        num_warps=1,
    )
    return drafts, num_proposed


@triton.jit(
    do_not_specialize=["max_len"],
    do_not_specialize_on_alignment=["rows_ptr", "query_start_loc_ptr", "sampled_ptr"],
)
def _verify_drafts(
    rows_ptr,
    query_start_loc_ptr,
    sampled_ptr,
    tokens_ptr,
    num_computed_ptr,
    counts_ptr,
    num_new_ptr,
    max_len,
    tokens_stride,
    counts_stride,
    COUNTS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Verify the drafts of one request per program."""
    request = tl.program_id(0)
    start = tl.load(query_start_loc_ptr + request)
    num_drafts = tl.load(query_start_loc_ptr + request + 1) - start - 1
    # Other requests may have the same row as a request without tokens, so do not change this row.
    if num_drafts < 0:
        tl.store(num_new_ptr + request, 0)
        return
    row = tl.load(rows_ptr + request).to(tl.int64)
    row_ptr = tokens_ptr + row * tokens_stride
    num_computed = tl.load(num_computed_ptr + row)
    lanes = tl.arange(0, BLOCK)
    num_accepted = num_drafts
    for first_draft in tl.range(0, num_drafts, BLOCK):
        offsets = first_draft + lanes
        mask = offsets < num_drafts
        choices = tl.load(sampled_ptr + start + offsets, mask=mask, other=0)
        drafts = tl.load(row_ptr + num_computed + 1 + offsets, mask=mask, other=0)
        num_accepted = tl.minimum(num_accepted, tl.min(tl.where(choices != drafts, offsets, num_drafts), axis=0))
    position = num_computed + num_accepted + 1
    tl.store(num_new_ptr + request, num_accepted + 1)
    tl.store(num_computed_ptr + row, position)
    last_choice = tl.load(sampled_ptr + start + num_accepted)
    tl.store(row_ptr + position, last_choice, mask=position < max_len)
    if COUNTS_TOKENS:
        for first_choice in tl.range(0, num_accepted + 1, BLOCK):
            offsets = first_choice + lanes
            mask = offsets <= num_accepted
            choices = tl.load(sampled_ptr + start + offsets, mask=mask, other=0)
            tl.atomic_add(counts_ptr + row * counts_stride + choices, 1, mask=mask)


@triton.jit(
    do_not_specialize=["max_len"],
    do_not_specialize_on_alignment=["rows_ptr", "is_sampled_ptr"],
)
def _find_matches(
    rows_ptr,
    is_sampled_ptr,
    tokens_ptr,
    num_computed_ptr,
    matches_ptr,
    max_len,
    tokens_stride,
    MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the longest match that ends in one piece of a request's tokens: the last match if several are equally long.

    A match is an earlier occurrence of the request's last known tokens. A block is BLOCK positions. With P pieces,
    piece p consists of the blocks p, p + P, p + 2P and so on. A match is stored as
    `length << 32 | position of its last token`. The greatest of these numbers is the last of the longest matches.
    """
    piece, request = tl.program_id(0), tl.program_id(1)
    num_pieces = tl.num_programs(0)
    if tl.load(is_sampled_ptr + request) == 0:
        return
    row = tl.load(rows_ptr + request).to(tl.int64)
    row_ptr = tokens_ptr + row * tokens_stride
    last = tl.load(num_computed_ptr + row)
    # A full row has no space for drafts, and perhaps none for the last sampled token.
    if last + 1 >= max_len:
        return
    lanes = tl.arange(0, BLOCK)
    best = tl.zeros([BLOCK], dtype=tl.int64)
    for first_end in tl.range(piece * BLOCK, last, num_pieces * BLOCK):
        ends = first_end + lanes
        is_equal = ends < last
        lengths = tl.zeros([BLOCK], dtype=tl.int32)
        for offset in tl.static_range(MAX_MATCH):
            is_equal &= ends >= offset
            suffix_token = tl.load(row_ptr + tl.maximum(last - offset, 0))
            is_equal &= tl.load(row_ptr + ends - offset, mask=is_equal, other=0) == suffix_token
            lengths += is_equal.to(tl.int32)
        matches = (lengths.to(tl.int64) << 32) | ends.to(tl.int64)
        best = tl.maximum(best, tl.where(lengths > 0, matches, 0))
    tl.store(matches_ptr + request.to(tl.int64) * num_pieces + piece, tl.max(best, axis=0))


@triton.jit(
    do_not_specialize=["max_len", "num_pieces", "min_match"],
    do_not_specialize_on_alignment=["rows_ptr", "is_sampled_ptr"],
)
def _copy_drafts(
    rows_ptr,
    is_sampled_ptr,
    tokens_ptr,
    num_computed_ptr,
    matches_ptr,
    drafts_ptr,
    num_proposed_ptr,
    max_len,
    tokens_stride,
    num_pieces,
    min_match,
    NUM_DRAFTS: tl.constexpr,
    PADDED_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the drafts of one request per program, from the best match of all pieces."""
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    row_ptr = tokens_ptr + row * tokens_stride
    last = tl.load(num_computed_ptr + row)
    num_places = tl.minimum(tl.maximum(max_len - 1 - last, 0), NUM_DRAFTS)
    num_places = tl.where(tl.load(is_sampled_ptr + request) != 0, num_places, 0)
    best = tl.zeros([BLOCK], dtype=tl.int64)
    # For requests without places for drafts, `_find_matches` stored no matches.
    for first_piece in tl.range(0, tl.where(num_places > 0, num_pieces, 0), BLOCK):
        pieces = first_piece + tl.arange(0, BLOCK)
        match_ptrs = matches_ptr + request.to(tl.int64) * num_pieces + pieces
        best = tl.maximum(best, tl.load(match_ptrs, mask=pieces < num_pieces, other=0))
    match = tl.max(best, axis=0)
    is_match = (match >> 32) >= min_match
    end = tl.where(is_match, match & 0x7FFFFFFF, last - 1).to(tl.int32)
    offsets = tl.arange(0, PADDED_DRAFTS)
    targets = last + 1 + offsets
    # Without a match, `drafts` are the tokens that already stand in the row.
    sources = tl.where(is_match, end + 1 + offsets % (last - end), targets)
    drafts = tl.load(row_ptr + sources, mask=offsets < num_places, other=0)
    tl.store(row_ptr + targets, drafts, mask=is_match & (offsets < num_places))
    tl.store(drafts_ptr + request.to(tl.int64) * NUM_DRAFTS + offsets, drafts, mask=offsets < NUM_DRAFTS)
    tl.store(num_proposed_ptr + request, tl.where(is_match, num_places, 0))
