"""Operators on request tables on CUDA: `build_inputs` and `commit_tokens` are one kernel each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm_kernels.request_tables.tables import BatchInputs, TokenTables

# Number of elements that a program processes per iteration.
BLOCK = 256


def build_inputs(
    table_rows: Tensor,
    query_start_loc: Tensor,
    tables: TokenTables,
    page_table: Tensor,
    page_size: int,
    num_tokens: int,
    num_page_columns: int,
) -> BatchInputs:
    """See the package's `build_inputs`."""
    tokens, num_computed = tables
    num_reqs = table_rows.shape[0]
    input_ids = tokens.new_empty((num_tokens,))
    positions = tokens.new_empty((num_tokens,), dtype=torch.int64)
    slot_mapping = torch.empty_like(positions)
    seq_lens = num_computed.new_empty((num_reqs,))
    last_token_indices = positions.new_empty((num_reqs,))
    block_tables = page_table.new_empty((num_reqs, num_page_columns))
    _build_inputs[(num_reqs + 1,)](
        table_rows,
        query_start_loc,
        tokens,
        num_computed,
        page_table,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        last_token_indices,
        block_tables,
        tokens.stride(0),
        page_table.stride(0),
        num_page_columns,
        num_tokens,
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return BatchInputs(input_ids, positions, seq_lens, slot_mapping, last_token_indices, block_tables)


def commit_tokens(
    table_rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    is_sampled: Tensor,
    tables: TokenTables,
    token_counts: Tensor | None,
) -> None:
    """See the package's `commit_tokens`."""
    tokens, num_computed = tables
    _commit_tokens[(1,)](
        table_rows,
        query_start_loc,
        sampled,
        is_sampled,
        tokens,
        num_computed,
        tokens if token_counts is None else token_counts,
        table_rows.shape[0],
        tokens.shape[1],
        tokens.stride(0),
        0 if token_counts is None else token_counts.stride(0),
        COUNTS_TOKENS=token_counts is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit(
    do_not_specialize=["num_pages", "num_tokens"], do_not_specialize_on_alignment=["rows_ptr", "query_start_loc_ptr"]
)
def _build_inputs(
    rows_ptr,
    query_start_loc_ptr,
    tokens_ptr,
    num_computed_ptr,
    block_table_ptr,
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    last_token_indices_ptr,
    block_tables_ptr,
    tokens_stride,
    block_table_stride,
    num_pages,
    num_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather the tokens and the page numbers of one request per program. The last program fills the padding tokens."""
    request = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if request == tl.num_programs(0) - 1:
        zeros = tl.zeros([BLOCK], dtype=tl.int64)
        for first_index in tl.range(tl.load(query_start_loc_ptr + request), num_tokens, BLOCK):
            offsets = first_index + lanes
            mask = offsets < num_tokens
            tl.store(input_ids_ptr + offsets, zeros.to(tl.int32), mask=mask)
            tl.store(positions_ptr + offsets, zeros, mask=mask)
            tl.store(slot_mapping_ptr + offsets, zeros, mask=mask)
        return
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    num_computed = tl.load(num_computed_ptr + row)
    tl.store(seq_lens_ptr + request, tl.where(query_len > 0, num_computed + query_len, 0))
    tl.store(last_token_indices_ptr + request, tl.maximum(start + query_len - 1, 0).to(tl.int64))
    for first_index in tl.range(0, query_len, BLOCK):
        offsets = first_index + lanes
        mask = offsets < query_len
        positions = num_computed + offsets
        input_ids = tl.load(tokens_ptr + row * tokens_stride + positions, mask=mask)
        pages = tl.load(block_table_ptr + row * block_table_stride + positions // PAGE_SIZE, mask=mask).to(tl.int64)
        tl.store(input_ids_ptr + start + offsets, input_ids, mask=mask)
        tl.store(positions_ptr + start + offsets, positions.to(tl.int64), mask=mask)
        tl.store(slot_mapping_ptr + start + offsets, pages * PAGE_SIZE + positions % PAGE_SIZE, mask=mask)
    num_used_pages = tl.minimum((num_computed + query_len + PAGE_SIZE - 1) // PAGE_SIZE, num_pages)
    for first_index in tl.range(0, num_used_pages, BLOCK):
        columns = first_index + lanes
        mask = columns < num_used_pages
        pages = tl.load(block_table_ptr + row * block_table_stride + columns, mask=mask)
        tl.store(block_tables_ptr + request.to(tl.int64) * num_pages + columns, pages, mask=mask)


@triton.jit(
    do_not_specialize=["num_reqs", "max_len"],
    do_not_specialize_on_alignment=["rows_ptr", "query_start_loc_ptr", "sampled_ptr", "is_sampled_ptr"],
)
def _commit_tokens(
    rows_ptr,
    query_start_loc_ptr,
    sampled_ptr,
    is_sampled_ptr,
    tokens_ptr,
    num_computed_ptr,
    counts_ptr,
    num_reqs,
    max_len,
    tokens_stride,
    counts_stride,
    COUNTS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Commit all requests in one program. Skip padding (no tokens), because other requests may use the same rows."""
    lanes = tl.arange(0, BLOCK)
    for first_index in tl.range(0, num_reqs, BLOCK):
        index = first_index + lanes
        mask = index < num_reqs
        start = tl.load(query_start_loc_ptr + index, mask=mask, other=0)
        end = tl.load(query_start_loc_ptr + index + 1, mask=mask, other=0)
        mask &= end > start
        rows = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
        num_computed = tl.load(num_computed_ptr + rows, mask=mask, other=0) + end - start
        tl.store(num_computed_ptr + rows, num_computed, mask=mask)
        mask &= tl.load(is_sampled_ptr + index, mask=mask, other=0) != 0
        token = tl.load(sampled_ptr + index, mask=mask, other=0)
        tl.store(tokens_ptr + rows * tokens_stride + num_computed, token, mask=mask & (num_computed < max_len))
        if COUNTS_TOKENS:
            tl.atomic_add(counts_ptr + rows * counts_stride + token, 1, mask=mask)
