"""Paged attention of requests with one query each, on CUDA.

A tile holds the query heads of one key-value head, so that keys and values are read once for a whole group. The work is
cut into units of about the same number of tokens, over all requests together, by a kernel that runs once a step: the
launches depend on the number of requests alone, so that one graph serves any lengths, and a long request among short
ones doesn't hold up the rest. Units of one request (Dao et al. 2023, split-KV) are merged by a second kernel.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.attention.triton_tile import LOG2_E, attend_blocks
from nanovllm_kernels.attention.triton_tile_fp8 import attend_fp8_blocks, narrow_queries
from nanovllm_kernels.platform import can_overlap_launches

# About so many programs merge: more of them take as long to begin, and where most requests are of one unit that is all
# they do.
MERGE_PROGRAMS = 4096


def plan_units(
    seq_lens: Tensor, query_start_loc: Tensor, num_units: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the work of the requests with one query into at most `num_units` + B units.

    Returns int32 tensors: where each request's units begin [B + 1], the request of each unit [num_units + B], -1 where
    there is none, and the tokens of a unit [1], a multiple of `block_size`.
    """
    num_reqs = seq_lens.shape[0]
    starts = seq_lens.new_empty((num_reqs + 1,))
    owners = seq_lens.new_empty((num_units + num_reqs,))
    unit_len = seq_lens.new_empty((1,))
    _plan_units[(1,)](
        seq_lens,
        query_start_loc,
        starts,
        owners,
        unit_len,
        num_reqs,
        num_units,
        BLOCK_SIZE=block_size,
        MIN_UNIT=tiles.MIN_UNIT_TOKENS,
        PADDED_REQS=tiles.next_power_of_2(num_reqs),
        PADDED_UNITS=tiles.next_power_of_2(num_units + num_reqs),
        num_warps=4,
    )
    return starts, owners, unit_len


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    units: tuple[Tensor, Tensor, Tensor],
    scale: float,
    out: Tensor,
) -> None:
    """Attend for the requests of `units`, as `plan_units` made it; writes the rows of `out` that are theirs."""
    starts, owners, unit_len = units
    _, num_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[2] // 2
    num_units = owners.shape[0]
    group = num_heads // num_kv_heads
    config = tiles.tile_config(head_dim, tiles.number_size(q.element_size(), kv_cache.element_size()), group, 1)
    padded = tiles.next_power_of_2(head_dim)
    overlap = can_overlap_launches(q.device)
    partial = q.new_empty((num_units, num_heads, head_dim), dtype=torch.float32)
    lse = q.new_empty((num_units, num_heads), dtype=torch.float32)
    _attend_unit[(num_kv_heads, num_units)](
        q,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        seq_lens,
        query_start_loc,
        starts,
        owners,
        unit_len,
        out,
        partial,
        lse,
        scale * LOG2_E,
        q.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        QUANTIZED=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=overlap,
    )
    merge_units(partial, lse, query_start_loc, starts, out)


