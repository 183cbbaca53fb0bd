"""Computes latent attention in plain torch: the reference for the kernels' tests, and the CPU path.

Decodes attend directly to latents, in groups (`DecodeGroup`). Prefills attend to expanded keys and values, one request
at a time. A key has K unrotated and R rotated elements. A value has V elements.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.attention.gqa.gqa_reference import convert_mask, gather_decodes, gather_pages
from nanovllm_kernels.attention.plan.gathers import DecodeGroup, GatherPlan, PrefillRequest


def latent_attention(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gather_plan: GatherPlan, scale: float
) -> Tensor:
    """Compute what `mla.latent_attention` describes, for all requests of `gather_plan`."""
    q = q.to(expansion.dtype)
    num_heads, expanded_dim, latent_dim = expansion.shape
    value_dim = expanded_dim - (q.shape[2] - (kv_cache.shape[3] - latent_dim))
    out = q.new_empty((q.shape[0], num_heads, value_dim))
    for group in gather_plan.decodes:
        queries = q[group.begin : group.end]
        out[group.begin : group.end] = _attend_decodes(queries, expansion, kv_cache, kv_scales, group, scale)
    for prefill in gather_plan.prefills:
        queries = q[prefill.begin : prefill.end]
        out[prefill.begin : prefill.end] = _attend_prefill(queries, expansion, kv_cache, kv_scales, prefill, scale)
    return out


def _attend_decodes(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, group: DecodeGroup, scale: float
) -> Tensor:
    """Compute attention of one query per request. q: [requests, H, K + R]. Result: [requests, H, V]."""
    cached_rows = gather_decodes(kv_cache, kv_scales, group, q.dtype).reshape(q.shape[0], -1, kv_cache.shape[3])
    k = cached_rows[:, : group.max_len].unsqueeze(1)
    latent_dim = expansion.shape[2]
    q_unrotated, q_rope = _split_last(q, k.shape[3] - latent_dim)
    key_dim = q_unrotated.shape[2]
    key_expansion, value_expansion = expansion[:, :key_dim], expansion[:, key_dim:]
    q_latent = torch.bmm(q_unrotated.transpose(0, 1), key_expansion).transpose(0, 1)
    # All heads share the keys, so the heads become queries of one head.
    queries = torch.cat((q_latent, q_rope), -1).unsqueeze(1)
    mask = convert_mask(group.mask, q.dtype)
    latent_results = functional.scaled_dot_product_attention(queries, k, k[..., :latent_dim], mask, scale=scale)
    return torch.bmm(latent_results.squeeze(1).transpose(0, 1), value_expansion.transpose(1, 2)).transpose(0, 1)


def _attend_prefill(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, prefill: PrefillRequest, scale: float
) -> Tensor:
    """Compute attention of all queries of one request. q: [queries, H, K + R]. Result: [queries, H, V]."""
    slot_rows = gather_pages(kv_cache, kv_scales, prefill.pages, q.dtype).view(-1, kv_cache.shape[3])
    cached_rows = slot_rows[: prefill.length]
    num_heads, expanded_dim, latent_dim = expansion.shape
    latents, k_rope = _split_last(cached_rows, cached_rows.shape[1] - latent_dim)
    kv = functional.linear(latents, expansion.view(-1, latent_dim)).view(-1, num_heads, expanded_dim).transpose(0, 1)
    key_dim = q.shape[2] - k_rope.shape[1]
    k = torch.cat((kv[..., :key_dim], k_rope.expand(num_heads, -1, -1)), -1)
    mask = convert_mask(None if prefill.mask is None else prefill.mask[: len(q), : prefill.length], q.dtype)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, kv[..., key_dim:], mask, is_causal=mask is None, scale=scale
    )
    return out.transpose(0, 1)


def _split_last(x: Tensor, num_last: int) -> tuple[Tensor, Tensor]:
    """Split the last dimension before its last `num_last` elements."""
    return x[..., : x.shape[-1] - num_last], x[..., x.shape[-1] - num_last :]
