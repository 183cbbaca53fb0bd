"""Norms and rotates queries and keys, and writes keys and values into the paged cache, in one CUDA kernel."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.elementwise.rotation import QKNorm, Rotation
from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import choose_scale_exponents, inverse_scales

# Heads per program. A larger number gives decodes too few programs. A smaller number gives programs too few loads.
HEADS_PER_PROGRAM = 8


def rope_and_cache(
    qkv: Tensor,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    qk_norm: QKNorm | None,
    *,
    writes_back_keys_values: bool,
) -> None:
    """See the package's `rope_and_cache`."""
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv_heads = kv_cache.shape[2] // 2
    num_q_heads = num_heads - 2 * num_kv_heads
    rope_dim = rotation.cos_sin.shape[1]
    q_blocks = triton.cdiv(num_q_heads, HEADS_PER_PROGRAM)
    kv_blocks = triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM)
    overlap = can_overlap_launches(qkv.device)
    _rope_and_cache[(num_tokens, q_blocks + kv_blocks)](
        qkv,
        rotation.cos_sin,
        rotation.positions,
        slot_mapping,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        qkv if qk_norm is None else qk_norm.q_weight,
        qkv if qk_norm is None else qk_norm.k_weight,
        0.0 if qk_norm is None else qk_norm.eps,
        qkv.stride(0),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        HALF=rope_dim // 2,
        PADDED_HALF=triton.next_power_of_2(rope_dim // 2),
        HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
        Q_BLOCKS=q_blocks,
        PAGE_SIZE=kv_cache.shape[1],
        NORM=qk_norm is not None,
        QUANTIZE=kv_scales is not None,
        WRITES_BACK=writes_back_keys_values,
        OVERLAP=overlap,
        num_warps=2,
        launch_pdl=overlap,
    )


@triton.jit
def _rope_and_cache(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    kv_cache_ptr,
    kv_scales_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    stride_token,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    WRITES_BACK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Process a block of one token's query heads, or a block of key heads and the value heads of the same indices."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    pairs = tl.arange(0, PADDED_HALF)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + pairs, mask=pairs < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + pairs, mask=pairs < HALF, other=0.0)
    qkv_ptr += token * stride_token
    if block < Q_BLOCKS:
        heads = block * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
        _rotate_heads(
            qkv_ptr,
            qkv_ptr,
            kv_scales_ptr,
            q_weight_ptr,
            eps,
            heads,
            cos,
            sin,
            NUM_Q_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            HALF,
            PADDED_HALF,
            PAGE_SIZE,
            NORM,
            False,
            False,
        )
    else:
        heads = (block - Q_BLOCKS) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
        slot = tl.load(slot_mapping_ptr + token)
        slot_ptr = kv_cache_ptr + slot * (2 * NUM_KV_HEADS * HEAD_DIM)
        kv_scales_ptr += slot // PAGE_SIZE * (2 * NUM_KV_HEADS * PAGE_SIZE) + slot % PAGE_SIZE
        _rotate_heads(
            qkv_ptr + NUM_Q_HEADS * HEAD_DIM,
            slot_ptr,
            kv_scales_ptr,
            k_weight_ptr,
            eps,
            heads,
            cos,
            sin,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            HALF,
            PADDED_HALF,
            PAGE_SIZE,
            NORM,
            QUANTIZE,
            WRITES_BACK,
        )
        dims = tl.arange(0, PADDED_DIM)
        offsets = (NUM_KV_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
        mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        v_source_ptrs = qkv_ptr + NUM_Q_HEADS * HEAD_DIM + offsets
        v = tl.load(v_source_ptrs, mask=mask, other=0.0)
        # Replace values that are not finite by 0. FlashAttention multiplies values past a request's end by 0, and
        # 0 times NaN or infinity is NaN.
        is_finite = tl.abs(v.to(tl.float32)) < float("inf")
        v = tl.where(is_finite, v, 0.0)
        if WRITES_BACK:
            tl.store(v_source_ptrs, v, mask=mask & (is_finite == 0))
        if QUANTIZE:
            v = v.to(tl.float32)
            exponents = choose_scale_exponents(tl.max(tl.abs(v), 1))
            v *= inverse_scales(exponents)[:, None]
            scale_ptrs = kv_scales_ptr + (NUM_KV_HEADS + heads) * PAGE_SIZE
            tl.store(scale_ptrs, exponents.to(tl.uint8), mask=heads < NUM_KV_HEADS)
        tl.store(slot_ptr + offsets, v.to(slot_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_heads(
    source_ptr,
    target_ptr,
    scales_ptr,
    weight_ptr,
    eps,
    heads,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    WRITES_BACK: tl.constexpr,
):
    """Norm and rotate `heads` of one token, and store them at `target_ptr`, which may equal `source_ptr`.

    WRITES_BACK: store the result at `source_ptr` too.
    scales_ptr: address of head 0's scale, used with QUANTIZE only. Scales of neighbouring heads are PAGE_SIZE apart.
    """
    pairs = tl.arange(0, PADDED_HALF)
    dims = tl.arange(0, PADDED_DIM)
    head_mask = heads < NUM_HEADS
    mask = head_mask[:, None] & (pairs < HALF)[None, :]
    offsets = heads[:, None] * HEAD_DIM + pairs[None, :]
    first_half = tl.load(source_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    second_half = tl.load(source_ptr + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = target_ptr.dtype.element_ty
    if 2 * HALF < HEAD_DIM:
        remaining_mask = head_mask[:, None] & ((dims >= 2 * HALF) & (dims < HEAD_DIM))[None, :]
        remaining_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
        remaining = tl.load(source_ptr + remaining_offsets, mask=remaining_mask, other=0.0).to(tl.float32)
    if NORM:
        square_sum = tl.sum(first_half * first_half, 1) + tl.sum(second_half * second_half, 1)
        if 2 * HALF < HEAD_DIM:
            square_sum += tl.sum(remaining * remaining, 1)
            remaining_weight = tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        norm_factor = tl.rsqrt(square_sum / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(weight_ptr + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        first_half *= norm_factor * first_weight[None, :]
        second_half *= norm_factor * second_weight[None, :]
        if 2 * HALF < HEAD_DIM:
            remaining *= norm_factor * remaining_weight[None, :]
    rotated_first = first_half * cos[None, :] - second_half * sin[None, :]
    rotated_second = second_half * cos[None, :] + first_half * sin[None, :]
    if QUANTIZE:
        max_magnitude = tl.maximum(tl.max(tl.abs(rotated_first), 1), tl.max(tl.abs(rotated_second), 1))
        if 2 * HALF < HEAD_DIM:
            max_magnitude = tl.maximum(max_magnitude, tl.max(tl.abs(remaining), 1))
        exponents = choose_scale_exponents(max_magnitude)
        tl.store(scales_ptr + heads * PAGE_SIZE, exponents.to(tl.uint8), mask=head_mask)
        inverse = inverse_scales(exponents)[:, None]
        rotated_first *= inverse
        rotated_second *= inverse
        if 2 * HALF < HEAD_DIM:
            remaining *= inverse
    tl.store(target_ptr + offsets, rotated_first.to(dtype), mask=mask)
    tl.store(target_ptr + offsets + HALF, rotated_second.to(dtype), mask=mask)
    if 2 * HALF < HEAD_DIM:
        tl.store(target_ptr + remaining_offsets, remaining.to(dtype), mask=remaining_mask)
    if WRITES_BACK:
        tl.store(source_ptr + offsets, rotated_first.to(dtype), mask=mask)
        tl.store(source_ptr + offsets + HALF, rotated_second.to(dtype), mask=mask)
        if NORM and 2 * HALF < HEAD_DIM:
            tl.store(source_ptr + remaining_offsets, remaining.to(dtype), mask=remaining_mask)
