"""Attention over a paged key-value cache.

This room must not know models, nor who owns a page. The kernel serves decodes, prefill chunks and any mix of them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanovllm_kernels.attention import flash_prefill, reference, tiles
from nanovllm_kernels.platform import describe, has_cute, has_few_rows, has_flash_attention

__all__ = ["AttentionBatch", "Backend", "even_chunk", "paged_attention", "plan_batch"]

# Beside plain torch: our Triton kernels, with FlashAttention for prompts, with our CuTe DSL kernel for decodes, or with
# whichever of both is there and takes the shape, which measured fastest everywhere.
Backend = Literal["torch", "triton", "flash", "cutedsl", "fastest"]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What attention must know of a step's batch, the same for every layer. Made by `plan_batch`.

    few: whether it is for the kernel that a CPU has for few queries over a bf16 cache. gathers: what plain torch works
    out once a step. units: what the Triton kernels do for requests with one query.
    decode_lens, workspace: what the CuTe DSL kernel does for them: their lengths, 0 for other requests, and its memory.
    prefill_lens: what FlashAttention does for those with several: how many, 0 for other requests. num_absorbed: int32
    [1], of a step with prompts over latents, the tokens up to the last that is of no prompt whole in the step. Each is
    None, or empty, where it isn't needed. The rest: as given to `plan_batch`.
    """

    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    few: bool
    gathers: reference.Gathers | None
    units: tuple[Tensor, Tensor, Tensor] | None
    decode_lens: Tensor | None
    workspace: tuple[Tensor, ...]
    prefill_lens: Tensor | None
    num_absorbed: Tensor | None = None


