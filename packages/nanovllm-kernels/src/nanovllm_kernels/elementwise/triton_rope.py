"""Rotary embedding and the write into the paged cache on CUDA, in one kernel."""

# ruff: noqa: N803 - a kernel's compile-time constants are written in capitals, as Triton's users do

import torch
import triton
import triton.language as tl
from torch import Tensor

# Heads a program turns: enough bytes in flight for one program, and enough programs for a decode.
HEADS = 8


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """See the package's `rope_and_cache`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    rot = cos_sin.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    q_blocks = triton.cdiv(num_q_heads, HEADS)
    kv_blocks = triton.cdiv(num_kv_heads, HEADS)
    _rope_and_cache[(num_tokens, q_blocks + kv_blocks)](
        q,
        k,
        v,
        cos_sin,
        positions,
        slot_mapping,
        out,
        k_cache,
        v_cache,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        HALF=rot // 2,
        PADDED_HALF=triton.next_power_of_2(rot // 2),
        HEADS=HEADS,
        Q_BLOCKS=q_blocks,
        num_warps=2,
    )
    return out


@triton.jit
def _rope_and_cache(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_stride,
    k_stride,
    v_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
):
    """One token: a block of query heads, or a block of key heads with the values beside them."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    pairs = tl.arange(0, PADDED_HALF)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + pairs, mask=pairs < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + pairs, mask=pairs < HALF, other=0.0)
    if block < Q_BLOCKS:
        heads = block * HEADS + tl.arange(0, HEADS)
        _rotate_heads(
            q_ptr + token * q_stride,
            out_ptr + token * (NUM_Q_HEADS * HEAD_DIM),
            heads,
            cos,
            sin,
            NUM_Q_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            HALF,
            PADDED_HALF,
        )
    else:
        heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        cached = tl.load(slot_mapping_ptr + token) * (NUM_KV_HEADS * HEAD_DIM)
        _rotate_heads(
            k_ptr + token * k_stride,
            k_cache_ptr + cached,
            heads,
            cos,
            sin,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            HALF,
            PADDED_HALF,
        )
        dims = tl.arange(0, PADDED_DIM)
        places = heads[:, None] * HEAD_DIM + dims[None, :]
        mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        v = tl.load(v_ptr + token * v_stride + places, mask=mask)
        tl.store(v_cache_ptr + cached + places, v, mask=mask)


@triton.jit
def _rotate_heads(
    source_ptr,
    target_ptr,
    heads,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """Rotate `heads` of one token from `source_ptr` to `target_ptr`, both with their heads side by side."""
    pairs = tl.arange(0, PADDED_HALF)
    mask = (heads < NUM_HEADS)[:, None] & (pairs < HALF)[None, :]
    places = heads[:, None] * HEAD_DIM + pairs[None, :]
    first = tl.load(source_ptr + places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + places + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = target_ptr.dtype.element_ty
    tl.store(target_ptr + places, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=mask)
    tl.store(target_ptr + places + HALF, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=mask)
    if 2 * HALF < HEAD_DIM:
        dims = tl.arange(0, PADDED_DIM)
        kept = (heads < NUM_HEADS)[:, None] & ((dims >= 2 * HALF) & (dims < HEAD_DIM))[None, :]
        places = heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target_ptr + places, tl.load(source_ptr + places, mask=kept), mask=kept)
