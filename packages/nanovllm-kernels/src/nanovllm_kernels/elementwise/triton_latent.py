"""Prepares latent attention on CUDA in one kernel: the latent's norm, both rotations and the cache write."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.elementwise.rotation import Rotation
from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import choose_scale_exponents, inverse_scales

# Query heads per program. A program reads only the rotated end of each head.
HEADS_PER_PROGRAM = 16


def rope_and_cache(
    q: Tensor,
    entries: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
) -> None:
    """See the package's `latent_rope_and_cache`."""
    num_tokens, num_heads, head_dim = q.shape
    entry_width = kv_cache.shape[3]
    rope_dim = rotation.cos_sin.shape[1]
    overlap = can_overlap_launches(q.device)
    _latent_rope_and_cache[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM) + 1)](
        q,
        entries,
        norm_weight,
        eps,
        rotation.cos_sin,
        rotation.positions,
        slot_mapping,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        q.stride(0),
        entries.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        LATENT=entry_width - rope_dim,
        PADDED_LATENT=triton.next_power_of_2(entry_width - rope_dim),
        HALF=rope_dim // 2,
        PADDED_HALF=triton.next_power_of_2(rope_dim // 2),
        HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
        QUANTIZE=kv_scales is not None,
        OVERLAP=overlap,
        num_warps=2,
        launch_pdl=overlap,
    )


@triton.jit
def _latent_rope_and_cache(
    q_ptr,
    entries_ptr,
    norm_weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    kv_cache_ptr,
    kv_scales_ptr,
    q_stride_token,
    entries_stride_token,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED_LATENT: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Process one token's latent and shared key in program 0, or a block of query heads in the other programs."""
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
        entries_ptr += token * entries_stride_token
        latent_dims = tl.arange(0, PADDED_LATENT)
        latent_mask = latent_dims < LATENT
        latent = tl.load(entries_ptr + latent_dims, mask=latent_mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_weight_ptr + latent_dims, mask=latent_mask, other=0.0).to(tl.float32)
        latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * weight
        k_first_half = tl.load(entries_ptr + LATENT + pairs, mask=pair_mask, other=0.0).to(tl.float32)
        k_second_half = tl.load(entries_ptr + LATENT + HALF + pairs, mask=pair_mask, other=0.0).to(tl.float32)
        rotated_first = k_first_half * cos - k_second_half * sin
        rotated_second = k_second_half * cos + k_first_half * sin
        slot = tl.load(slot_mapping_ptr + token)
        if QUANTIZE:
            max_magnitude = tl.maximum(tl.max(tl.abs(rotated_first), 0), tl.max(tl.abs(rotated_second), 0))
            exponent = choose_scale_exponents(tl.maximum(max_magnitude, tl.max(tl.abs(latent), 0)))
            tl.store(kv_scales_ptr + slot, exponent.to(tl.uint8))
            inverse = inverse_scales(exponent)
            latent *= inverse
            rotated_first *= inverse
            rotated_second *= inverse
        cached_ptr = kv_cache_ptr + slot * (LATENT + 2 * HALF)
        cached_dtype = kv_cache_ptr.dtype.element_ty
        tl.store(cached_ptr + latent_dims, latent.to(cached_dtype), mask=latent_mask)
        tl.store(cached_ptr + LATENT + pairs, rotated_first.to(cached_dtype), mask=pair_mask)
        tl.store(cached_ptr + LATENT + HALF + pairs, rotated_second.to(cached_dtype), mask=pair_mask)
    else:
        heads = (block - 1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
        q_ptr += token * q_stride_token + HEAD_DIM - 2 * HALF
        offsets = heads[:, None] * HEAD_DIM + pairs[None, :]
        mask = (heads < NUM_HEADS)[:, None] & pair_mask[None, :]
        first_half = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        second_half = tl.load(q_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
        dtype = q_ptr.dtype.element_ty
        tl.store(q_ptr + offsets, (first_half * cos[None, :] - second_half * sin[None, :]).to(dtype), mask=mask)
        tl.store(q_ptr + offsets + HALF, (second_half * cos[None, :] + first_half * sin[None, :]).to(dtype), mask=mask)
