"""Absorbed latent attention of requests with one query each, on CUDA.

As `triton_decode`: units of about the same number of tokens, planned on the device, and a second kernel that merges
those of one request. A tile holds as many query heads as fit: all of them read the same latents. Of many heads, on
Hopper, `gluon_mla` attends.
"""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.attention import tiles
from nanovllm_kernels.attention.triton_decode import merge_units
from nanovllm_kernels.attention.triton_mla_tile import attend_latents, load_queries, specializes
from nanovllm_kernels.attention.triton_tile import LOG2_E
from nanovllm_kernels.platform import can_overlap_launches


def paged_decode(
    q_latent: Tensor,
    q_rope: Tensor,
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
    starts, owners, _ = units
    num_heads, _, latent_dim = q_latent.shape
    num_units = len(owners)
    partial = q_latent.new_empty((num_units, num_heads, latent_dim), dtype=torch.float32)
    lse = q_latent.new_empty((num_units, num_heads), dtype=torch.float32)
    tables = (block_tables, seq_lens, query_start_loc)
    if specializes(q_latent, q_rope, kv_cache):
        from nanovllm_kernels.attention import gluon_mla

        gluon_mla.attend_units(q_latent, q_rope, kv_cache, *tables, units, scale, out, partial, lse)
    else:
        _attend_units(q_latent, q_rope, kv_cache, kv_scales, *tables, units, scale, out, partial, lse)
    merge_units(partial, lse, query_start_loc, starts, out)


def _attend_units(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    units: tuple[Tensor, Tensor, Tensor],
    scale: float,
    out: Tensor,
    partial: Tensor,
    lse: Tensor,
) -> None:
    """Attend for each of `units`; writes rows of `out` where a request has one unit, else of `partial` and `lse`."""
    starts, owners, unit_len = units
    num_heads, num_tokens, latent_dim = q_latent.shape
    rope_dim = q_rope.shape[2]
    config = tiles.latent_config(num_heads, tiles.number_size(q_latent.element_size(), kv_cache.element_size()))
    overlap = can_overlap_launches(q_latent.device)
    _attend_latent_unit[(triton.cdiv(num_heads, config.block_m), len(owners))](
        q_latent,
        q_rope,
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
        num_tokens,
        q_rope.stride(0),
        q_rope.stride(1),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        LATENT=latent_dim,
        PADDED_LATENT=max(16, tiles.next_power_of_2(latent_dim)),
        ROPE=rope_dim,
        PADDED_ROPE=max(16, tiles.next_power_of_2(rope_dim)),
        PAGE_SIZE=kv_cache.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        QUANTIZED=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=overlap,
    )


# A step's shape must never cost a compilation: what changes from step to step isn't specialised on.
@triton.jit(
    do_not_specialize=["table_stride", "num_tokens"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend_latent_unit(
    q_latent_ptr,
    q_rope_ptr,
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
    num_tokens,
    rope_stride_token,
    rope_stride_head,
    table_stride,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block of one request's query heads against one unit of its latents."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
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

    heads = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = heads < NUM_HEADS
    q_latent, q_rope, scale_log2 = load_queries(
        q_latent_ptr,
        q_rope_ptr,
        token,
        heads,
        row_mask,
        num_tokens,
        rope_stride_token,
        rope_stride_head,
        scale_log2,
        LATENT,
        PADDED_LATENT,
        ROPE,
        PADDED_ROPE,
        QUANTIZED,
    )
    running_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_LATENT], dtype=tl.float32)
    acc, running_max, running_sum = attend_latents(
        acc,
        running_max,
        running_sum,
        q_latent,
        q_rope,
        kv_ptr,
        scales_ptr,
        block_tables_ptr + request.to(tl.int64) * table_stride,
        tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1),
        begin,
        end,
        end,
        scale_log2,
        LATENT,
        PADDED_LATENT,
        ROPE,
        PADDED_ROPE,
        PAGE_SIZE,
        BLOCK_N,
        QUANTIZED,
        True,
    )
    acc = acc / running_sum[:, None]
    dims = tl.arange(0, PADDED_LATENT)
    mask = row_mask[:, None] & (dims < LATENT)[None, :]
    if num_units == 1:
        places = token * NUM_HEADS + heads
        tl.store(out_ptr + places[:, None] * LATENT + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        places = unit.to(tl.int64) * NUM_HEADS + heads
        tl.store(partial_ptr + places[:, None] * LATENT + dims[None, :], acc, mask=mask)
        tl.store(lse_ptr + places, running_max + tl.log2(running_sum), mask=row_mask)
