"""Computes multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434) over a paged cache.

The cache holds one latent and one rotated key part (with rotary embedding) per token, shared by all heads. Absorbed
attention works on latents: it projects queries into the latent space, and projects results back. A whole prompt has
several tokens, and all of them are in the step. For whole prompts, latents are expanded to keys and values instead,
because this needs less arithmetic.
Sizes: a key has K unrotated and R rotated elements, a value has V elements, and a latent has L elements.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.attention.gqa import flash_prefill
from nanovllm_kernels.attention.mla import mla_reference
from nanovllm_kernels.attention.plan import tile_configs
from nanovllm_kernels.attention.plan.attention_batch import AttentionBatch, Backend, PagedRequests
from nanovllm_kernels.attention.plan.flash_requests import FlashRequests
from nanovllm_kernels.attention.plan.work_list import WorkList, WorkListFilter, make_work_list, split_query_lens
from nanovllm_kernels.platform import has_flash_attention

__all__ = ["latent_attention", "plan_latent_batch"]

# If a step may have prompts and has at least this many tokens, `triton_head_projection` replaces cuBLAS. The Triton
# kernel is slower per token, but skips tokens that need no projection.
MIN_SKIPPING_TOKENS = 1024


def plan_latent_batch(
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
    num_tokens: int | None = None,
    has_only_whole_prompts: bool = False,  # noqa: ARG001 - same signature as `plan_batch`
) -> AttentionBatch:
    """Plan the latent attention of a step, once for all layers. The cache is [pages, slots per page, 1, L + R].

    backend: "torch" uses plain torch, every other backend uses Triton. "flash" and "fastest" compute whole prompts with
        FlashAttention, if it is installed.
    has_only_whole_prompts: ignored, because the device finds whole prompts.
    Other arguments: as in `gqa.plan_batch`.
    """
    element_bytes = tile_configs.tile_element_bytes((dtype or kv_cache.dtype).itemsize, kv_cache.element_size())
    batch = AttentionBatch(block_tables, seq_lens, query_start_loc, max_query_len, max_seq_len, element_bytes)
    if backend == "torch":
        return batch.with_gathers(num_decodes, kv_cache.shape[1], dtype)
    configs = [tile_configs.latent_tile_config(num_heads, element_bytes, many_queries=many) for many in (False, True)]
    # A tile has `block_m` rows: one per query position and query head.
    heads_per_tile = [tile_configs.latent_tile_heads(num_heads, config) for config in configs]
    queries_per_tile = [config.block_m // num for config, num in zip(configs, heads_per_tile, strict=True)]
    query_len_ranges = split_query_lens(*queries_per_tile, 2 if num_decodes == 0 else 1, max_query_len)
    work_lists: list[WorkList | None] = []
    whole_query_lens = None
    tile_sizes = zip(configs, heads_per_tile, queries_per_tile, query_len_ranges, strict=True)
    for config, num_tile_heads, block_q, query_lens in tile_sizes:
        if not query_lens:
            work_lists.append(None)
            continue
        work, whole_query_lens = make_work_list(
            seq_lens,
            query_start_loc,
            query_lens,
            WorkListFilter(min_context=1),  # Excludes whole prompts.
            config,
            block_q=block_q,
            num_head_blocks=-(-num_heads // num_tile_heads),
            num_tokens=len(seq_lens) * max_query_len if num_tokens is None else num_tokens,
        )
        work_lists.append(work)
    batch = replace(batch, narrow_work=work_lists[0], wide_work=work_lists[1])
    if max_query_len == 1:
        return batch
    query_lens = query_start_loc.diff()
    is_whole = (query_lens > 1) & (query_lens == seq_lens)
    num_absorbed_tokens = (query_start_loc[1:] * ((query_lens > 0) & ~is_whole)).amax(0, keepdim=True)
    uses_flash = backend in ("flash", "fastest") and has_flash_attention() and whole_query_lens is not None
    flash_requests = FlashRequests(query_start_loc, whole_query_lens) if uses_flash else None
    return replace(batch, flash_requests=flash_requests, num_absorbed_tokens=num_absorbed_tokens)


def latent_attention(
    q: Tensor,
    expansion: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Compute causal latent attention of the requests of `batch` over their pages.

    q: [T, H, K + R], request after request, contiguous; float32, float16 or bfloat16. Each head has K unrotated
        elements, then R rotated elements.
    expansion: [H, K + V, L], contiguous. A head's first K rows expand a latent to a key, the other V rows to a value.
        The dtype is q's dtype. On a CPU with float32 q, any dtype is allowed.
    kv_cache: [pages, slots per page, 1, L + R], contiguous, `expansion`'s dtype or float8_e4m3fn. Each slot has a
        normed latent, then the rotated key part. This step's tokens are already written.
    batch: from `plan_latent_batch`.
    scale: factor of the query-key products.
    kv_scales: uint8 [pages, 1, slots per page], contiguous, for a float8_e4m3fn cache (see `fp8`), else None.
    Returns: contiguous [T, H, V] in `expansion`'s dtype.
    """
    if batch.torch_plan is not None:
        return mla_reference.latent_attention(q, expansion, kv_cache, kv_scales, batch.torch_plan, scale)
    batch.check_element_size(q, kv_cache)
    num_heads, expanded_dim, latent_dim = expansion.shape
    rope_dim = kv_cache.shape[3] - latent_dim
    key_dim = q.shape[2] - rope_dim  # K, without the rotated elements.
    key_expansion, value_expansion = expansion.split((key_dim, expanded_dim - key_dim), 1)
    q_latent = q.new_empty((num_heads, q.shape[0], latent_dim))
    _project_heads(q[:, :, :key_dim], key_expansion, batch.num_absorbed_tokens, q_latent.transpose(0, 1))
    latent_results = _latent_attention_op(
        q_latent,
        q[:, :, key_dim:],
        kv_cache,
        kv_scales,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        list(batch.narrow_work or ()),
        list(batch.wide_work or ()),
        scale,
    )
    out = q.new_empty((q.shape[0], num_heads, expanded_dim - key_dim))
    _project_heads(latent_results, value_expansion.transpose(1, 2), batch.num_absorbed_tokens, out)
    if batch.max_query_len > 1:
        _attend_whole_prompts(q, expansion, kv_cache, kv_scales, batch, scale, out)
    return out