def merge_units(partial: Tensor, lse: Tensor, query_start_loc: Tensor, starts: Tensor, out: Tensor) -> None:
    """Merge the units of each request that has several into its row of `out` [T, H, D].

    partial: float32 [units, H, D], each unit's own softmax; lse: float32 [units, H], the logarithm of its normalizer to
    base 2. starts: of `plan_units`.
    """
    _, num_heads, head_dim = partial.shape
    overlap = can_overlap_launches(out.device)
    num_reqs = starts.shape[0] - 1
    _merge_units[(num_reqs, min(num_heads, triton.cdiv(MERGE_PROGRAMS, num_reqs)))](
        partial,
        lse,
        query_start_loc,
        starts,
        out,
        num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=tiles.next_power_of_2(head_dim),
        BLOCK=16,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


@triton.jit(
    do_not_specialize=["num_reqs", "num_units"], do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr"]
)
def _plan_units(
    seq_lens_ptr,
    query_start_loc_ptr,
    starts_ptr,
    owners_ptr,
    unit_len_ptr,
    num_reqs,
    num_units,
    BLOCK_SIZE: tl.constexpr,
    MIN_UNIT: tl.constexpr,
    PADDED_REQS: tl.constexpr,
    PADDED_UNITS: tl.constexpr,
):
    """A single program."""
    requests = tl.arange(0, PADDED_REQS)
    inside = requests < num_reqs
    begin = tl.load(query_start_loc_ptr + requests, mask=inside, other=0)
    end = tl.load(query_start_loc_ptr + requests + 1, mask=inside, other=0)
    lengths = tl.load(seq_lens_ptr + requests, mask=inside & (end - begin == 1), other=0)
    unit_len = tl.maximum(tl.cdiv(tl.sum(lengths.to(tl.int64), 0), num_units), MIN_UNIT).to(tl.int32)
    unit_len = tl.cdiv(unit_len, BLOCK_SIZE) * BLOCK_SIZE
    tl.store(unit_len_ptr, unit_len)
    counts = tl.cdiv(lengths, unit_len)
    ends = tl.cumsum(counts, 0)
    tl.store(starts_ptr + requests + 1, ends, mask=inside)
    tl.store(starts_ptr, 0)
    units = tl.arange(0, PADDED_UNITS)
    tl.store(owners_ptr + units, -1, mask=units < num_units + num_reqs)
    tl.debug_barrier()
    for index in tl.range(0, tl.max(counts, 0)):
        tl.store(owners_ptr + ends - counts + index, requests, mask=index < counts)


# A step's shape must never cost a compilation: what changes from step to step isn't specialised on.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend_unit(
    q_ptr,
    kv_ptr,
    scales_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    starts_ptr,
    owners_ptr,
    unit_len_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    scale_log2,
    q_stride_token,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One request's query heads of one key-value head against one unit of its keys."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    request = tl.load(owners_ptr + unit)
    if request < 0:
        return
    first_unit = tl.load(starts_ptr + request)
    num_units = tl.load(starts_ptr + request + 1) - first_unit
    unit_len = tl.load(unit_len_ptr)
    seq_len = tl.load(seq_lens_ptr + request)
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    begin = (unit - first_unit) * unit_len
    end = tl.minimum(begin + unit_len, seq_len)

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    row_mask = rows < GROUP
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    mask = row_mask[:, None] & dim_mask[None, :]
    q = tl.load(q_ptr + token * q_stride_token + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    k_ptr = kv_ptr + kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    positions = tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1)
    if QUANTIZED:
        q, scale_log2 = narrow_queries(q, scale_log2)
        scales_ptr += kv_head * PAGE_SIZE
        even = tl.zeros([BLOCK_M, PADDED_DIM // 2], dtype=tl.float32)
        odd = tl.zeros([BLOCK_M, PADDED_DIM // 2], dtype=tl.float32)
        even, odd, running_max, running_sum = attend_fp8_blocks(
            even,
            odd,
            running_max,
            running_sum,
            q,
            k_ptr,
            scales_ptr,
            table_ptr,
            positions,
            dims,
            dim_mask,
            begin,
            end,
            end,
            scale_log2,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            True,
        )
        acc = tl.interleave(even, odd)
    else:
        acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
        acc, running_max, running_sum = attend_blocks(
            acc,
            running_max,
            running_sum,
            q,
            k_ptr,
            table_ptr,
            positions,
            dims,
            dim_mask,
            begin,
            end,
            end,
            scale_log2,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            PAGE_SIZE,
            BLOCK_N,
            True,
        )
    acc = acc / running_sum[:, None]
    if num_units == 1:
        out_ptr += token * (NUM_KV_HEADS * GROUP * HEAD_DIM)
        tl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        places = unit * (NUM_KV_HEADS * GROUP) + heads
        tl.store(partial_ptr + places[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(lse_ptr + places, running_max + tl.log2(running_sum), mask=row_mask)


@triton.jit(do_not_specialize_on_alignment=["query_start_loc_ptr"])
def _merge_units(
    partial_ptr,
    lse_ptr,
    query_start_loc_ptr,
    starts_ptr,
    out_ptr,
    num_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Weigh the units of one request, head after head, by the share of the softmax that each saw."""
    if OVERLAP:
        # Followers aren't let go early: the first weights of a projection would hold up attention's keys and values.
        gdc_wait()
    request = tl.program_id(0)
    first = tl.load(starts_ptr + request)
    last = tl.load(starts_ptr + request + 1)
    if last - first < 2:
        return
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    for head in tl.range(tl.program_id(1), num_heads, tl.num_programs(1)):
        acc = tl.zeros([PADDED_DIM], dtype=tl.float32)
        running_max = float("-inf")
        running_sum = 0.0
        for begin in tl.range(first, last, BLOCK):
            units = begin + tl.arange(0, BLOCK)
            inside = units < last
            lse = tl.load(lse_ptr + units * num_heads + head, mask=inside, other=float("-inf"))
            partial = tl.load(
                partial_ptr + (units * num_heads + head)[:, None] * HEAD_DIM + dims[None, :],
                mask=inside[:, None] & (dims < HEAD_DIM)[None, :],
                other=0.0,
            )
            new_max = tl.maximum(running_max, tl.max(lse, 0))
            weights = tl.exp2(lse - new_max)
            rescale = tl.exp2(running_max - new_max)
            running_sum = running_sum * rescale + tl.sum(weights, 0)
            acc = acc * rescale + tl.sum(partial * weights[:, None], 0)
            running_max = new_max
        place = (token * num_heads + head) * HEAD_DIM + dims
        tl.store(out_ptr + place, (acc / running_sum).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
