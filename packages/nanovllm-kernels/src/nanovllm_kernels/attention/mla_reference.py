"""Latent attention in plain torch: the reference for the kernels' tests, and the CPU path.

Decodes absorb, a bounded number of tokens at a time. Prefills expand their whole context, one request at a time, which
is cheaper than wide heads. `reference.plan_gathers` plans what to gather.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels.attention.reference import DecodeGroup, Gathers, Prefill, gather, gather_slots, mask_in


def latent_attention(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, gathers: Gathers, scale: float
) -> Tensor:
    """See `mla.latent_attention`."""
    q = q.to(expansion.dtype)
    num_heads, expanded, latent_dim = expansion.shape
    value_dim = expanded - (q.shape[2] - (kv_cache.shape[3] - latent_dim))
    out = q.new_empty((q.shape[0], num_heads, value_dim))
    for group in gathers.decodes:
        queries = q[group.begin : group.end]
        out[group.begin : group.end] = _decode(queries, expansion, kv_cache, kv_scales, group, scale)
    for prefill in gathers.prefills:
        queries = q[prefill.begin : prefill.end]
        out[prefill.begin : prefill.end] = _prefill(queries, expansion, kv_cache, kv_scales, prefill, scale)
    return out


def _decode(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, group: DecodeGroup, scale: float
) -> Tensor:
    """Attend for one query per request: q [n, H, K + R] to [n, H, V]."""
    take = gather if group.mask is None else gather_slots
    cached = take(kv_cache, kv_scales, group.index, q.dtype).reshape(q.shape[0], -1, kv_cache.shape[3])
    k = cached[:, : group.longest].unsqueeze(1)
    latent_dim = expansion.shape[2]
    q_key, q_rope = _split(q, k.shape[3] - latent_dim)
    to_key, to_value = _split_expansion(expansion, q_key.shape[2])
    absorbed = torch.bmm(q_key.transpose(0, 1), to_key).transpose(0, 1)
    # All heads share the keys: pass the heads as queries of one head.
    queries = torch.cat((absorbed, q_rope), -1).unsqueeze(1)
    mask = mask_in(q.dtype, group.mask)
    found = functional.scaled_dot_product_attention(queries, k, k[..., :latent_dim], mask, scale=scale)
    return torch.bmm(found.squeeze(1).transpose(0, 1), to_value.transpose(1, 2)).transpose(0, 1)


def _prefill(
    q: Tensor, expansion: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, prefill: Prefill, scale: float
) -> Tensor:
    """Attend for all queries of one request: q [n, H, K + R] to [n, H, V]."""
    cached = gather(kv_cache, kv_scales, prefill.pages, q.dtype).view(-1, kv_cache.shape[3])[: prefill.length]
    num_heads, expanded, latent_dim = expansion.shape
    latents, k_rope = _split(cached, cached.shape[1] - latent_dim)
    kv = functional.linear(latents, expansion.view(-1, latent_dim)).view(-1, num_heads, expanded).transpose(0, 1)
    key_dim = q.shape[2] - k_rope.shape[1]
    k = torch.cat((kv[..., :key_dim], k_rope.expand(num_heads, -1, -1)), -1)
    mask = mask_in(q.dtype, prefill.mask)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, kv[..., key_dim:], mask, is_causal=mask is None, scale=scale
    )
    return out.transpose(0, 1)


def _split(x: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Split the last dimension before its `last` elements."""
    return x[..., : x.shape[-1] - last], x[..., x.shape[-1] - last :]


def _split_expansion(expansion: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    return expansion[:, :key_dim], expansion[:, key_dim:]