def _project_heads(x: Tensor, weight: Tensor, num_projected: Tensor | None, out: Tensor) -> None:
    """Multiply `x` [T, H, M] by `weight` [H, M, N] for each head, and write the products into `out` [T, H, N].

    num_projected: int32 [1], number of leading tokens to project. None: all tokens.
    """
    if num_projected is None or len(x) < MIN_SKIPPING_TOKENS:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    else:
        _project_heads_op(x, weight, num_projected, out)


def _attend_whole_prompts(
    q: Tensor,
    expansion: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    batch: AttentionBatch,
    scale: float,
    out: Tensor,
) -> None:
    """Compute attention of whole prompts over expanded keys and values, and write their rows of `out` [T, H, V]."""
    num_tokens, num_heads, head_dim = q.shape
    expanded_dim, latent_dim = expansion.shape[1:]
    value_dim = out.shape[2]
    key_dim = expanded_dim - value_dim
    request_tensors = (batch.seq_lens, batch.query_start_loc)
    cached_rows = _gather_latents_op(
        kv_cache, kv_scales, batch.block_tables, *request_tensors, num_tokens, latent_dim, q.dtype
    )
    latents, k_rope = cached_rows.split((latent_dim, head_dim - key_dim), 1)
    if batch.flash_requests is None or not flash_prefill.supports_rows(head_dim, value_dim, q.dtype):
        kv = functional.linear(latents, expansion.view(-1, latent_dim)).view(-1, num_heads, expanded_dim)
        _attend_whole_prompts_op(q, kv, k_rope, *request_tensors, scale, out)
        return
    keys, values = torch.empty_like(q), torch.empty_like(out)
    key_expansion, value_expansion = expansion.transpose(1, 2).split((key_dim, value_dim), 2)
    latents_by_head = latents.expand(num_heads, -1, -1)
    torch.bmm(latents_by_head, key_expansion, out=keys[:, :, :key_dim].transpose(0, 1))
    _copy_k_rope_to_heads_op(k_rope, keys)
    torch.bmm(latents_by_head, value_expansion, out=values.transpose(0, 1))
    flash_prefill.attend_to_step_tokens(q, keys, values, batch.flash_requests, scale, batch.max_query_len, out)


