"""Elementwise operators in plain torch: the reference for the kernels' tests, and the CPU path.

Each operator makes few torch calls, because for one token a call takes longer than the arithmetic.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm_kernels import fp8
from nanovllm_kernels.elementwise.rotation import QKNorm, RotationFactors


def prepare_norm_weight(weight: Tensor) -> Tensor:
    """See the package's `prepare_norm_weight`."""
    return torch.cat((weight, weight)).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the package's `rms_norm`. Computes a LayerNorm of (x, -x), in half the time of torch's RMSNorm.

    The concatenation (x, -x) has mean 0 and variance mean(x^2).
    """
    size = x.shape[-1]
    if weight.shape[0] == size:
        weight = prepare_norm_weight(weight)
    return torch.layer_norm(torch.cat((x, -x), -1), (2 * size,), weight, None, eps).narrow(-1, 0, size)


def gather_rotation(cos_sin: Tensor, positions: Tensor) -> RotationFactors:
    """Look up the cosines and sines of `positions`. Sines for the first half of the dimensions are negated."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    return RotationFactors(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rope_and_cache(
    qkv: Tensor,
    factors: RotationFactors,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    qk_norm: QKNorm | None,
) -> Tensor:
    """See the package's `rope_and_cache`. Returns all heads, not only the query heads."""
    _, page_size, num_cached_heads, head_dim = kv_cache.shape
    num_q_heads, num_kv_heads = qkv.shape[1] - num_cached_heads, num_cached_heads // 2
    if qk_norm is not None:
        queries, keys = qkv.narrow(1, 0, num_q_heads), qkv.narrow(1, num_q_heads, num_kv_heads)
        queries.copy_(rms_norm(queries, qk_norm.q_weight, qk_norm.eps))
        keys.copy_(rms_norm(keys, qk_norm.k_weight, qk_norm.eps))
    rope_dim = factors.cos.shape[-1]
    heads_to_rotate = qkv.narrow(1, 0, num_q_heads + num_kv_heads)
    if rope_dim < head_dim:
        heads_to_rotate = heads_to_rotate.narrow(2, 0, rope_dim)
    swapped = heads_to_rotate.roll(rope_dim // 2, -1)
    torch.addcmul(heads_to_rotate * factors.cos, swapped, factors.sin, out=heads_to_rotate)
    if kv_scales is None:
        qkv = qkv.to(kv_cache.dtype)
        kv_cache.flatten(0, 1).index_copy_(0, slot_mapping, qkv.narrow(1, num_q_heads, num_cached_heads))
        return qkv
    values, scale_exponents = fp8.quantize(qkv.narrow(1, num_q_heads, num_cached_heads))
    # Copy bytes, because torch cannot index float8 rows on a CPU.
    kv_cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slot_mapping, values.view(torch.uint8))
    kv_scales[slot_mapping // page_size, :, slot_mapping % page_size] = scale_exponents
    return qkv


def latent_rope_and_cache(
    q: Tensor,
    entries: Tensor,
    norm_weight: Tensor,
    eps: float,
    factors: RotationFactors,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
) -> None:
    """See the package's `latent_rope_and_cache`."""
    _, page_size, _, width = kv_cache.shape
    rope_dim = factors.cos.shape[-1]
    latent, k_rope = entries.split((width - rope_dim, rope_dim), -1)
    heads_to_rotate = q.narrow(2, q.shape[2] - rope_dim, rope_dim)
    torch.addcmul(
        heads_to_rotate * factors.cos, heads_to_rotate.roll(rope_dim // 2, -1), factors.sin, out=heads_to_rotate
    )
    rotated = torch.addcmul(k_rope * factors.cos.squeeze(1), k_rope.roll(rope_dim // 2, -1), factors.sin.squeeze(1))
    cached = torch.cat((rms_norm(latent, norm_weight, eps).to(rotated.dtype), rotated), -1)
    if kv_scales is None:
        kv_cache.view(-1, width).index_copy_(0, slot_mapping, cached.to(kv_cache.dtype))
        return
    values, scale_exponents = fp8.quantize(cached)
    kv_cache.view(torch.uint8).view(-1, width).index_copy_(0, slot_mapping, values.view(torch.uint8))
    kv_scales[slot_mapping // page_size, 0, slot_mapping % page_size] = scale_exponents


def silu_and_mul(x: Tensor) -> Tensor:
    """See the package's `silu_and_mul`. Rounds the SiLU, then the product."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def rms_norm_formula(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None) -> Tensor:
    """Compute the package's `rms_norm` with operators that torch.compile can fuse."""
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    normed = x_float * scale * weight.narrow(0, 0, x.shape[-1]).float()
    return normed.to((dtype or weight.dtype) if x.is_cuda else x.dtype)


def silu_and_mul_formula(x: Tensor) -> Tensor:
    """Compute the package's `silu_and_mul` with operators that torch.compile can fuse."""
    gate, up = x.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)
