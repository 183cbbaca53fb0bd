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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See the package's `build_inputs`."""
    num_reqs = rows.shape[0]
    input_ids = tokens.new_empty((num_tokens,))
    positions = tokens.new_empty((num_tokens,), dtype=torch.int64)
    slot_mapping = torch.empty_like(positions)
    seq_lens = num_computed.new_empty((num_reqs,))
    last = positions.new_empty((num_reqs,))
    block_tables = block_table.new_empty((num_reqs, width))
    _build_inputs[(num_reqs + 1,)](
        rows,
        query_start_loc,
        tokens,
        num_computed,
        block_table,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        last,
        block_tables,
        tokens.stride(0),
        block_table.stride(0),
        width,
        num_tokens,
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return input_ids, positions, seq_lens, slot_mapping, last, block_tables


def commit_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    sampled: Tensor,
    samples: Tensor,
    tokens: Tensor,
    num_computed: Tensor,
    counts: Tensor | None,
) -> None:
    """See the package's `commit_tokens`."""
    _commit_tokens[(1,)](
        rows,
        query_start_loc,
        sampled,
        samples,
        tokens,
        num_computed,
        tokens if counts is None else counts,
        rows.shape[0],
        tokens.shape[1],
        tokens.stride(0),
        0 if counts is None else counts.stride(0),
        COUNT=counts is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


@triton.jit(
    do_not_specialize=["width", "num_tokens"], do_not_specialize_on_alignment=["rows_ptr", "query_start_loc_ptr"]
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
    last_ptr,
    block_tables_ptr,
    tokens_stride,
    table_stride,
    width,
    num_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather one request's tokens, then its row of the block table. The last program fills the padding."""
    request = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if request == tl.num_programs(0) - 1:
        zeros = tl.zeros([BLOCK], dtype=tl.int64)
        for first in tl.range(tl.load(query_start_loc_ptr + request), num_tokens, BLOCK):
            offsets = first + lanes
            mask = offsets < num_tokens
            tl.store(input_ids_ptr + offsets, zeros.to(tl.int32), mask=mask)
            tl.store(positions_ptr + offsets, zeros, mask=mask)
            tl.store(slot_mapping_ptr + offsets, zeros, mask=mask)
        return
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    computed = tl.load(num_computed_ptr + row)
    tl.store(seq_lens_ptr + request, tl.where(query_len > 0, computed + query_len, 0))
    tl.store(last_ptr + request, tl.maximum(start + query_len - 1, 0).to(tl.int64))
    for first in tl.range(0, query_len, BLOCK):
        offsets = first + lanes
        mask = offsets < query_len
        positions = computed + offsets
        input_ids = tl.load(tokens_ptr + row * tokens_stride + positions, mask=mask)
        pages = tl.load(block_table_ptr + row * table_stride + positions // PAGE_SIZE, mask=mask).to(tl.int64)
        tl.store(input_ids_ptr + start + offsets, input_ids, mask=mask)
        tl.store(positions_ptr + start + offsets, positions.to(tl.int64), mask=mask)
        tl.store(slot_mapping_ptr + start + offsets, pages * PAGE_SIZE + positions % PAGE_SIZE, mask=mask)
    used = tl.minimum((computed + query_len + PAGE_SIZE - 1) // PAGE_SIZE, width)
    for first in tl.range(0, used, BLOCK):
        columns = first + lanes
        mask = columns < used
        pages = tl.load(block_table_ptr + row * table_stride + columns, mask=mask)
        tl.store(block_tables_ptr + request.to(tl.int64) * width + columns, pages, mask=mask)


@triton.jit(
    do_not_specialize=["num_reqs", "max_len"],
    do_not_specialize_on_alignment=["rows_ptr", "query_start_loc_ptr", "sampled_ptr", "samples_ptr"],
)
def _commit_tokens(
    rows_ptr,
    query_start_loc_ptr,
    sampled_ptr,
    samples_ptr,
    tokens_ptr,
    num_computed_ptr,
    counts_ptr,
    num_reqs,
    max_len,
    tokens_stride,
    counts_stride,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Record all requests in a single program. Skip requests without tokens, which may share a row with any other."""
    lanes = tl.arange(0, BLOCK)
    for first in tl.range(0, num_reqs, BLOCK):
        index = first + lanes
        mask = index < num_reqs
        start = tl.load(query_start_loc_ptr + index, mask=mask, other=0)
        end = tl.load(query_start_loc_ptr + index + 1, mask=mask, other=0)
        mask &= end > start
        rows = tl.load(rows_ptr + index, mask=mask, other=0).to(tl.int64)
        computed = tl.load(num_computed_ptr + rows, mask=mask, other=0) + end - start
        tl.store(num_computed_ptr + rows, computed, mask=mask)
        mask &= tl.load(samples_ptr + index, mask=mask, other=0) != 0
        token = tl.load(sampled_ptr + index, mask=mask, other=0)
        tl.store(tokens_ptr + rows * tokens_stride + computed, token, mask=mask & (computed < max_len))
        if COUNT:
            tl.atomic_add(counts_ptr + rows * counts_stride + token, 1, mask=mask)
