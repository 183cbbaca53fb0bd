"""Query and key norm, rotation and the write to a bf16 cache, of few tokens on a CPU.

This room must not know attention or models.
"""

import numba
import numpy as np
from torch import Tensor

from nanovllm_kernels.jit import inverse_rms, kernel, pointer, to_bf16


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """What the package's `rope_and_cache` does, for float32 qkv [T, Hq + 2 Hkv, D] and a bf16 cache. cos, sin: as
    `reference.RotationRows`. q_weight, k_weight: float32, if any.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    _rotate(
        qkv.data_ptr(),
        qkv.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
        kv_cache.data_ptr(),
        0 if q_weight is None else q_weight.data_ptr(),
        0 if k_weight is None else k_weight.data_ptr(),
        eps,
        num_tokens,
        num_heads,
        kv_cache.shape[2],
        head_dim,
        cos.shape[-1],
    )


@kernel
def _rotate(
    qkv_ptr,
    stride,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    num_tokens,
    num_heads,
    num_cached,
    head_dim,
    rot,
):
    cos = numba.carray(pointer(cos_ptr), (num_tokens, rot), np.float32)
    sin = numba.carray(pointer(sin_ptr), (num_tokens, rot), np.float32)
    slots = numba.carray(pointer(slots_ptr), (num_tokens,), np.int64)
    num_q_heads = num_heads - num_cached
    num_turned = num_heads - num_cached // 2
    for token in range(num_tokens):
        heads = numba.carray(pointer(qkv_ptr + 4 * token * stride), (num_heads, head_dim), np.float32)
        cached_ptr = cache_ptr + 2 * slots[token] * num_cached * head_dim
        cached = numba.carray(pointer(cached_ptr), (num_cached, head_dim), np.uint16)
        for head in range(num_turned):
            weight_ptr = q_weight_ptr if head < num_q_heads else k_weight_ptr
            if weight_ptr:
                _norm(heads, head, weight_ptr, np.float32(eps))
            _turn(heads[head], cos[token], sin[token])
        for head in range(num_cached):
            for k in range(head_dim):
                cached[head, k] = to_bf16(heads[num_q_heads + head, k])


@kernel
def _norm(heads, head, weight_ptr, eps):
    head_dim = heads.shape[1]
    weight = numba.carray(pointer(weight_ptr), (head_dim,), np.float32)
    scale = inverse_rms(heads, head, 0, head_dim, eps)
    for k in range(head_dim):
        heads[head, k] *= scale * weight[k]


@kernel
def _turn(head, cos, sin):
    half = cos.shape[0] // 2
    for k in range(half):
        low, high = head[k], head[half + k]
        head[k] = low * cos[k] + high * sin[k]
        head[half + k] = high * cos[half + k] + low * sin[half + k]
