"""Packs the requests of one kernel together, so that a launch for them has few empty places."""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl
from torch import Tensor

# Requests that a program examines at once, and pages that it copies at once.
REQUEST_BLOCK = 512
PAGE_BLOCK = 1024


def gather_requests(
    query_lens: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_tables: Tensor,
    num_places: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `flash_prefill._gather_requests_op`."""
    num_reqs, width = block_tables.shape
    outputs = (
        seq_lens.new_empty((num_places + 1,)),
        seq_lens.new_empty((num_places,)),
        seq_lens.new_empty((num_places,)),
        block_tables.new_empty((num_places, width)),
    )
    _gather_requests[(num_places, triton.cdiv(width, PAGE_BLOCK))](
        query_lens,
        seq_lens,
        query_start_loc,
        block_tables,
        *outputs,
        num_reqs,
        width,
        block_tables.stride(0),
        page_size,
        num_places,
        REQUEST_BLOCK=REQUEST_BLOCK,
        PAGE_BLOCK=PAGE_BLOCK,
        num_warps=4,
    )
    return outputs


@triton.jit(
    do_not_specialize=["num_reqs", "width", "table_stride", "page_size", "num_places"],
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
    width,
    table_stride,
    page_size,
    num_places,
    REQUEST_BLOCK: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
):
    """Fill one place with the request that has `place` requests with queries before it, and one block of its pages."""
    place = tl.program_id(0)
    request = -1
    num_before = 0
    for first in tl.range(0, num_reqs, REQUEST_BLOCK):
        requests = first + tl.arange(0, REQUEST_BLOCK)
        query_lens = tl.load(query_lens_ptr + requests, mask=requests < num_reqs, other=0)
        has_queries = query_lens > 0
        ranks = num_before + tl.cumsum(has_queries.to(tl.int32), 0)
        request = tl.maximum(request, tl.max(tl.where(has_queries & (ranks == place + 1), requests, -1), 0))
        num_before += tl.sum(has_queries.to(tl.int32), 0)
    is_taken = request >= 0
    query_len = tl.load(query_lens_ptr + request, mask=is_taken, other=0)
    seq_len = tl.load(seq_lens_ptr + request, mask=is_taken, other=0)
    if tl.program_id(1) == 0:
        start = tl.load(query_start_loc_ptr + request, mask=is_taken, other=0)
        tl.store(out_starts_ptr + place, start)
        tl.store(out_query_lens_ptr + place, query_len)
        tl.store(out_seq_lens_ptr + place, seq_len)
        tl.store(out_starts_ptr + num_places, 0)
    first_page = tl.program_id(1) * PAGE_BLOCK
    if first_page < tl.cdiv(seq_len, page_size):
        pages = first_page + tl.arange(0, PAGE_BLOCK)
        source = block_tables_ptr + request.to(tl.int64) * table_stride + pages
        target = out_tables_ptr + place.to(tl.int64) * width + pages
        tl.store(target, tl.load(source, mask=pages < width), mask=pages < width)
