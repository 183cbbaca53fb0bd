"""A step's inputs on CUDA: one kernel before the forward pass and one after it."""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def build_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    block_table: Tensor,
    page_size: int,
    num_tokens: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the package's `build_inputs`."""
    num_reqs = rows.shape[0]
    input_ids = tokens.new_empty((num_tokens,))
    positions = tokens.new_empty((num_tokens,), dtype=torch.int64)
    slot_mapping = torch.empty_like(positions)
    seq_lens = num_computed.new_empty((num_reqs,))
    block_tables = block_table.new_empty((num_reqs, width))
    _build_inputs[(num_reqs,)](
        rows,
        query_start_loc,
        tokens,
        num_computed,
        block_table,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        block_tables,
        tokens.stride(0),
        block_table.stride(0),
        width,
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return input_ids, positions, seq_lens, slot_mapping, block_tables


def commit_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    sample_index: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    counts: Tensor | None,
) -> None:
    """See the package's `commit_tokens`."""
    _commit_tokens[(1,)](
        rows,
        query_start_loc,
        sampled,
        sample_index,
        tokens,
        num_computed,
        tokens if counts is None else counts,
        rows.shape[0],
        sampled.shape[0],
        tokens.shape[1],
        tokens.stride(0),
        0 if counts is None else counts.stride(0),
        COUNT=counts is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows_ptr", "query_start_loc_ptr"])
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
    block_tables_ptr,
    tokens_stride,
    table_stride,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request: its tokens, then its row of the block table."""
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    computed = tl.load(num_computed_ptr + row)
    tl.store(seq_lens_ptr + request, computed + query_len)
    lanes = tl.arange(0, BLOCK)
    for first in tl.range(0, query_len, BLOCK):
        offsets = first + lanes
        mask = offsets < query_len
        positions = computed + offsets
        input_ids = tl.load(tokens_ptr + row * tokens_stride + positions, mask=mask)
        pages = tl.load(block_table_ptr + row * table_stride + positions // PAGE_SIZE, mask=mask).to(tl.int64)
        tl.store(input_ids_ptr + start + offsets, input_ids, mask=mask)
        tl.store(positions_ptr + start + offsets, positions.to(tl.int64), mask=mask)
        tl.store(slot_mapping_ptr + start + offsets, pages * PAGE_SIZE + positions % PAGE_SIZE, mask=mask)
    for first in tl.range(0, width, BLOCK):
        columns = first + lanes
        mask = columns < width
        pages = tl.load(block_table_ptr + row * table_stride + columns, mask=mask)
        tl.store(block_tables_ptr + request.to(tl.int64) * width + columns, pages, mask=mask)


@triton.jit(
    do_not_specialize=["num_reqs", "num_sampled", "max_len"],
    do_not_specialize_on_alignment=["rows_ptr", "query_start_loc_ptr", "sampled_ptr", "sample_index_ptr"],
)
def _commit_tokens(
    rows_ptr,
    query_start_loc_ptr,
    sampled_ptr,
    sample_index_ptr,
    tokens_ptr,
    num_computed_ptr,
    counts_ptr,
    num_reqs,
    num_sampled,
    max_len,
    tokens_stride,
    counts_stride,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A single program, so that a barrier can stand between the new lengths and the tokens placed by them."""
    lanes = tl.arange(0, BLOCK)
    for first in tl.range(0, num_reqs, BLOCK):
        index = first + lanes
        mask = index < num_reqs
        rows = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
        start = tl.load(query_start_loc_ptr + index, mask=mask, other=0)
        end = tl.load(query_start_loc_ptr + index + 1, mask=mask, other=0)
        computed = tl.load(num_computed_ptr + rows, mask=mask, other=0)
        tl.store(num_computed_ptr + rows, computed + end - start, mask=mask)
    tl.debug_barrier()
    for first in tl.range(0, num_sampled, BLOCK):
        index = first + lanes
        mask = index < num_sampled
        request = tl.load(sample_index_ptr + index, mask=mask, other=0)
        rows = tl.load(rows_ptr + request, mask=mask, other=0).to(tl.int64)
        token = tl.load(sampled_ptr + index, mask=mask, other=0)
        place = tl.load(num_computed_ptr + rows, mask=mask, other=0)
        tl.store(tokens_ptr + rows * tokens_stride + place, token, mask=mask & (place < max_len))
        if COUNT:
            tl.atomic_add(counts_ptr + rows * counts_stride + token, 1, mask=mask)
