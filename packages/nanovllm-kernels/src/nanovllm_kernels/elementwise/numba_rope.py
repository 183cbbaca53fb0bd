"""Normalizes and rotates float32 queries and keys, and writes keys and values to a bf16 cache, on a CPU."""

import numba
import numpy as np
import torch
from torch import Tensor

from nanovllm_kernels.elementwise.rotation import QKNorm, RotationFactors
from nanovllm_kernels.numba_jit import (
    OPENMP_FUNCTIONS_PTR,
    compile_region,
    inverse_rms,
    keep_alive,
    kernel,
    kernel_without_reordering,
    pointer,
    run_region,
    thread_count,
    thread_index,
    to_bf16,
)

# Indices of the int64 arguments of `_rotate_on_thread`. Element _EPS holds the bits of a float64.
(
    _OPENMP_FUNCTIONS_PTR,
    _QKV_PTR,
    _TOKEN_STRIDE,
    _COS_PTR,
    _SIN_PTR,
    _SLOTS_PTR,
    _CACHE_PTR,
    _Q_WEIGHT_PTR,
    _K_WEIGHT_PTR,
    _EPS,
    _NUM_TOKENS,
    _NUM_QKV_HEADS,
    _NUM_CACHED_HEADS,
    _HEAD_DIM,
    _ROPE_DIM,
) = range(15)
_NUM_ARGS = 15
# Maximum number of tokens for which a single thread is faster than several threads.
_MAX_SINGLE_THREAD_TOKENS = 8


def rope_and_cache(
    qkv: Tensor, factors: RotationFactors, slot_mapping: Tensor, kv_cache: Tensor, qk_norm: QKNorm | None
) -> None:
    """See the package's `rope_and_cache`. `qkv` and the weights of `qk_norm` are float32, and the cache is bf16."""
    num_tokens, num_qkv_heads, head_dim = qkv.shape
    _rotate_on_threads(
        OPENMP_FUNCTIONS_PTR,
        _ROTATE_REGION,
        qkv.data_ptr(),
        qkv.stride(0),
        factors.cos.data_ptr(),
        factors.sin.data_ptr(),
        slot_mapping.data_ptr(),
        kv_cache.data_ptr(),
        0 if qk_norm is None else qk_norm.q_weight.data_ptr(),
        0 if qk_norm is None else qk_norm.k_weight.data_ptr(),
        0.0 if qk_norm is None else qk_norm.eps,
        num_tokens,
        num_qkv_heads,
        kv_cache.shape[2],
        head_dim,
        factors.cos.shape[-1],
        torch.get_num_threads(),
    )


@kernel
def _rotate_on_threads(
    openmp_functions_ptr,
    region_address,
    qkv_ptr,
    token_stride,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    num_tokens,
    num_qkv_heads,
    num_cached_heads,
    head_dim,
    rope_dim,
    num_threads,
):
    args = np.empty(_NUM_ARGS, np.int64)
    args[_OPENMP_FUNCTIONS_PTR], args[_QKV_PTR], args[_TOKEN_STRIDE], args[_COS_PTR] = (
        openmp_functions_ptr,
        qkv_ptr,
        token_stride,
        cos_ptr,
    )
    args[_SIN_PTR], args[_SLOTS_PTR], args[_CACHE_PTR] = sin_ptr, slots_ptr, cache_ptr
    args[_Q_WEIGHT_PTR], args[_K_WEIGHT_PTR] = q_weight_ptr, k_weight_ptr
    args[_NUM_TOKENS], args[_NUM_QKV_HEADS], args[_NUM_CACHED_HEADS] = num_tokens, num_qkv_heads, num_cached_heads
    args[_HEAD_DIM], args[_ROPE_DIM] = head_dim, rope_dim
    args.view(np.float64)[_EPS] = eps
    if num_tokens <= _MAX_SINGLE_THREAD_TOKENS:
        _rotate_tokens(args, 0, num_tokens)
    else:
        run_region(region_address, np.int64(args.ctypes.data), num_threads)
    keep_alive(args)


def _rotate_on_thread(args_ptr):
    args = numba.carray(pointer(args_ptr), (_NUM_ARGS,), np.int64)
    index, num_threads, num_tokens = thread_index(args_ptr), thread_count(args_ptr), args[_NUM_TOKENS]
    _rotate_tokens(args, index * num_tokens // num_threads, (index + 1) * num_tokens // num_threads)


@kernel_without_reordering
def _rotate_tokens(args, first_token, end_token):
    num_tokens, num_qkv_heads, num_cached_heads = args[_NUM_TOKENS], args[_NUM_QKV_HEADS], args[_NUM_CACHED_HEADS]
    head_dim, rope_dim, eps = args[_HEAD_DIM], args[_ROPE_DIM], np.float32(args.view(np.float64)[_EPS])
    cos = numba.carray(pointer(args[_COS_PTR]), (num_tokens, rope_dim), np.float32)
    sin = numba.carray(pointer(args[_SIN_PTR]), (num_tokens, rope_dim), np.float32)
    slots = numba.carray(pointer(args[_SLOTS_PTR]), (num_tokens,), np.int64)
    num_q_heads = num_qkv_heads - num_cached_heads
    for token in range(first_token, end_token):
        token_ptr = args[_QKV_PTR] + 4 * token * args[_TOKEN_STRIDE]
        heads = numba.carray(pointer(token_ptr), (num_qkv_heads, head_dim), np.float32)
        cached_ptr = args[_CACHE_PTR] + 2 * slots[token] * num_cached_heads * head_dim
        cached = numba.carray(pointer(cached_ptr), (num_cached_heads, head_dim), np.uint16)
        for head in range(num_qkv_heads - num_cached_heads // 2):
            weight_ptr = args[_Q_WEIGHT_PTR] if head < num_q_heads else args[_K_WEIGHT_PTR]
            if weight_ptr:
                _norm_head(heads, head, weight_ptr, eps)
            _rotate_head(heads[head], cos[token], sin[token])
        for head in range(num_cached_heads):
            for dim in range(head_dim):
                cached[head, dim] = to_bf16(heads[num_q_heads + head, dim])


@kernel_without_reordering
def _norm_head(heads, head, weight_ptr, eps):
    head_dim = heads.shape[1]
    weight = numba.carray(pointer(weight_ptr), (head_dim,), np.float32)
    scale = inverse_rms(heads, head, 0, head_dim, eps)
    for dim in range(head_dim):
        heads[head, dim] *= scale * weight[dim]


@kernel_without_reordering
def _rotate_head(head, cos, signed_sin):
    """Rotate one head. signed_sin: the sine, negated in the first half."""
    half = cos.shape[0] // 2
    for dim in range(half):
        first_value, second_value = head[dim], head[half + dim]
        head[dim] = first_value * cos[dim] + second_value * signed_sin[dim]
        head[half + dim] = second_value * cos[half + dim] + first_value * signed_sin[half + dim]


_ROTATE_REGION = compile_region(_rotate_on_thread)