def plan_batch(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    num_decodes: int | None,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    kv_cache: Tensor,
    backend: Backend,
    dtype: torch.dtype | None = None,
) -> AttentionBatch:
    """Prepare a step's attention, once for all its layers.

    block_tables: int32 [B, max_blocks], the pages of each request in order; entries beyond its length are any valid
        page number and are not read from. seq_lens: int32 [B], tokens of each request, this step's included.
    query_start_loc: int32 [B + 1], where each request's queries begin. Query i of n of request b sits at position
        seq_lens[b] - n + i and sees the tokens up to itself.
    num_decodes: how many leading requests have exactly one query; None where the host doesn't know (not for "torch"):
        then the launches cover every case, so that a captured graph may be replayed for any lengths within the bounds.
    max_query_len, max_seq_len: bounds over the batch, known to the host; they shape the launch and need not be tight.
    num_heads: query heads. kv_cache: any layer's, for its shape and dtype: they all have the same.
    backend: "torch" runs everywhere, but waits for the device on CUDA. The others need a CUDA device ("triton": or its
        interpreter) and never wait for it; a request may then have no query. "flash" and "cutedsl" need the extras
        flash-attn and cutedsl; FlashAttention is used for no FP8 cache.
    dtype: of the queries; by default the cache's.
    """
    gathers = units = decode_lens = prefill_lens = None
    few = False
    workspace: tuple[Tensor, ...] = ()
    _, page_size, num_cached, head_dim = kv_cache.shape
    num_kv_heads, cached, device = num_cached // 2, kv_cache.dtype, kv_cache.device
    if backend == "torch":
        if num_decodes is None:
            raise ValueError('the backend "torch" must know num_decodes')
        few = cached == torch.bfloat16 and not kv_cache.is_cuda and has_few_rows(int(query_start_loc[-1]))
        if not few:
            gathers = reference.plan_gathers(block_tables, seq_lens, query_start_loc, num_decodes, page_size)
    elif num_decodes != 0 and backend in ("cutedsl", "fastest") and has_cute():
        from nanovllm_kernels.attention import cute_decode

        if cute_decode.can_decode(head_dim, num_heads // num_kv_heads, page_size, dtype or cached, cached, device):
            decode_lens = _decode_lens(seq_lens, query_start_loc, num_decodes, max_query_len)
            workspace = cute_decode.make_workspace(len(decode_lens), num_heads, num_kv_heads, head_dim, device)
    if backend != "torch" and num_decodes != 0 and decode_lens is None:
        config = tiles.tile_config(head_dim, kv_cache.element_size(), 1, 1)
        num_slots = (describe(device).num_sms or tiles.INTERPRETER_SMS) * config.ctas_per_sm
        units = _plan_units_op(seq_lens, query_start_loc, tiles.choose_units(num_kv_heads, num_slots), config.block_n)
    by_flash = backend in ("flash", "fastest") and has_flash_attention() and flash_prefill.supports(head_dim, cached)
    least = flash_prefill.LEAST_CAPTURED if num_decodes is None else 2
    if by_flash and max_query_len >= least:
        query_lens = query_start_loc.diff()
        prefill_lens = query_lens * (query_lens > 1)
    return AttentionBatch(
        block_tables,
        seq_lens,
        query_start_loc,
        max_query_len,
        max_seq_len,
        few,
        gathers,
        units,
        decode_lens,
        workspace,
        prefill_lens,
    )


def even_chunk(num_heads: int, num_kv_heads: int, device: torch.device) -> int:
    """Query tokens of one prompt chunk whose tiles fill the device once; 1 on a CPU.

    One H200, 32/8 heads, chunks over 90,000 tokens: 512 tokens run at 574 TFLOP/s, 528 at 344.
    """
    tiles_at_once = describe(device).num_sms // num_kv_heads
    return max(1, tiles_at_once * tiles.PROMPT_ROWS // (num_heads // num_kv_heads))


def _decode_lens(seq_lens: Tensor, query_start_loc: Tensor, num_decodes: int | None, max_query_len: int) -> Tensor:
    if num_decodes is not None:
        return seq_lens[:num_decodes]
    if max_query_len == 1:
        return seq_lens
    return seq_lens * (query_start_loc.diff() == 1)


def paged_attention(
    q: Tensor, kv_cache: Tensor, batch: AttentionBatch, *, scale: float, kv_scales: Tensor | None = None
) -> Tensor:
    """Causal grouped-query attention (Ainslie et al. 2023) of a batch of requests, each over its own pages.

    q: [T, Hq, D], requests one after another; heads contiguous, tokens with any stride; float32, float16 or bfloat16.
    kv_cache: [N, P, 2 Hkv, D] of the same dtype or of float8_e4m3fn, contiguous, Hq a multiple of Hkv: in each slot the
        key heads, then the value heads; this step's already written.
    scale: what the products are multiplied by before the softmax.
    kv_scales: uint8 [N, 2 Hkv, P], contiguous, where the cache is of float8_e4m3fn and only there: see `fp8`.
    Returns contiguous [T, Hq, D] in the dtype of q.
    """
    if batch.few:
        return _paged_attention_on_cpu(q, kv_cache, batch, scale)
    if batch.gathers is not None:
        return reference.paged_attention(q, kv_cache, kv_scales, batch.gathers, scale)
    return _paged_attention_op(
        q,
        kv_cache,
        kv_scales,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        batch.prefill_lens,
        batch.decode_lens,
        list(batch.workspace),
        list(batch.units or ()),
        scale,
        batch.max_query_len,
        batch.max_seq_len,
    )


def _paged_attention_on_cpu(q: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    from nanovllm_kernels.attention import numba_few

    queries = q.float()
    if queries.stride(1) != q.shape[2] or queries.stride(2) != 1:
        queries = queries.contiguous()
    out = torch.empty(q.shape)
    numba_few.paged_attention(
        queries, kv_cache, batch.block_tables, batch.seq_lens, batch.query_start_loc, batch.max_seq_len, scale, out
    )
    return out.to(q.dtype)


@torch.library.custom_op("nanovllm::plan_units", mutates_args=())
def _plan_units_op(
    seq_lens: Tensor, query_start_loc: Tensor, num_units: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    from nanovllm_kernels.attention import triton_decode

    return triton_decode.plan_units(seq_lens, query_start_loc, num_units, block_size)


@_plan_units_op.register_fake
def _(seq_lens: Tensor, _query_start_loc: Tensor, num_units: int, _block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    num_reqs = seq_lens.shape[0]
    return seq_lens.new_empty((num_reqs + 1,)), seq_lens.new_empty((num_units + num_reqs,)), seq_lens.new_empty((1,))


@torch.library.custom_op("nanovllm::paged_attention", mutates_args=("workspace",))
def _paged_attention_op(
    q: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    prefill_lens: Tensor | None,
    decode_lens: Tensor | None,
    workspace: list[Tensor],
    units: list[Tensor],
    scale: float,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    from nanovllm_kernels.attention import triton_decode, triton_prefill

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if decode_lens is not None:
        from nanovllm_kernels.attention import cute_decode

        # Request b's query is token b; zeros are written where requests with several queries have theirs from below.
        count = min(len(decode_lens), len(q))
        memory = cute_decode.Workspace(*workspace)
        cute_decode.paged_decode(q, kv_cache, kv_scales, block_tables[:count], decode_lens[:count], scale, memory, out)
    elif units:
        starts, owners, unit_len = units
        triton_decode.paged_decode(
            q, kv_cache, kv_scales, block_tables, seq_lens, query_start_loc, (starts, owners, unit_len), scale, out
        )
    if prefill_lens is not None:
        flash_prefill.paged_prefill(
            q, kv_cache, block_tables, seq_lens, query_start_loc, prefill_lens, scale, max_query_len, out
        )
    elif max_query_len > 1:
        triton_prefill.paged_prefill(
            q, kv_cache, kv_scales, block_tables, seq_lens, query_start_loc, scale, max_query_len, max_seq_len, out
        )
    return out


_paged_attention_op.register_fake(lambda q, *_: q.new_empty(q.shape))
