"""Query and key norm, rotary embedding and the write into the paged cache on CUDA, in one kernel."""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm_kernels.platform import can_overlap_launches

# Heads a program turns: enough bytes in flight for one program, and enough programs for a decode.
HEADS = 8


def rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
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
        NORM=q_weight is not None,
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
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token: a block of query heads, or a block of key heads with the values beside them."""
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
        _turn_heads(
            qkv_ptr,
            qkv_ptr,
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
            NORM,
        )
    else:
        heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        slot_ptr = kv_cache_ptr + tl.load(slot_mapping_ptr + token) * (2 * NUM_KV_HEADS * HEAD_DIM)
        _turn_heads(
            qkv_ptr + NUM_Q_HEADS * HEAD_DIM,
            slot_ptr,
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
            NORM,
        )
        dims = tl.arange(0, PADDED_DIM)
        places = (NUM_KV_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
        mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        v = tl.load(qkv_ptr + NUM_Q_HEADS * HEAD_DIM + places, mask=mask)
        tl.store(slot_ptr + places, v, mask=mask)


@triton.jit
def _turn_heads(
    source_ptr,
    target_ptr,
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
    NORM: tl.constexpr,
):
    """Norm and rotate `heads` of one token from `source_ptr` to `target_ptr`, both with their heads side by side.

    The two may be the same: every element is read before the program writes it.
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
    tl.store(target_ptr + places, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=mask)
    tl.store(target_ptr + places + HALF, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=mask)
    if 2 * HALF < HEAD_DIM:
        tl.store(target_ptr + rest_places, rest.to(dtype), mask=kept)
