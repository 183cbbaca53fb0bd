"""Computes latent attention in plain torch: the reference for the kernels' tests, and the CPU path.

Decodes of one gather (see `plan.gathers`) attend together, in the latent space (absorbed attention). Prefills attend
one request at a time, to keys and values that are expanded from the request's latents.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.attention.gqa.gqa_reference import convert_mask, gather_decodes, gather_pages
from nanovllm_kernels.attention.plan.gathers import DecodeGather, GatherPlan, PrefillGather


def latent_attention(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather_plan: GatherPlan, scale: float
) -> Tensor:
    """Compute the package's `latent_attention` for all gathers of `gather_plan`."""
    q = q.to(expansion.dtype)
    num_heads, expanded_dim, latent_dim = expansion.shape
    value_dim = expanded_dim - (q.shape[2] - (kv_cache.shape[3] - latent_dim))
    out = q.new_empty((q.shape[0], num_heads, value_dim))
    for gather in gather_plan.decodes:
        queries = q[gather.begin : gather.end]
        out[gather.begin : gather.end] = _attend_decodes(queries, expansion, kv_cache, kv_scales, gather, scale)
    for gather in gather_plan.prefills:
        queries = q[gather.begin : gather.end]
        out[gather.begin : gather.end] = _attend_prefill(queries, expansion, kv_cache, kv_scales, gather, scale)
    return out


def _attend_decodes(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather: DecodeGather, scale: float
) -> Tensor:
    """Attend for one query per request. q is [n, H, K + R], the result [n, H, V]."""
    cached_rows = gather_decodes(kv_cache, kv_scales, gather, q.dtype).reshape(q.shape[0], -1, kv_cache.shape[3])
    k = cached_rows[:, : gather.max_len].unsqueeze(1)
    latent_dim = expansion.shape[2]
    q_key, q_rope = _split_last(q, k.shape[3] - latent_dim)
    key_dim = q_key.shape[2]
    key_expansion, value_expansion = expansion[:, :key_dim], expansion[:, key_dim:]
    q_latent = torch.bmm(q_key.transpose(0, 1), key_expansion).transpose(0, 1)
    # All heads share the keys: pass the heads as queries of one head.
    queries = torch.cat((q_latent, q_rope), -1).unsqueeze(1)
    mask = convert_mask(gather.mask, q.dtype)
    latent_results = functional.scaled_dot_product_attention(queries, k, k[..., :latent_dim], mask, scale=scale)
    return torch.bmm(latent_results.squeeze(1).transpose(0, 1), value_expansion.transpose(1, 2)).transpose(0, 1)


def _attend_prefill(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather: PrefillGather, scale: float
) -> Tensor:
    """Attend for all queries of one request. q is [n, H, K + R], the result [n, H, V]."""
    cached_rows = gather_pages(kv_cache, kv_scales, gather.pages, q.dtype).view(-1, kv_cache.shape[3])[: gather.length]
    num_heads, expanded_dim, latent_dim = expansion.shape
    latents, k_rope = _split_last(cached_rows, cached_rows.shape[1] - latent_dim)
    kv = functional.linear(latents, expansion.view(-1, latent_dim)).view(-1, num_heads, expanded_dim).transpose(0, 1)
    key_dim = q.shape[2] - k_rope.shape[1]
    k = torch.cat((kv[..., :key_dim], k_rope.expand(num_heads, -1, -1)), -1)
    mask = convert_mask(gather.mask, q.dtype)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, kv[..., key_dim:], mask, is_causal=mask is None, scale=scale
    )
    return out.transpose(0, 1)


def _split_last(x: Tensor, num_last: int) -> tuple[Tensor, Tensor]:
    """Split the last dimension. Return (elements before the last `num_last`, last `num_last` elements)."""
    return x[..., : x.shape[-1] - num_last], x[..., x.shape[-1] - num_last :]
