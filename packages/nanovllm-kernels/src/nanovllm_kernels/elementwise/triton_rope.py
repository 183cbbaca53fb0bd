"""Query and key norm, rotary embedding and the write into the paged cache, FP8 or not, on CUDA in one kernel."""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.platform import can_overlap_launches
from nanovllm_kernels.triton_fp8 import inverse_scales, scale_exponents

# Heads per program: enough bytes in flight for one program, and enough programs for a decode.
HEADS = 8


def rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    *,
    keep_keys: bool,
) -> None:
    """See the package's `rope_and_cache`."""
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv_heads = kv_cache.shape[2] // 2
    num_q_heads = num_heads - 2 * num_kv_heads
    rot = cos_sin.shape[1]
    q_blocks = triton.cdiv(num_q_heads, HEADS)
    kv_blocks = triton.cdiv(num_kv_heads, HEADS)
    overlap = can_overlap_launches(qkv.device)
    _rope_and_cache[(num_tokens, q_blocks + kv_blocks)](
        qkv,
        cos_sin,
        positions,
        slot_mapping,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        eps,
        qkv.stride(0),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        HALF=rot // 2,
        PADDED_HALF=triton.next_power_of_2(rot // 2),
        HEADS=HEADS,
        Q_BLOCKS=q_blocks,
        PAGE_SIZE=kv_cache.shape[1],
        NORM=q_weight is not None,
        QUANTIZE=kv_scales is not None,
        KEEP=keep_keys,
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
    HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Process one token: a block of query heads, or a block of key heads and the value heads of the same numbers."""
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
        heads = block * HEADS + tl.arange(0, HEADS)
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
        heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
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
            KEEP,
        )
        dims = tl.arange(0, PADDED_DIM)
        places = (NUM_KV_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
        mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        own_v_ptrs = qkv_ptr + NUM_Q_HEADS * HEAD_DIM + places
        v = tl.load(own_v_ptrs, mask=mask, other=0.0)
        # FlashAttention multiplies values past a request's end by 0, and 0 times NaN is NaN.
        is_finite = tl.abs(v.to(tl.float32)) < float("inf")
        v = tl.where(is_finite, v, 0.0)
        if KEEP:
            tl.store(own_v_ptrs, v, mask=mask & (is_finite == 0))
        if QUANTIZE:
            v = v.to(tl.float32)
            exponents = scale_exponents(tl.max(tl.abs(v), 1))
            v *= inverse_scales(exponents)[:, None]
            scale_ptrs = kv_scales_ptr + (NUM_KV_HEADS + heads) * PAGE_SIZE
            tl.store(scale_ptrs, exponents.to(tl.uint8), mask=heads < NUM_KV_HEADS)
        tl.store(slot_ptr + places, v.to(slot_ptr.dtype.element_ty), mask=mask)


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
    KEEP: tl.constexpr,
):
    """Norm and rotate `heads` of one token from `source_ptr` to `target_ptr`, both with contiguous heads.

    KEEP: store the result at `source_ptr` too. The pointers may be equal: all elements are read before any is written.
    scales_ptr: with QUANTIZE, address of the token's first scale; the others follow at distances of PAGE_SIZE.
    """
    pairs = tl.arange(0, PADDED_HALF)
    dims = tl.arange(0, PADDED_DIM)
    inside = heads < NUM_HEADS
    mask = inside[:, None] & (pairs < HALF)[None, :]
    places = heads[:, None] * HEAD_DIM + pairs[None, :]
    first = tl.load(source_ptr + places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + places + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = target_ptr.dtype.element_ty
    if 2 * HALF < HEAD_DIM:
        kept = inside[:, None] & ((dims >= 2 * HALF) & (dims < HEAD_DIM))[None, :]
        rest_places = heads[:, None] * HEAD_DIM + dims[None, :]
        rest = tl.load(source_ptr + rest_places, mask=kept, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(rest * rest, 1)
            rest_weight = tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(weight_ptr + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        first *= factor * first_weight[None, :]
        second *= factor * second_weight[None, :]
        if 2 * HALF < HEAD_DIM:
            rest *= factor * rest_weight[None, :]
    rotated_first = first * cos[None, :] - second * sin[None, :]
    rotated_second = second * cos[None, :] + first * sin[None, :]
    if QUANTIZE:
        top = tl.maximum(tl.max(tl.abs(rotated_first), 1), tl.max(tl.abs(rotated_second), 1))
        if 2 * HALF < HEAD_DIM:
            top = tl.maximum(top, tl.max(tl.abs(rest), 1))
        exponents = scale_exponents(top)
        tl.store(scales_ptr + heads * PAGE_SIZE, exponents.to(tl.uint8), mask=inside)
        inverse = inverse_scales(exponents)[:, None]
        rotated_first *= inverse
        rotated_second *= inverse
        if 2 * HALF < HEAD_DIM:
            rest *= inverse
    tl.store(target_ptr + places, rotated_first.to(dtype), mask=mask)
    tl.store(target_ptr + places + HALF, rotated_second.to(dtype), mask=mask)
    if 2 * HALF < HEAD_DIM:
        tl.store(target_ptr + rest_places, rest.to(dtype), mask=kept)
    if KEEP:
        tl.store(source_ptr + places, rotated_first.to(dtype), mask=mask)
        tl.store(source_ptr + places + HALF, rotated_second.to(dtype), mask=mask)
        if NORM and 2 * HALF < HEAD_DIM:
            tl.store(source_ptr + rest_places, rest.to(dtype), mask=kept)
