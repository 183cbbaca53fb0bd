"""Query and key norm, rotation and the write to a bf16 cache, for float32 rows on a CPU."""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.numba_jit import (
    OPENMP,
    inverse_rms,
    keep_alive,
    kernel,
    ordered_kernel,
    pointer,
    region,
    run_region,
    thread_count,
    thread_index,
    to_bf16,
)

# Up to this many tokens are rotated by one thread: starting another would take longer.
_TOKENS_ALONE = 8


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
    """Implement the package's `rope_and_cache` for float32 qkv [T, Hq + 2 Hkv, D] and a bf16 cache.

    cos, sin: see `reference.RotationRows`. q_weight, k_weight: float32, or None.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    _rotate(
        OPENMP,
        _TOKENS_OF_THREAD,
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
        torch.get_num_threads(),
    )


@kernel
def _rotate(
    openmp,
    region,
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
    num_threads,
):
    args = np.empty(15, np.int64)
    args[0], args[1], args[2], args[3], args[4], args[5] = openmp, qkv_ptr, stride, cos_ptr, sin_ptr, slots_ptr
    args[6], args[7], args[8], args[10], args[11] = cache_ptr, q_weight_ptr, k_weight_ptr, num_tokens, num_heads
    args[12], args[13], args[14] = num_cached, head_dim, rot
    args.view(np.float64)[9] = eps
    if num_tokens <= _TOKENS_ALONE:
        _rotate_tokens(args, 0, num_tokens)
    else:
        run_region(region, np.int64(args.ctypes.data), num_threads)
    keep_alive(args)


def _tokens_of_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (15,), np.int64)
    index, count, num_tokens = thread_index(args_ptr), thread_count(args_ptr), args[10]
    _rotate_tokens(args, index * num_tokens // count, (index + 1) * num_tokens // count)


@ordered_kernel
def _rotate_tokens(args, begin, end):
    qkv_ptr, stride, cos_ptr, sin_ptr, slots_ptr, cache_ptr = args[1], args[2], args[3], args[4], args[5], args[6]
    q_weight_ptr, k_weight_ptr, eps = args[7], args[8], args.view(np.float64)[9]
    num_tokens, num_heads, num_cached, head_dim, rot = args[10], args[11], args[12], args[13], args[14]
    cos = numba.carray(pointer(cos_ptr), (num_tokens, rot), np.float32)
    sin = numba.carray(pointer(sin_ptr), (num_tokens, rot), np.float32)
    slots = numba.carray(pointer(slots_ptr), (num_tokens,), np.int64)
    num_q_heads = num_heads - num_cached
    num_rotated = num_heads - num_cached // 2
    for token in range(begin, end):
        heads = numba.carray(pointer(qkv_ptr + 4 * token * stride), (num_heads, head_dim), np.float32)
        cached_ptr = cache_ptr + 2 * slots[token] * num_cached * head_dim
        cached = numba.carray(pointer(cached_ptr), (num_cached, head_dim), np.uint16)
        for head in range(num_rotated):
            weight_ptr = q_weight_ptr if head < num_q_heads else k_weight_ptr
            if weight_ptr:
                _norm(heads, head, weight_ptr, np.float32(eps))
            _rotate_head(heads[head], cos[token], sin[token])
        for head in range(num_cached):
            for k in range(head_dim):
                cached[head, k] = to_bf16(heads[num_q_heads + head, k])


@ordered_kernel
def _norm(heads, head, weight_ptr, eps):
    head_dim = heads.shape[1]
    weight = numba.carray(pointer(weight_ptr), (head_dim,), np.float32)
    scale = inverse_rms(heads, head, 0, head_dim, eps)
    for k in range(head_dim):
        heads[head, k] *= scale * weight[k]


@ordered_kernel
def _rotate_head(head, cos, sin):
    half = cos.shape[0] // 2
    for k in range(half):
        low, high = head[k], head[half + k]
        head[k] = low * cos[k] + high * sin[k]
        head[half + k] = high * cos[half + k] + low * sin[half + k]


_TOKENS_OF_THREAD = region(_tokens_of_thread)
