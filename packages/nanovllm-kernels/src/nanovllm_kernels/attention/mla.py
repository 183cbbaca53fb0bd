"""Multi-head latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434) over a paged cache of latents.

The cache holds one latent and one rotated key part per token, shared by all heads. Cached tokens are attended to in the
latent space (absorbed): queries are projected into it, and results back. Prompts that are whole in a step are expanded
to keys and values, which costs less arithmetic. Put these last in a step: otherwise their queries are projected too.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.attention import (
    AttentionBatch,
    Backend,
    check_number_size,
    flash_prefill,
    mla_reference,
    reference,
    tiles,
)
from nanovllm_kernels.attention.flash_prefill import FlashRequests
from nanovllm_kernels.attention.work_list import Rule, WorkList, make_work_list, query_classes
from nanovllm_kernels.platform import has_flash_attention

__all__ = ["latent_attention", "plan_latent_batch"]


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
    whole: bool = False,
) -> AttentionBatch:
    """Prepare a step's latent attention once for all layers: `plan_batch` for a cache [N, P, 1, L + R].

    backend: "torch" is plain torch; all others are Triton. "flash" and "fastest" use FlashAttention, if `plan_batch`
        would, for prompts that are whole in the step.
    whole: ignored; the device finds such prompts.
    """
    batch = AttentionBatch(
        block_tables,
        seq_lens,
        query_start_loc,
        max_query_len,
        max_seq_len,
        in_place=False,
        gathers=None,
        narrow=None,
        wide=None,
        number_size=tiles.number_size((dtype or kv_cache.dtype).itemsize, kv_cache.element_size()),
        decode_lens=None,
        workspace=(),
        flash=None,
    )
    if backend == "torch":
        if num_decodes is None:
            raise ValueError('num_decodes is None, but the backend "torch" needs it')
        tables = (block_tables, seq_lens, query_start_loc)
        gathers = reference.plan_gathers(*tables, num_decodes, kv_cache.shape[1], dtype)
        return replace(batch, gathers=gathers)
    narrow, wide = (tiles.latent_config(num_heads, batch.number_size, wide=kind) for kind in (False, True))
    tile_heads = [tiles.latent_tile_heads(num_heads, config) for config in (narrow, wide)]
    block_q = [config.block_m // heads for config, heads in zip((narrow, wide), tile_heads, strict=True)]
    classes = query_classes(*block_q, 2 if num_decodes == 0 else 1, max_query_len)
    lists: list[WorkList | None] = []
    whole_lens = None
    for kind, config in enumerate((narrow, wide)):
        if not classes[kind]:
            lists.append(None)
            continue
        work, whole_lens = make_work_list(
            seq_lens,
            query_start_loc,
            classes[kind],
            Rule(min_context=1),
            config,
            block_q=block_q[kind],
            head_blocks=-(-num_heads // tile_heads[kind]),
            num_tokens=len(seq_lens) * max_query_len if num_tokens is None else num_tokens,
        )
        lists.append(work)
    batch = replace(batch, narrow=lists[0], wide=lists[1])
    if max_query_len == 1:
        return batch
    query_lens = query_start_loc.diff()
    whole = (query_lens > 1) & (query_lens == seq_lens)
    num_absorbed = (query_start_loc[1:] * ((query_lens > 0) & ~whole)).amax(0, keepdim=True)
    by_flash = backend in ("flash", "fastest") and has_flash_attention()
    flash = FlashRequests(query_start_loc, whole_lens) if by_flash and whole_lens is not None else None
    return replace(batch, flash=flash, num_absorbed=num_absorbed)


def latent_attention(
    q: Tensor,
    expansion: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Causal latent attention of a batch of requests over their pages.

    q: [T, H, K + R], request after request, contiguous; float32, float16 or bfloat16. Each head has the part that meets
        expanded keys, then the rotated part.
    expansion: [H, K + V, L], contiguous: per head, the rows that expand a latent to its key [K], then to its value [V].
        Of q's dtype; on a CPU `q` may be float32 with any dtype here.
    kv_cache: [N, P, 1, L + R], of `expansion`'s dtype or float8_e4m3fn, contiguous: normed latents, then rotated key
        parts; this step's are already written.
    batch: from `plan_latent_batch`.
    scale: factor for the products before the softmax.
    kv_scales: uint8 [N, 1, P], contiguous, for a float8_e4m3fn cache (see `fp8`), else None.
    Returns: contiguous [T, H, V] in `expansion`'s dtype.
    """
    if batch.gathers is not None:
        return mla_reference.latent_attention(q, expansion, kv_cache, kv_scales, batch.gathers, scale)
    check_number_size(q, kv_cache, batch)
    num_heads, expanded, latent_dim = expansion.shape
    rope_dim = kv_cache.shape[3] - latent_dim
    key_dim = q.shape[2] - rope_dim
    to_key, to_value = expansion.split((key_dim, expanded - key_dim), 1)
    queries = q.new_empty((num_heads, q.shape[0], latent_dim))
    _project_heads(q[:, :, :key_dim], to_key, batch.num_absorbed, queries.transpose(0, 1))
    found = _latent_attention_op(
        queries,
        q[:, :, key_dim:],
        kv_cache,
        kv_scales,
        batch.block_tables,
        batch.seq_lens,
        batch.query_start_loc,
        list(batch.narrow or ()),
        list(batch.wide or ()),
        scale,
    )
    out = q.new_empty((q.shape[0], num_heads, expanded - key_dim))
    _project_heads(found, to_value.transpose(1, 2), batch.num_absorbed, out)
    if batch.max_query_len > 1:
        _attend_whole_prompts(q, expansion, kv_cache, kv_scales, batch, scale, out)
    return out