@torch.library.custom_op("nanovllm::project_heads", mutates_args=("out",))
def _project_heads_op(x: Tensor, weight: Tensor, num_projected: Tensor, out: Tensor) -> None:
    from nanovllm_kernels.attention.mla import triton_head_projection

    triton_head_projection.project_heads(x, weight, num_projected, out)


@torch.library.custom_op("nanovllm::latent_attention", mutates_args=())
def _latent_attention_op(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    narrow_work: list[Tensor],
    wide_work: list[Tensor],
    scale: float,
) -> Tensor:
    """Compute absorbed attention of the requests of two work lists. Rows of other requests are undefined.

    q_latent: contiguous [H, T, L]. q_rope: [T, H, R], the last dimension contiguous. Returns contiguous [T, H, L].
    """
    from nanovllm_kernels.attention.mla import triton_absorbed

    requests = PagedRequests(kv_cache, kv_scales, block_tables, seq_lens, query_start_loc)
    out = _allocate_results(q_latent)
    for work, many_queries in ((narrow_work, False), (wide_work, True)):
        if work:
            triton_absorbed.attend_to_latents(
                q_latent, q_rope, requests, WorkList(*work), scale, out, many_queries=many_queries
            )
    return out


def _allocate_results(q_latent: Tensor) -> Tensor:
    num_heads, num_tokens, latent_dim = q_latent.shape
    return q_latent.new_empty((num_tokens, num_heads, latent_dim))


_latent_attention_op.register_fake(lambda q_latent, *_: _allocate_results(q_latent))


@torch.library.custom_op("nanovllm::gather_latents", mutates_args=())
def _gather_latents_op(
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_tokens: int,
    latent_dim: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the cached latent and rotated key part of each token in a whole prompt: [num_tokens, L + R] in `dtype`.

    Rows of other tokens, and elements of latents that are not finite, are zeros: FlashAttention multiplies values past
    a prompt's end by 0, and 0 times NaN is NaN.
    """
    from nanovllm_kernels.attention.mla import triton_expanded

    out = kv_cache.new_zeros((num_tokens, kv_cache.shape[3]), dtype=dtype)
    requests = PagedRequests(kv_cache, kv_scales, block_tables, seq_lens, query_start_loc)
    triton_expanded.gather_latents(requests, latent_dim, out)
    return out


@_gather_latents_op.register_fake
def _(
    kv_cache: Tensor,
    _kv_scales: Tensor | None,
    _block_tables: Tensor,
    _seq_lens: Tensor,
    _query_start_loc: Tensor,
    num_tokens: int,
    _latent_dim: int,
    dtype: torch.dtype,
) -> Tensor:
    return kv_cache.new_empty((num_tokens, kv_cache.shape[3]), dtype=dtype)


@torch.library.custom_op("nanovllm::copy_k_rope_to_heads", mutates_args=("keys",))
def _copy_k_rope_to_heads_op(k_rope: Tensor, keys: Tensor) -> None:
    """Copy `k_rope` [T, R] to the last R elements of each head of `keys` [T, H, K + R]."""
    from nanovllm_kernels.attention.mla import triton_expanded

    triton_expanded.copy_k_rope_to_heads(k_rope, keys)


@torch.library.custom_op("nanovllm::attend_whole_prompts", mutates_args=("out",))
def _attend_whole_prompts_op(
    q: Tensor, kv: Tensor, k_rope: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float, out: Tensor
) -> None:
    """Compute attention of whole prompts over expanded keys and values. Write their rows of `out` [T, H, V].

    q: contiguous [T, H, K + R]. kv: contiguous [T, H, K + V]. k_rope: [T, R], stride 1 in R, any stride in T.
    """
    from nanovllm_kernels.attention.mla import triton_expanded

    triton_expanded.attend_whole_prompts(q, kv, k_rope, seq_lens, query_start_loc, scale, out)
