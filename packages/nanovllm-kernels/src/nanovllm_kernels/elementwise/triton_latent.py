"""Prepares latent attention on CUDA in one kernel: the latent's norm, both rotations and the cache write."""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import inverse_scales, scale_exponents

# Query heads per program: only the end of each head is read, 128 bytes with DeepSeek's sizes.
HEADS = 16


def rope_and_cache(
    q: Tensor,
    latents: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
) -> None:
    """See the package's `latent_rope_and_cache`."""
    num_tokens, num_heads, head_dim = q.shape
    width = kv_cache.shape[3]
    rope_dim = cos_sin.shape[1]
    overlap = can_overlap_launches(q.device)
    _latent_rope_and_cache[(num_tokens, triton.cdiv(num_heads, HEADS) + 1)](
        q,
        latents,
        norm_weight,
        eps,
        cos_sin,
        positions,
        slot_mapping,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        q.stride(0),
        latents.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        LATENT=width - rope_dim,
        PADDED_LATENT=triton.next_power_of_2(width - rope_dim),
        HALF=rope_dim // 2,
        PADDED_HALF=triton.next_power_of_2(rope_dim // 2),
        HEADS=HEADS,
        QUANTIZE=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=2,
        launch_pdl=overlap,
    )


@triton.jit
def _latent_rope_and_cache(
    q_ptr,
    latents_ptr,
    norm_weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    kv_cache_ptr,
    kv_scales_ptr,
    q_stride_token,
    latents_stride_token,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Process one token: the first program its latent and key part, each other program a block of query heads."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    pairs = tl.arange(0, PADDED_HALF)
    pair_mask = pairs < HALF
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + pairs, mask=pair_mask, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + pairs, mask=pair_mask, other=0.0)
    if block == 0:
        latents_ptr += token * latents_stride_token
        dims = tl.arange(0, PADDED_LATENT)
        dim_mask = dims < LATENT
        latent = tl.load(latents_ptr + dims, mask=dim_mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_weight_ptr + dims, mask=dim_mask, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * weight
        k_first = tl.load(latents_ptr + LATENT + pairs, mask=pair_mask, other=0.0).to(tl.float32)
        k_second = tl.load(latents_ptr + LATENT + HALF + pairs, mask=pair_mask, other=0.0).to(tl.float32)
        rotated_first = k_first * cos - k_second * sin
        rotated_second = k_second * cos + k_first * sin
        slot = tl.load(slot_mapping_ptr + token)
        if QUANTIZE:
            top = tl.maximum(tl.max(tl.abs(rotated_first), 0), tl.max(tl.abs(rotated_second), 0))
            exponent = scale_exponents(tl.maximum(top, tl.max(tl.abs(latent), 0)))
            tl.store(kv_scales_ptr + slot, exponent.to(tl.uint8))
            inverse = inverse_scales(exponent)
            latent *= inverse
            rotated_first *= inverse
            rotated_second *= inverse
        cached_ptr = kv_cache_ptr + slot * (LATENT + 2 * HALF)
        cached_dtype = kv_cache_ptr.dtype.element_ty
        tl.store(cached_ptr + dims, latent.to(cached_dtype), mask=dim_mask)
        tl.store(cached_ptr + LATENT + pairs, rotated_first.to(cached_dtype), mask=pair_mask)
        tl.store(cached_ptr + LATENT + HALF + pairs, rotated_second.to(cached_dtype), mask=pair_mask)
    else:
        heads = (block - 1) * HEADS + tl.arange(0, HEADS)
        q_ptr += token * q_stride_token + HEAD_DIM - 2 * HALF
        places = heads[:, None] * HEAD_DIM + pairs[None, :]
        mask = (heads < NUM_HEADS)[:, None] & pair_mask[None, :]
        first = tl.load(q_ptr + places, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(q_ptr + places + HALF, mask=mask, other=0.0).to(tl.float32)
        dtype = q_ptr.dtype.element_ty
        tl.store(q_ptr + places, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=mask)
        tl.store(q_ptr + places + HALF, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=mask)