def _project_heads(x: Tensor, weight: Tensor, count: Tensor | None, out: Tensor) -> None:
    """Write `x` [T, H, K] times `weight` [H, K, N] into `out` [T, H, N], for at least the first `count` tokens."""
    if count is None or len(x) < tiles.LEAST_COUNTED_TOKENS:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    else:
        _project_heads_op(x, weight, count, out)


def _attend_whole_prompts(
    q: Tensor,
    expansion: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    batch: AttentionBatch,
    scale: float,
    out: Tensor,
) -> None:
    """Attend over expanded keys and values; write the rows of `out` [T, H, V] of prompts that are whole in the step."""
    num_tokens, num_heads, head_dim = q.shape
    expanded, latent_dim = expansion.shape[1:]
    value_dim = out.shape[2]
    key_dim = expanded - value_dim
    lengths = (batch.seq_lens, batch.query_start_loc)
    cached = _gather_latents_op(kv_cache, kv_scales, batch.block_tables, *lengths, num_tokens, q.dtype)
    latents, k_rope = cached.split((latent_dim, head_dim - key_dim), 1)
    if batch.flash is None or not flash_prefill.supports_plain(head_dim, value_dim, q.dtype):
        kv = functional.linear(latents, expansion.view(-1, latent_dim)).view(-1, num_heads, expanded)
        _attend_whole_prompts_op(q, kv, k_rope, *lengths, scale, out)
        return
    keys, values = torch.empty_like(q), torch.empty_like(out)
    to_key, to_value = expansion.transpose(1, 2).split((key_dim, value_dim), 2)
    shared = latents.expand(num_heads, -1, -1)
    torch.bmm(shared, to_key, out=keys[:, :, :key_dim].transpose(0, 1))
    _spread_key_parts_op(k_rope, keys)
    torch.bmm(shared, to_value, out=values.transpose(0, 1))
    flash_prefill.plain_prefill(q, keys, values, batch.flash, scale, batch.max_query_len, out)


@torch.library.custom_op("nanovllm::project_heads", mutates_args=("out",))
def _project_heads_op(x: Tensor, weight: Tensor, count: Tensor, out: Tensor) -> None:
    """See `triton_mla_heads.project_heads`."""
    from nanovllm_kernels.attention import triton_mla_heads

    triton_mla_heads.project_heads(x, weight, count, out)


@torch.library.custom_op("nanovllm::latent_attention", mutates_args=())
def _latent_attention_op(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    narrow: list[Tensor],
    wide: list[Tensor],
    scale: float,
) -> Tensor:
    """Absorbed attention of the requests of two work lists; rows of other requests are undefined.

    q_latent: contiguous [H, T, L]. q_rope: [T, H, R], the last dimension contiguous. Returns contiguous [T, H, L].
    """
    from nanovllm_kernels.attention import triton_mla

    cache = (kv_cache, kv_scales, block_tables, seq_lens, query_start_loc)
    out = _empty_results(q_latent)
    for work, is_wide in ((narrow, False), (wide, True)):
        if work:
            triton_mla.paged_attention(q_latent, q_rope, *cache, WorkList(*work), scale, out, wide=is_wide)
    return out


def _empty_results(q_latent: Tensor) -> Tensor:
    num_heads, num_tokens, latent_dim = q_latent.shape
    return q_latent.new_empty((num_tokens, num_heads, latent_dim))


_latent_attention_op.register_fake(lambda q_latent, *_: _empty_results(q_latent))


@torch.library.custom_op("nanovllm::gather_latents", mutates_args=())
def _gather_latents_op(
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    num_tokens: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the cached latents [num_tokens, L + R], in `dtype`, of the step's tokens in whole prompts.

    Rows of other tokens are zeros, because FlashAttention reads past a prompt's end.
    """
    from nanovllm_kernels.attention import triton_mla_plain

    out = kv_cache.new_zeros((num_tokens, kv_cache.shape[3]), dtype=dtype)
    triton_mla_plain.gather_latents(kv_cache, kv_scales, block_tables, seq_lens, query_start_loc, out)
    return out


@_gather_latents_op.register_fake
def _(
    kv_cache: Tensor,
    _kv_scales: Tensor | None,
    _block_tables: Tensor,
    _seq_lens: Tensor,
    _query_start_loc: Tensor,
    num_tokens: int,
    dtype: torch.dtype,
) -> Tensor:
    return kv_cache.new_empty((num_tokens, kv_cache.shape[3]), dtype=dtype)


@torch.library.custom_op("nanovllm::spread_key_parts", mutates_args=("keys",))
def _spread_key_parts_op(k_rope: Tensor, keys: Tensor) -> None:
    """See `triton_mla_plain.spread_key_parts`."""
    from nanovllm_kernels.attention import triton_mla_plain

    triton_mla_plain.spread_key_parts(k_rope, keys)


@torch.library.custom_op("nanovllm::attend_whole_prompts", mutates_args=("out",))
def _attend_whole_prompts_op(
    q: Tensor, kv: Tensor, k_rope: Tensor, seq_lens: Tensor, query_start_loc: Tensor, scale: float, out: Tensor
) -> None:
    """Attend over expanded keys and values; write the rows of `out` [T, H, V] of prompts that are whole in the step.

    q: contiguous [T, H, K + R]. kv: contiguous [T, H, K + V]. k_rope: [T, R], tokens with any stride.
    """
    from nanovllm_kernels.attention import triton_mla_plain

    triton_mla_plain.attend_whole_prompts(q, kv, k_rope, seq_lens, query_start_loc, scale, out)
