"""Collects, on the device, the requests of a FlashAttention launch and their page numbers."""

import triton
import triton.language as tl
from torch import Tensor

# Number of requests that a program examines at once.
REQUEST_BLOCK = 512
# Maximum number of page numbers that a program copies.
PAGE_BLOCK = 1024


def gather_requests(
    query_lens: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_tables: Tensor,
    num_entries: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of `FlashRequests`. The `num_entries` entries hold the requests with `query_lens` > 0."""
    num_reqs, max_blocks = block_tables.shape
    outputs = (
        seq_lens.new_empty((num_entries + 1,)),
        seq_lens.new_empty((num_entries,)),
        seq_lens.new_empty((num_entries,)),
        block_tables.new_empty((num_entries, max_blocks)),
    )
    _gather_requests[(num_entries, triton.cdiv(max_blocks, PAGE_BLOCK))](
        query_lens,
        seq_lens,
        query_start_loc,
        block_tables,
        *outputs,
        num_reqs,
        max_blocks,
        block_tables.stride(0),
        page_size,
        num_entries,
        REQUEST_BLOCK=REQUEST_BLOCK,
        PAGE_BLOCK=PAGE_BLOCK,
        num_warps=4,
    )
    return outputs


@triton.jit(
    do_not_specialize=["num_reqs", "max_blocks", "table_stride", "page_size", "num_entries"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr", "block_tables_ptr"],
)
def _gather_requests(
    query_lens_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    block_tables_ptr,
    out_starts_ptr,
    out_query_lens_ptr,
    out_seq_lens_ptr,
    out_tables_ptr,
    num_reqs,
    max_blocks,
    table_stride,
    page_size,
    num_entries,
    REQUEST_BLOCK: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
):
    """Fill entry e with the e-th request that has query_lens > 0, and copy one block of the request's page numbers."""
    entry = tl.program_id(0)
    request = -1
    num_selected = 0
    for first_request in tl.range(0, num_reqs, REQUEST_BLOCK):
        requests = first_request + tl.arange(0, REQUEST_BLOCK)
        query_lens = tl.load(query_lens_ptr + requests, mask=requests < num_reqs, other=0)
        is_selected = query_lens > 0
        ranks = num_selected + tl.cumsum(is_selected.to(tl.int32), 0)  # 1 for the first selected request.
        request = tl.maximum(request, tl.max(tl.where(is_selected & (ranks == entry + 1), requests, -1), 0))
        num_selected += tl.sum(is_selected.to(tl.int32), 0)
    is_used = request >= 0
    query_len = tl.load(query_lens_ptr + request, mask=is_used, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=is_used, other=0)
    if tl.program_id(1) == 0:
        query_start = tl.load(query_start_loc_ptr + request, mask=is_used, other=0)
        tl.store(out_starts_ptr + entry, query_start)
        tl.store(out_query_lens_ptr + entry, query_len)
        tl.store(out_seq_lens_ptr + entry, seq_len)
        tl.store(out_starts_ptr + num_entries, 0)
    first_column = tl.program_id(1) * PAGE_BLOCK
    if first_column < tl.cdiv(seq_len, page_size):
        columns = first_column + tl.arange(0, PAGE_BLOCK)
        source_ptrs = block_tables_ptr + request.to(tl.int64) * table_stride + columns
        target_ptrs = out_tables_ptr + entry.to(tl.int64) * max_blocks + columns
        tl.store(target_ptrs, tl.load(source_ptrs, mask=columns < max_blocks), mask=columns < max_blocks)
